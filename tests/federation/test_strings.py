"""Federations whose models differ in their tokenizers: labels over strings, from the configuration to the table."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fpld import students
from fpld.config import parse_config
from fpld.data import BpeTokenizer, load_tokenizer
from fpld.engines import local
from fpld.engines.local import run_local
from fpld.errors import InputError, ProtocolError, QuorumError
from fpld.federation.preflight import run_preflight
from fpld.node.round import answer_task
from fpld.node.spec import node_specs
from fpld.protocol.messages import Task
from fpld.report.charts import loss_by_bytes
from fpld.report.run import read_run_data
from fpld.report.seeds import summarize_seeds
from fpld.report.tables import summary_tiles
from fpld.storage.arrays import dump_arrays, parse_arrays, read_arrays
from fpld.storage.run_folder import ADOPTED_MODEL, HELDOUT, TOKENIZER, numbered
from fpld.students.heldout import HeldoutText, read_heldout
from tests.data.spellings import sentencepiece
from tests.federation.conftest import WORDS, write_texts
from tests.helpers import make_plan
from tests.tiny_llama import make_llama

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.config import Config

CONFIG = """
[run]
rounds = 2
seed = 5
continuations = 0

[data]
path = "{folder}/texts"
heldout = 0.25
heldout_tokens = 600

[probe]
source = "public"
contexts = 320
length = 8

[labels]
over = "strings"
symbols = 300
symbol_bytes = 8

[tokenizer]
kind = "bpe"
vocab = 280

[[nodes]]
name = "north"
context_bits = 60.0

[[nodes]]
name = "east"
context_bits = 60.0
tokenizer = {{kind = "bpe", vocab = 262}}

[[nodes]]
name = "south"
context_bits = 60.0
tokenizer = {{kind = "bytes"}}
student = {{kind = "transformer", layers = 1, width = 16, heads = 2, length = 48}}

[student]
kind = "transformer"
layers = 1
width = 32
heads = 2
length = 48

[base]
steps = 15

[local]
steps = 20

[distill]
steps = 25

[baselines]
methods = ["alone"]

