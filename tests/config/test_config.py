"""Every key of the configuration is in the docs, and every preset is sound."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from fpld import InputError, config, registry
from fpld.config import Config
from fpld.rules import MEAN
from fpld.students.configs import config_class
from fpld.students.ngram import NGram
from fpld.units import parse_rate

SITE = runpy.run_path(str(Path(__file__).parents[2] / "docs/hooks.py"))


def sections() -> dict[str, type[BaseModel]]:
    found: dict[str, type[BaseModel]] = {}
    for name, field in Config.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found[name] = kind
    return found


@pytest.mark.parametrize("section", sections())
def test_every_key_is_documented(section: str) -> None:
    page = SITE["configuration_page"]()
    said = SITE["attribute_texts"](sections()[section])
    below = re.split(rf"^## \[+{section}\]+\n", page, flags=re.MULTILINE)[1].partition("\n## ")[0]
    for key in sections()[section].model_fields:
        assert said[key].endswith("."), key
        assert re.search(rf"^\| `{key}` \| .+ \| .+ \| {re.escape(said[key])} \|$", below, re.MULTILINE), key


@pytest.mark.parametrize("name", config.presets())
def test_presets_are_sound(name: str) -> None:
    loaded, text = config.read_config(name)
    assert loaded == config.parse_config(text, name)
    assert text.startswith("#")


def test_a_seed_that_was_given_counts_when_the_text_is_read_again(tmp_path: Path) -> None:
    first, text = config.read_config("adaptive", seed=7)
    assert first.run.seed == 7
    file = tmp_path / "config.toml"
    file.write_text(text)
    assert config.read_config(file) == (first, text)
    assert config.read_config(file, seed=7) == (first, text)
    other, changed = config.read_config(file, seed=8)
    assert (other.run.seed, changed.count("--seed")) == (8, 1)


def test_the_demonstration_is_a_preset_with_two_thin_uplinks() -> None:
    demo, _ = config.read_config("demo")
    bits = sorted(node.context_bits or 0 for node in demo.nodes)
    assert bits[1] <= 0.55 * bits[2]


@pytest.mark.parametrize(
    ("text", "rate"), [("64 kbit/s", 64e3), ("1.5Mbit/s", 1.5e6), ("300 bit/s", 300.0), (9600, 9600)]
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["64", "64 kB/s", "fast", "kbit/s", "-5 kbit/s x"])
def test_bad_rates_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a rate such as"):
        parse_rate(text)


BASE = config.read_config("adaptive")[1]
STUDENT = 'kind = "ngram"\norder = 2\nbuckets = 2048\nbatch = 96'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'rule = "mean"',
            'rule = "mixtur"',
            "combine.rule: rule must be one of fitted, geometric, guarded, mean, median, mixture, precision",
        ),
        ('name = "uniform"', 'name = "uniforn"', "codec.name: "),
        (
            'allocator = "optimal"',
            'allocator = "best"',
            "budget.allocator: ",
        ),
        ('estimator = "distortion"', 'estimator = "x"', "budget.estimator: "),
        (
            'estimator = "distortion"',
            'estimator = "curves"',
            "budget: allocator ",
        ),
        ("warmup = 1", "forget = 0.5", "budget: forget "),
        (
            'corpus = "sotu"',
            'corpus = "soto"',
            "data.corpus: ",
        ),
        (
            '["alone", "float32"]',
            '["alone", "zero"]',
            "baselines.methods[1]: ",
        ),
        (
            'kind = "ngram"',
            'kind = "oracle"',
            "student.kind: ",
        ),
        ('kind = "ngram"', "", "student.kind: is missing"),
        ('kind = "ngram"', 'kind = ["ngram"]', "student.kind: "),
        (
            "order = 2",
            "width = 2",
            "student.width: unknown key",
        ),
        ("order = 2", "vocab = 512", "student.vocab: unknown key"),
        ("order = 2", "order = true", "student.order: "),
        ("order = 2", "order = 0", "student.order: "),
        ("order = 2", 'device = "tpu"', "student.device: "),
        (STUDENT, 'kind = "transformer"\nwidth = 90', "student.width: "),
        (STUDENT, 'kind = "transformer"\nwidth = "9"', "student.width: "),
        (STUDENT, 'kind = "huggingface"\nlora = 4', "student.path: is missing"),
        (
            "clip = 48.0",
            "clip = 48.0\nstudent = {kind = 'ngram', order = -1}",
            "nodes[2].student.order: ",
        ),
        (
            '["alone", "float32"]',
            '["fedavg"]\n[[nodes]]\nname = "other"\nbits = 4.0\nstudent = {kind = "ngram", order = 1}',
            "baselines.methods: 'fedavg' ",
        ),
        ('["alone", "float32"]', '["flora"]', "baselines.methods: 'flora' "),
        (
            "clip = 48.0",
            "clip = 48.0\neffort = 2.0",
            "nodes[2]: from_base and steps_factor ",
        ),
        ("clip = 48.0", "clip = 48.0\nstudent = 'ngram'", "nodes[2].student: "),
    ],
)
def test_a_name_or_field_that_is_not_known_fails_at_once_and_names_the_key(old: str, new: str, message: str) -> None:
    assert old in BASE
    with pytest.raises(InputError) as caught:
        config.parse_config(BASE.replace(old, new, 1), "t")
    assert f"t: {message}" in str(caught.value)


def test_a_misspelt_table_is_one_mistake_and_the_closest_names_are_offered() -> None:
    with pytest.raises(InputError) as caught:
        config.parse_config(BASE.replace("[probe]", "[prob]", 1), "t")
    assert str(caught.value) == "t: prob: unknown key: did you mean probe?"
    with pytest.raises(InputError, match=r"'mixtur': did you mean mixture[?]$"):
        registry.rules.get("mixtur")
    with pytest.raises(InputError, match=r"hospital does not exist: .*: did you mean hospitals[?]$"):
        config.read_config("hospital")
    with pytest.raises(InputError, match=r"corpus must be one of [^?]*'nothing-like-it'$"):
        registry.corpora.get("nothing-like-it")


def test_a_model_is_taught_only_where_base_models_are_trained() -> None:
    taught = BASE.replace("clip = 48.0", "clip = 48.0\ntaught = true\nstudent = {kind = 'ngram', order = 1}", 1)
    assert config.parse_config(taught, "t").nodes[2].taught
    renamed = taught.replace("taught = true", "from_base = true\nsteps_factor = 2.5")
    node = config.parse_config(renamed, "t").nodes[2]
    assert (node.taught, node.effort) == (True, 2.5)
    with pytest.raises(InputError, match="from_base and taught are the same key"):
        config.parse_config(renamed.replace("from_base = true", "from_base = true\ntaught = true"), "t")
    with pytest.raises(InputError, match=r"base\.steps must be given: a node's model learns from the base model"):
        config.parse_config(re.sub(r"\[base\]\nsteps = \d+\n", "", taught), "t")


def test_reading_a_transformers_table_needs_no_torch() -> None:
    code = "import sys; from fpld import config; config.read_config('demo'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_kind_from_outside_is_checked_by_its_own_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class TrigramConfig:
        vocab: int = 0
        depth: int = 3

        @property
        def parameters(self) -> int:
            return self.depth * self.vocab

    class Trigram(NGram):
        kind = "trigram"
        Config = TrigramConfig  # type: ignore[assignment]

    for table in (registry.students, registry.rules):
        monkeypatch.setattr(table, "_loaded", dict(table._loaded))
    registry.students.register("trigram", Trigram)
    registry.rules.register("first", MEAN)
    text = BASE.replace(STUDENT, 'kind = "trigram"\ndepth = 2').replace('rule = "mean"', 'rule = "first"')
    assert config.parse_config(text, "t").student.settings == TrigramConfig(depth=2)
    with pytest.raises(InputError, match=r"student\.order: unknown key: a student of kind 'trigram' has depth, got 2"):
        config.parse_config(text.replace("depth = 2", "order = 2"), "t")


def test_what_was_read_can_be_written_and_read_again() -> None:
    for name in config.presets():
        loaded, _ = config.read_config(name)
        assert Config.model_validate(loaded.model_dump()) == loaded


@pytest.mark.parametrize("kind", ["ngram", "transformer", "huggingface"])
def test_every_field_of_a_student_is_documented(kind: str) -> None:
    below = SITE["configuration_page"]().partition(f'### kind = "{kind}"')[2].partition("\n## ")[0]
    for field in fields(config_class(kind)):
        if field.name not in ("vocab", "parameters"):
            assert re.search(rf"^\| `{field.name}` \| .+ \| .+ \| .+\. \|$", below, re.MULTILINE), field.name


def test_learning_rates_go_from_the_first_to_the_last_round() -> None:
    section = config.TrainSection(steps=1, rate=4.0, last_rate=2.0)
    assert [section.rate_in(t, 3) for t in (1, 2, 3)] == [4.0, 3.0, 2.0]
    assert config.TrainSection(steps=1, rate=4.0).rate_in(3, 3) == 4.0
