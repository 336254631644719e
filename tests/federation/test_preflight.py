"""`fpld check`: every problem of a broken configuration at once, by its key, before anything is trained or written."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from fpld.cli import main
from fpld.data import read_documents, stored
from fpld.federation import preflight
from fpld.federation.preflight import file_bytes
from tests.federation.conftest import CONFIG, WORDS, write_texts
from tests.tiny_llama import make_llama

if TYPE_CHECKING:
    from pathlib import Path

# What is changed in a sound configuration, and the keys that must be named, all of them.
BROKEN: dict[str, tuple[list[tuple[str, str]], set[str]]] = {
    "rule": ([("[student]", '[combine]\nrule = "mixtur"\n[student]')], {"combine.rule"}),
    "trim": ([("[student]", '[combine]\nrule = "trimmed"\ntrim = 2\n[student]')], {"combine.trim"}),
    "trimmed": (
        [("seed = 5", "quorum = 2"), ("[student]", '[combine]\nrule = "trimmed"\n[student]')],
        {"combine.rule"},
    ),
    "trim of no use": ([("[student]", "[combine]\ntrim = 1\n[student]")], {"combine.trim"}),
    "codec": ([("[student]", '[codec]\nname = "unifrm"\n[student]')], {"codec.name"}),
    "allocator": ([("[student]", '[budget]\nallocator = "best"\n[student]')], {"budget.allocator"}),
    "estimator": ([("[student]", '[budget]\nestimator = "guess"\n[student]')], {"budget.estimator"}),
    "student": ([('kind = "ngram"', 'kind = "lstm"')], {"student.kind"}),
    "student key": ([("order = 2", "ordre = 2")], {"student.ordre"}),
    "unknown key": ([("seed = 5", "sead = 5")], {"run.sead"}),
    "type": ([("rounds = 3", 'rounds = "3"')], {"run.rounds"}),
    "baseline": ([("[student]", '[baselines]\nmethods = ["along"]\n[student]')], {"baselines.methods[0]"}),
    "quorum": ([("seed = 5", "quorum = 4")], {"run.quorum"}),
    "refinement": ([("[student]", '[codec]\nagainst = "own"\n[student]')], {"codec.against"}),
    "least bits": ([("bits = 1.5", "bits = 0.001")], {"nodes[0].bits"}),
    "two thin nodes": (
        [("bits = 1.5", "bits = 0.001"), ("bits = 4.0", 'uplink = "1 bit/s"')],
        {"nodes[0].bits", "nodes[1].uplink", "nodes[2].uplink"},
    ),
    "no such path": ([("/texts", "/txets")], {"data.path"}),
    "no such source": ([('source = "public"', 'source = "pubic"')], {"probe.source"}),
    "labels": ([('"north"', '"nort"'), ('"east"', '"easy"')], {"nodes[0].name", "nodes[1].name"}),
    "own data": ([('"north"', '"north"\ndata = "nowhere"')], {"nodes[0].data"}),
    "contexts": ([("contexts = 480", "contexts = 480000")], {"probe.contexts", "probe.source"}),
    "field": ([('"north"', '"north"\ndata = "{folder}/rows.csv"\nfield = "nota"')], {"nodes[0].data"}),
    "device": ([('kind = "ngram"', 'kind = "ngram"\ndevice = "cuda"')], {"student.device"}),
    "length": (
        [('kind = "ngram"\norder = 2\nbuckets = 256', 'kind = "transformer"\nlength = 8\nwidth = 8\nheads = 1')],
        {"student.length"},
    ),
    "memory": ([("workers = 0", "workers = 0\nmemory = 1000000")], {"engine.workers"}),
    "precision": ([("workers = 0", 'workers = 0\ndtype = "int8"')], {"engine.dtype"}),
    "at once": ([("workers = 0", 'workers = 0\nat_once = "all"')], {"engine.at_once"}),
    "privacy of an n-gram": ([("[student]", "[privacy]\nepsilon = 3.0\n[student]")], {"privacy"}),
    "epsilon": ([("[student]", "[privacy]\nepsilon = 0.0\n[student]")], {"privacy.epsilon"}),
    "unit": ([("[student]", '[privacy]\nepsilon = 1.0\nunit = "word"\n[student]')], {"privacy", "privacy.unit"}),
    "short text": ([('"north"', '"north"\ndata = "{folder}/short.txt"')], {"nodes[0].data"}),
    "everything": (
        [
            ("[student]", '[combine]\nrule = "mixtur"\n[codec]\nname = "unifrm"\n[student]'),
            ("rounds = 3", "rounds = 0"),
            ('source = "public"', 'source = "pubic"'),
            ('"south"', '"south"\ndata = "nowhere"'),
            ("bits = 1.5", "bits = 0.001"),
            ("order = 2", "ordre = 2"),
        ],
        {"combine.rule", "codec.name", "run.rounds", "probe.source", "nodes[2].data", "nodes[0].bits", "student.ordre"},
    ),
}
assert len(BROKEN) >= 20


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check")
    write_texts(folder)
    (folder / "rows.csv").write_text("note\nsnow\nice\n")
    (folder / "short.txt").write_text("a b\n")
    return folder


def write(place: Path, changes: list[tuple[str, str]]) -> Path:
    text = CONFIG
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = place / "config.toml"
    file.write_text(text.format(folder=place))
    return file


def found(capsys: pytest.CaptureFixture[str], file: object, code: int) -> list[dict[str, Any]]:
    assert main(["check", str(file), "--json"]) == code
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return rows


@pytest.mark.parametrize("name", BROKEN)
def test_every_problem_is_named_in_seconds(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, keys = BROKEN[name]
    file = write(place, changes)
    started = time.process_time()  # of this process: the machine may have other work
    wrong = {row["key"] for row in found(capsys, file, 2) if row["state"] == "wrong"}
    assert time.process_time() - started < 5
    assert wrong == keys if name != "contexts" else wrong & keys  # one key of the two that could be changed


TYPOS = {
    "key of a node": (("bits = 1.5", "bit = 1.5"), "nodes[0].bit", "unknown key: did you mean bits?"),
    "key of a table": (("seed = 5", "sead = 5"), "run.sead", "unknown key: did you mean seed?"),
    "table": (("[probe]", "[prob]"), "prob", "unknown key: did you mean probe?"),
    "key with nothing near": (("bits = 1.5", "qqq = 1.5"), "nodes[0].qqq", "unknown key"),
    "kind": (('kind = "ngram"', 'kind = "n-gram"'), "student.kind", ": did you mean ngram?"),
    "key of a student": (("order = 2", "ordre = 2"), "student.ordre", "unknown key: did you mean order? "),
    "codec": (("[student]", '[codec]\nname = "sample"\n[student]'), "codec.name", ": did you mean samples?"),
    "allocator": (("[student]", '[budget]\nallocator = "optimum"\n[student]'), "budget.allocator", "mean optimal?"),
    "choice": (("[student]", '[codec]\ndither = "independen"\n[student]'), "codec.dither", "mean independent?"),
}


@pytest.mark.parametrize("name", TYPOS)
def test_a_typo_is_one_problem_with_the_closest_name_and_hides_no_missing_path(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, key, says = TYPOS[name]
    file = write(place, [change, ("/texts", "/txets"), ('"south"', '"south"\ndata = "nowhere"')])
    wrong = [(row["key"], row["says"]) for row in found(capsys, file, 2) if row["state"] == "wrong"]
    assert sorted(row[0] for row in wrong) == sorted([key, "data.path", "nodes[2].data"])
    assert says in dict(wrong)[key]


def test_each_problem_is_named_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A typo beside two tables that are missing: the tables are still missing when the typo is mended."""
    file = write(place, [("seed = 5", "sead = 5"), ("[local]\nsteps = 25", ""), ("[distill]\nsteps = 60", "")])
    wrong = sorted((row["key"], row["says"]) for row in found(capsys, file, 2) if row["state"] == "wrong")
    missing = [(key, "is missing") for key in ("distill", "local")]
    assert wrong == [*missing, ("run.sead", "unknown key: did you mean seed?")]