[engine]
workers = 0
"""


def read(folder: Path, *changes: tuple[str, str]) -> tuple[Config, str]:
    text = CONFIG.format(folder=folder)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return parse_config(text, "test"), text


def test_models_with_three_tokenizers_teach_one_and_learn_from_it(tmp_path: Path) -> None:
    write_texts(tmp_path)
    # After one round the models of the mixture are those that were alone.
    config, text = read(
        tmp_path, ('methods = ["alone"]', 'methods = ["alone", "ensemble"]'), ("rounds = 2", "rounds = 1")
    )
    assert not [finding for finding in run_preflight(config, local=True) if finding.wrong]
    out = tmp_path / "run"
    rows = {row["method"]: row for row in run_local(config, text, out, resume=False)}
    assert rows["fpld"]["heldout_loss"] < rows["base"]["heldout_loss"] - 0.3
    alone = [row["heldout_loss"] for method, row in rows.items() if method.startswith("alone: ")]
    assert len(alone) == 3
    assert rows["ensemble"]["heldout_loss"] < min(alone)
    # The own models that have learnt stand beside those that trained alone for as long, with windows as units.
    table = {row["node"]: row for row in json.loads((out / "own.json").read_text())}
    assert "ahead" not in table["north"]
    for name in ("east", "south"):
        longer = rows[f"alone longer: {name}"]["heldout_loss"]
        assert table[name]["ahead"] == pytest.approx(longer - rows[f"own: {name}"]["heldout_loss"], abs=0.05)
        assert 0 < table[name]["ahead_se"] < 0.2
        assert rows[f"own: {name}"]["behind_se"] > 0
    for name in ("east", "south"):
        assert rows[f"own: {name}"]["heldout_loss"] < rows["base"]["heldout_loss"]
        assert (out / f"fpld/nodes/{('north', 'east', 'south').index(name)}" / ADOPTED_MODEL).exists()
    # All rows are in one unit, so that bits per byte follow from the loss by one factor.
    factors = [row["bits_per_byte"] / row["heldout_loss"] for row in rows.values()]
    np.testing.assert_allclose(factors, factors[0])
    # Figures and means over seeds have the unit that does not depend on tokens.
    run = read_run_data(out)
    chart = loss_by_bytes([run])
    assert chart.y.label == "held-out loss (bits per byte)"
    assert chart.series[0].y[-1] == pytest.approx(rows["fpld"]["bits_per_byte"])
    levels = {series.name: series.y[0] for series in chart.series[1:]}
    assert levels["ensemble"] == pytest.approx(rows["ensemble"]["bits_per_byte"])
    assert summary_tiles(run)["held-out loss"] == f"{rows['fpld']['bits_per_byte']:.4f} bits per byte"
    means = {row["method"]: row for row in summarize_seeds([list(rows.values())], by_byte=True)}
    assert means["ensemble"]["unit"] == "bits per byte"
    assert means["ensemble"]["heldout_loss"] == pytest.approx(rows["ensemble"]["bits_per_byte"])
    assert means["base"]["windows_se"] == pytest.approx(rows["base"]["behind_se"] * factors[0])
    files = [load_tokenizer(out / numbered(TOKENIZER, number)).vocab for number in range(3)]
    assert files == [280, 262, 256]
    own = [spec.files.tokenizer for spec in node_specs(config)]
    assert own == [numbered(TOKENIZER, number) for number in range(3)]


def test_bits_of_a_text_do_not_depend_on_its_tokens(tmp_path: Path) -> None:
    """A model's nats on a text are the same in sum, whoever's tokens they are given by."""
    write_texts(tmp_path)
    config, text = read(tmp_path, ("rounds = 2", "rounds = 1"), ('methods = ["alone"]', "methods = []"))
    run_local(config, text, tmp_path / "run", resume=False)
    own = read_heldout(read_arrays(tmp_path / "run" / numbered(HELDOUT, 2))[0])[0]
    model = students.load(tmp_path / "run/base-2.safetensors")
    assert own.positions is not None
    spread = own.nats(model, 10**6 if model.longest is None else 10)
    width = round(10 * len(own.tokens) / round(float(own.positions[-1])))
    whole = model.token_nats(own.tokens, min(width, model.longest or width))
    assert len(spread) == round(float(own.positions[-1])) - 1
    # The first token of either is not predicted: at most that much is left out.
    assert whole.sum() - spread.sum() == pytest.approx(0, abs=60)
    assert HeldoutText(own.tokens).nats(model, width) == pytest.approx(whole)


def other_tokenizer(path: Path) -> None:
    """Replace the byte-pair encoding in a file by one of as many tokens, with the numbers of two exchanged."""
    before = load_tokenizer(path)
    assert isinstance(before, BpeTokenizer)
    tokens = list(before.token_bytes)
    merges = list(before._merges)
    # The last merge that is not of what the one before it makes.
    late = next(n for n in range(len(merges) - 1, 0, -1) if tokens[255 + n] not in merges[n])
    made = 256 + late
    tokens[made - 1 : made + 1] = [tokens[made], tokens[made - 1]]
    merges[late - 1 : late + 1] = [merges[late], merges[late - 1]]
    BpeTokenizer(tokens, merges).save(path)


def test_a_site_whose_tokenizer_has_changed_refuses_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """East's tokenizer is another one of as many tokens in the second round: its maps are not those of the plan."""
    write_texts(tmp_path)
    config, text = read(tmp_path, ('methods = ["alone"]', "methods = []"))
    refused: list[str] = []
    original = local.LocalEngine._submit

    def submit(engine: Any, node: int, task: Task) -> Any:
        if node == 1 and task.plan.round == 2:
            other_tokenizer(tmp_path / "run" / numbered(TOKENIZER, 1))
            with pytest.raises(ProtocolError, match="maps") as raised:
                answer_task(engine.specs[1], engine.paths(1), Task.from_bytes(task.to_bytes()))
            refused.append(str(raised.value))
        return original(engine, node, task)

    monkeypatch.setattr(local.LocalEngine, "_submit", submit)
    with pytest.raises(QuorumError, match="quorum"):
        run_local(config, text, tmp_path / "run", resume=False)
    assert len(refused) == 1
    (last,) = [json.loads(line) for line in (tmp_path / "run/fpld/trace.jsonl").read_text().splitlines()]
    assert last["round"] == 1


def test_a_plan_with_a_label_space_keeps_its_bytes() -> None:
    plan = make_plan(space=bytes(range(32)))
    assert plan.digest.hex()[:16] == "ed11513d27c54198"
    assert plan.digest != make_plan().digest
    task = Task(plan, "samples")
    assert Task.from_bytes(task.to_bytes()).plan.space == plan.space
    assert hashlib.sha256(task.to_bytes()).hexdigest()[:16] == "cc1b71ee4a9a8cd7"
    assert b"space" not in Task(make_plan(), "samples").to_bytes()
    for wrong in (b"short", "text", None):
        with pytest.raises(InputError, match="space"):
            make_plan(space=wrong)


