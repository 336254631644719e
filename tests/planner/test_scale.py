"""The planner's numbers: for large models by their shapes, for presets against what their runs have sent."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fpld.codecs.updates import encode_update, update_bytes
from fpld.errors import InputError
from fpld.planner import forecast
from fpld.planner.inputs import read_plan_source
from fpld.planner.scale import Row, ScaleSettings, scale_rows
from fpld.students.shapes import MODELS, read_shape

DOCS = Path(__file__).parents[2] / "docs"
PUBLISHED = {"smollm2-135m": 134_515_008, "smollm2-1.7b": 1_711_376_384, "llama-3.1-8b": 8_030_261_248}


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_counted_as_published(name: str) -> None:
    assert MODELS[name].parameters == PUBLISHED[name]


def test_a_folder_has_the_shape_of_its_model(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from fpld.students.configs import HuggingFaceConfig
    from fpld.students.huggingface import HuggingFace
    from tests.tiny_models import make_model

    for family in ("llama", "qwen3"):
        shape = read_shape(make_model(family, tmp_path / family, 40))
        for layers in (0, 1):
            config = HuggingFaceConfig(str(tmp_path / family), lora=4, lora_layers=layers, length=8)
            assert HuggingFace(config, seed=0).parameters == shape.adapters(4, layers)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"config\.json must have the sizes of a model"):
        read_shape(tmp_path)


def test_one_bit_is_as_long_as_stated() -> None:
    for count in (1, 300, 65536 + 1024 + 250):
        assert update_bytes(count, 1) == len(encode_update({"w": np.ones(count, np.float32)}, bits=1, seed=0))


@pytest.mark.parametrize("name", ["rivals", "policies", "wikipedia"])
def test_the_bytes_of_presets_are_those_of_their_runs(name: str) -> None:
    """Kept runs of three seeds; a payload fills its budget within 1 %, notes on the prior vary with the text."""
    results = {row["method"]: row for row in json.loads((DOCS / f"results/{name}.json").read_text())["rows"]}
    source = read_plan_source(name)
    plan = forecast(source.inputs, total=source.total)
    down = source.inputs.downlink
    assert results["fpld"]["uplink_bytes"] == pytest.approx(sum(plan.bytes_sent), rel=0.01)
    assert down is not None
    # The plan counts weights as they are; on the way they are compressed, by a sixth.
    assert 0.8 < results["fpld"]["downlink_bytes"] / (len(plan.bits) * down) < 1.02
    weights = replace(source.config.student.settings, vocab=source.inputs.vocab).parameters
    assert results["fedavg, 2 rounds"]["uplink_bytes"] == 2 * len(plan.bits) * 4 * weights
    assert results["fedavg-1bit, 2 rounds"]["uplink_bytes"] == 2 * len(plan.bits) * update_bytes(weights, 1)


def test_labels_do_not_grow_with_the_model_and_the_aggregator_gets_those_of_all_nodes() -> None:
    effort = ScaleSettings(contexts=10_000, bits=48.0, rounds=2)
    rows = {name: scale_rows(shape, [10, 1000], effort) for name, shape in MODELS.items()}
    for methods in rows.values():
        few = methods[:5]
        many = methods[5:]
        assert [row["up_bytes"] for row in few] == [row["up_bytes"] for row in many]
        assert all(100 * a["aggregator_in"] == b["aggregator_in"] for a, b in zip(few, many, strict=True))
        assert few[0]["aggregator_memory"] < many[0]["aggregator_memory"]
    assert len({methods[0]["up_bytes"] for methods in rows.values()}) == 1
    first = rows["llama-3.1-8b"][0]
    assert first["seconds_1M"] == pytest.approx(8 * (first["up_bytes"] + first["down_bytes"]) / 1e6)
    with pytest.raises(InputError, match="layers of adapters must be at most the model's 30, got 31"):
        scale_rows(MODELS["smollm2-135m"], [1], ScaleSettings(layers=31))


def line(name: str, row: Row) -> str:
    """A row as the page has it."""
    sizes = [f"{row[key] / 1e6:,.1f} MB" for key in ("up_bytes", "down_bytes")]
    seconds = [f"{row[f'seconds_{rate}M']:,.0f} s" for rate in (1, 10, 100)]
    memory = [f"{row[key] / 1e9:,.1f} GB" for key in ("node_memory", "aggregator_memory")]
    return f"| {name} | {row['nodes']:,} | {row['method']} | {' | '.join([*sizes, *seconds, *memory])} |"


def table() -> list[str]:
    """All rows of the page; of methods whose numbers do not depend on the number of nodes there is one."""
    lines = []
    for name in ("smollm2-1.7b", "llama-3.1-8b"):
        rows = scale_rows(MODELS[name], [10, 100, 1000], ScaleSettings())
        lines += [line(name, row) for row in rows if row["method"] == "fpld" or row["nodes"] == 10]
    return lines


def test_the_page_shows_what_the_planner_says() -> None:
    rows = re.findall(r"^\| (?:smollm2|llama).*\|$", (DOCS / "scale.md").read_text(), re.MULTILINE)
    assert rows == table()