def test_paths_start_at_the_file_and_messages_show_them_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "conf"
    folder.mkdir()
    write_texts(folder)
    file = folder / "c.toml"
    text = CONFIG.replace("{folder}/texts", "texts")
    file.write_text(text)
    monkeypatch.chdir(tmp_path)
    found(capsys, "conf/c.toml", 0)
    student = 'kind = "huggingface"\npath = "models/one"\nlength = 16'
    changes = (
        ('path = "texts"', 'path = "txets"'),
        ('"public"', '"public/more"'),
        ('"north"', '"north"\ndata = "own"'),
        ('kind = "bytes"', 'kind = "huggingface"\npath = "tokens"'),
        ('kind = "ngram"\norder = 2\nbuckets = 256\nbatch = 128', student),
    )
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    missing = {
        "data.path": "txets",
        "nodes[0].data": "own",
        "probe.source": "public/more",
        "student.path": "models/one",
        "tokenizer.path": "tokens",
    }
    # What is missing is found beside tables that are not there, too: then nothing else can be checked.
    for broken in (text, text.replace("[distill]\nsteps = 60", "")):
        file.write_text(broken)
        wrong = {row["key"]: row["says"] for row in found(capsys, "conf/c.toml", 2) if row["state"] == "wrong"}
        assert wrong.keys() == missing.keys() | ({"distill"} if broken != text else set())
        for key, path in missing.items():
            assert f"{folder}/{path}" in wrong[key], key