def test_a_node_that_knows_of_no_label_space_refuses_the_task() -> None:
    """As an older node does with `space`: a field of the plan that is unknown is no field to pass over."""
    arrays, metadata = parse_arrays(Task(make_plan(space=bytes(32)), "samples").to_bytes(), "task")
    head = json.loads(metadata["task"])
    head["plan"]["spaces"] = head["plan"].pop("space")
    with pytest.raises(InputError, match="unexpected keyword argument 'spaces'"):
        Task.from_bytes(dump_arrays(arrays, {**metadata, "task": json.dumps(head)}))


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('over = "strings"', 'over = "tokens"', r"labels\.over"),
        ("length = 8\n", "length = 8\nfresh = true\n", r"probe\.fresh"),
        ('methods = ["alone"]', 'methods = ["pooled"]', r"baselines\.methods"),
        ('methods = ["alone"]', 'methods = ["fedavg"]', r"baselines\.methods"),
        ("[labels]", "[written]\ncontexts = 80\n\n[labels]", "written"),
        ("[labels]", '[combine]\nbroadcast = "logits"\n\n[labels]', r"combine\.broadcast"),
        ('tokenizer = {kind = "bytes"}', 'taught = true\ntokenizer = {kind = "bytes"}', "taught"),
        ('{kind = "bytes"}', '{kind = "huggingface"}', r"nodes\[2\]\.tokenizer\.path"),
    ],
)
def test_what_does_not_go_together_is_named(old: str, new: str, key: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=key):
        read(tmp_path, (old, new))


def test_a_student_that_cannot_learn_through_a_map_is_found_before_the_run(tmp_path: Path) -> None:
    write_texts(tmp_path)
    config, _ = read(
        tmp_path,
        (
            'student = {kind = "transformer", layers = 1, width = 16, heads = 2, length = 48}',
            'student = {kind = "ngram"}',
        ),
    )
    wrong = [finding.key for finding in run_preflight(config, local=True) if finding.wrong]
    assert wrong == ["nodes[2].student.kind"]


def wordpiece(folder: Path) -> Path:
    """Write a tokenizer as BERT's: words in lower case, and one token for all that it does not know."""
    import transformers

    folder = make_llama(folder, 200)
    words = sorted({word for words in WORDS.values() for word in words.split()})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", *words]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(vocabulary)))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def test_a_tokenizer_that_loses_bytes_is_found_before_the_run(tmp_path: Path) -> None:
    write_texts(tmp_path)
    folder = wordpiece(tmp_path / "bert")
    config, _ = read(
        tmp_path,
        ('tokenizer = {kind = "bpe", vocab = 262}', f'tokenizer = {{kind = "huggingface", path = "{folder}"}}'),
    )
    wrong = [finding for finding in run_preflight(config, local=True) if finding.wrong]
    assert [finding.key for finding in wrong] == ["nodes[1].tokenizer"]
    assert "BertNormalizer" in wrong[0].says


@pytest.mark.parametrize(("marked", "wrong"), [(1, False), (60, True)])
def test_public_text_that_a_tokenizer_changes_is_found_before_the_run(marked: int, wrong: bool, tmp_path: Path) -> None:
    import transformers

    write_texts(tmp_path)
    # SentencePiece writes its mark for blanks, and gives blanks back for a mark that the text has.
    for number in range(marked):
        (tmp_path / "texts/public" / f"marked-{number}.txt").write_text("the \u2581 of and to in " * 40)
    tokenizer = sentencepiece()
    folder = make_llama(tmp_path / "llama", tokenizer.vocab)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._backend).save_pretrained(folder)
    own = f'tokenizer = {{kind = "huggingface", path = "{folder}"}}'
    config, _ = read(tmp_path, ('tokenizer = {kind = "bpe", vocab = 262}', own))
    (found,) = [finding for finding in run_preflight(config, local=True) if finding.key == "nodes[1].tokenizer"]
    assert "of the public text byte by byte" in found.says
    assert found.wrong == wrong


@pytest.mark.slow
def test_a_llama_with_a_sentencepiece_vocabulary_takes_part(tmp_path: Path) -> None:
    import transformers

    write_texts(tmp_path)
    tokenizer = sentencepiece()
    folder = make_llama(tmp_path / "llama", tokenizer.vocab)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._backend).save_pretrained(folder)
    model = f'{{kind = "huggingface", path = "{folder}", lora = 0, length = 32, rate = 3e-3, distill_rate = 3e-3}}'
    mine = f'tokenizer = {{kind = "huggingface"}}\nstudent = {model}'
    config, text = read(
        tmp_path,
        ('tokenizer = {kind = "bpe", vocab = 262}', mine),
        ("length = 48", "length = 32"),
        ("contexts = 320\nlength = 8", "contexts = 120\nlength = 3"),
        ("rounds = 2", "rounds = 1"),
    )
    assert not [finding for finding in run_preflight(config, local=True) if finding.wrong]
    rows = {row["method"]: row for row in run_local(config, text, tmp_path / "run", resume=False)}
    # It is far better than before, and better than after as many steps alone.
    assert rows["own: east"]["bits_per_byte"] < rows["alone: east"]["bits_per_byte"] - 0.3
    assert rows["own: east"]["bits_per_byte"] < rows["alone longer: east"]["bits_per_byte"] - 0.02
    assert rows["fpld"]["heldout_loss"] < rows["base"]["heldout_loss"]