def test_one_problem_is_one_problem(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(write(place, [("seed = 5", "sead = 5")]))]) == 2
    assert ": 1 problem\n" in "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())


def test_a_sound_configuration_says_what_to_expect(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    says = {row["key"]: row["says"] for row in found(capsys, write(place, []), 0)}
    assert says["nodes[0].name"].startswith("north: 6 documents")
    assert says["run.out"].startswith("disk: ")
    assert says["engine.workers"].startswith("memory: about ")
    assert says["run.rounds"].startswith("time: about ")


def test_a_start_that_fails_names_all_and_leaves_no_folder(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(place, [('"north"', '"nort"'), ("bits = 4.0", "bits = 0.001"), ('"south"', '"south"\ndata = "no"')])
    assert main(["run", str(file), "--out", str(place / "out")]) == 2
    said = capsys.readouterr().err
    for key in ("nodes[0].name", "nodes[1].bits", "nodes[2].bits", "nodes[2].data"):
        assert f"\n  {key}: " in said
    assert not (place / "out").exists()
    # What only a start can find out leaves none either: the public text has too few merges for this vocabulary.
    file = write(place, [('kind = "bytes"', 'kind = "bpe"\nvocab = 60000')])
    assert main(["run", str(file), "--out", str(place / "out")]) == 2
    assert "more than the text has merges for" in capsys.readouterr().err
    assert not (place / "out").exists()


def test_what_a_limit_leaves_out_of_a_large_text_is_said_by_its_files(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is read: the sizes are those of the files, or of the index, once a run has counted the documents."""
    monkeypatch.setenv("FPLD_CACHE", str(tmp_path))
    monkeypatch.setattr(preflight, "MAX_READ_BYTES", 2000)
    file = write(place, [("heldout = 0.25", "heldout = 0.25\nlimit = 2000")])
    says = {row["key"]: row["says"] for row in found(capsys, file, 0)}
    sizes = {name: file_bytes(place / "texts" / name) for name in ("north", "east", "south")}
    parts = [f"{name}: 2.0 of {size / 1e3:.1f} kB used (data.limit)" for name, size in sizes.items()]
    assert says["data.limit"] == "; ".join(parts)
    own = write(place, [('"north"', '"north"\ndata = "{folder}/texts/east"'), ("heldout = 0.25", "limit = 2000")])
    says = {row["key"]: row["says"] for row in found(capsys, own, 0)}
    assert f"north: 2.0 of {sizes['east'] / 1e3:.1f} kB used" in says["data.limit"]
    assert "is not read before the run" in says["data.path"]
    hub = f"someone/texts@{'a' * 40}"
    gone = [
        ('"north"', f'"north"\ndata = "{hub}"'),
        ('"south"', '"south"\ndata = "no"'),
        ("heldout = 0.25", "limit = 2000"),
    ]
    says = {row["key"]: row["says"] for row in found(capsys, write(place, gone), 2)}
    assert hub in says["nodes[0].data"]
    assert "does not exist" in says["nodes[2].data"]
    assert says["data.limit"].startswith("east: 2.0 of ")
    monkeypatch.setattr(stored, "MAX_IN_MEMORY_BYTES", 1000)
    for text in (place / "texts").rglob("*.txt"):
        os.utime(text, (time.time() - 60, time.time() - 60))
    read_documents(place / "texts")
    file = write(place, [("heldout = 0.25", "heldout = 0.25\nlimit = 2000")])
    says = {row["key"]: row["says"] for row in found(capsys, file, 0)}
    assert says["nodes[0].name"].startswith("north: 6 documents")
    assert f"north: 2.0 of {sizes['north'] / 1e3:.1f} kB used (data.limit)" in says["nodes[0].name"]


def test_a_single_file_is_a_node(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the text to the end of a round: one file is cut, some of it is held out."""
    (place / "one.txt").write_text("snow and ice in the north wind\n" * 60)
    file = write(place, [('"north"', '"north"\ndata = "{folder}/one.txt"'), ("rounds = 3", "rounds = 1")])
    file.write_text(file.read_text() + "\n[baselines]\nmethods = []\n")
    assert main(["run", str(file), "--out", str(place / "single"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][-1]["method"] == "fpld"


def test_an_end_of_text_token_is_one_byte_behind_each_document(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Documents of 15 bytes: with an empty line behind them they have 17, more than a context."""
    (place / "pair").mkdir()
    for name in ("a", "b"):
        (place / "pair" / f"{name}.txt").write_text(f"{name} fifteen bytes"[:15])
    changes = [('"north"', '"north"\ndata = "{folder}/pair"')]
    found(capsys, write(place, changes), 0)
    changes.append(('kind = "bytes"', 'kind = "bytes"\nend_of_text = true'))
    (row,) = [row for row in found(capsys, write(place, changes), 2) if row["state"] == "wrong"]
    assert row["key"] == "nodes[0].data"
    assert "has 16 bytes" in row["says"]


@pytest.mark.slow
def test_a_model_with_other_tokens_is_refused_though_it_has_as_many(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    one = make_llama(tmp_path / "one", 270, text=" ".join(WORDS.values()))
    two = make_llama(tmp_path / "two", 270, text="entirely other words make other merges of bytes " * 9)
    student = 'kind = "huggingface"\npath = "{path}"\nlength = 16\n'
    changes = [
        ('kind = "bytes"', f'kind = "huggingface"\npath = "{one}"'),
        ('kind = "ngram"\norder = 2\nbuckets = 256\nbatch = 128', student.replace("{path}", str(two))),
    ]
    (row,) = [row for row in found(capsys, write(place, changes), 2) if row["state"] == "wrong"]
    assert row["key"] == "student.path"
    assert "another tokenizer than the federation, though both may have 270 tokens" in row["says"]
    changes[1] = (changes[1][0], student.replace("{path}", str(one)))
    assert found(capsys, write(place, changes), 0)


def test_a_batch_of_more_units_than_a_node_has_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Six documents are at each node, of which some are held out; and a single one is one unit, however it is cut."""
    student = 'kind = "transformer"\nwidth = 8\nheads = 1\nlength = 16\nbatch = 6'
    text = CONFIG.format(folder=tmp_path).replace('kind = "ngram"\norder = 2\nbuckets = 256\nbatch = 128', student)
    write_texts(tmp_path)
    (tmp_path / "one.txt").write_text("a word and a word " * 300)
    text = text.replace('"north"', f'"north"\ndata = "{tmp_path}/one.txt"') + "\n[privacy]\nepsilon = 1.0\n"
    (tmp_path / "c.toml").write_text(text)
    assert main(["check", str(tmp_path / "c.toml"), "--json"]) == 2
    rows = {row["key"]: row["says"] for row in json.loads(capsys.readouterr().out)["rows"] if row["state"] == "wrong"}
    assert rows.keys() == {"nodes[0].data", "nodes[1].name", "nodes[2].name"}
    assert "its text has 1 document to train on, and privacy.batch asks for 6 in a step" in rows["nodes[0].data"]
    (tmp_path / "c.toml").write_text(text.replace("epsilon = 1.0", 'epsilon = 1.0\nunit = "window"'))
    assert main(["check", str(tmp_path / "c.toml"), "--json"]) == 0
