"""Relative paths of a configuration start at its file: which values are paths, and what a run keeps of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import fpld
from fpld.config import config as configuration
from fpld.config import read_config
from fpld.config.paths import absolute_paths
from fpld.errors import InputError
from fpld.storage.files import parse_toml_tables
from tests.federation.conftest import CONFIG, write_texts

if TYPE_CHECKING:
    from pathlib import Path

COMMIT = "a" * 40
TEXT = """\
# A comment stays.
[run]
out = "runs/mine"
[data]
path = "texts"  # so does this one
[probe]
source = "public"
[tokenizer]
path = "models/one"
[[nodes]]
name = "north"
data = "/elsewhere/north"
student = { kind = "huggingface", path = "../two" }
[[nodes]]
name = "south"
data = "south.jsonl"
tokenizer = { kind = "huggingface", path = "smollm2" }
[student]
path = "OWNER/NAME@COMMIT"
[flower]
certs = "certs"
"""


def test_paths_are_written_out_and_names_are_not(tmp_path: Path) -> None:
    text = TEXT.replace("OWNER/NAME@COMMIT", f"north/tiny@{COMMIT}")
    (tmp_path / "texts/public").mkdir(parents=True)
    (tmp_path / "public").mkdir()  # the label of the corpus counts
    changed = absolute_paths(text, tmp_path)
    lines = dict(zip(text.splitlines(), changed.splitlines(), strict=False))
    assert {old: new for old, new in lines.items() if old != new} == {
        'path = "texts"  # so does this one': f'path = "{tmp_path}/texts"  # so does this one',
        'path = "models/one"': f'path = "{tmp_path}/models/one"',
        'student = { kind = "huggingface", path = "../two" }': (
            f'student = {{ kind = "huggingface", path = "{tmp_path}/../two" }}'
        ),
        'data = "south.jsonl"': f'data = "{tmp_path}/south.jsonl"',
        'certs = "certs"': f'certs = "{tmp_path}/certs"',
    }
    assert parse_toml_tables(changed)["flower"]["keys"] == f"{tmp_path}/keys"  # the default, too
    assert absolute_paths(changed, tmp_path / "other") == changed


@pytest.mark.parametrize(
    ("table", "source", "folder", "is_path"),
    [
        ('path = "texts"', "public", "texts/public", False),
        ('path = "texts"', "public", "public", True),
        ('path = "texts"', "./public", "texts/public", True),
        ('path = "nowhere"', "public", "texts", False),
        ('corpus = "sotu"', "1790-1849", "1790-1849", False),
        ('corpus = "sotu"', "./1790-1849", "1790-1849", True),
        ("limit = 9", "public", "texts", True),
    ],
)
def test_a_label_of_the_corpus_is_no_path(tmp_path: Path, table: str, source: str, folder: str, is_path: bool) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    text = absolute_paths(f'[data]\n{table}\n[probe]\nsource = "{source}"\n', tmp_path)
    whole = str(tmp_path / source)
    assert parse_toml_tables(text)["probe"]["source"] == (whole if is_path else source)


@pytest.mark.parametrize("text", ["[data", "data = 3\nnodes = 4\n", "[[nodes]]\ndata = 3\n[probe]\nsource = ['a']\n"])
def test_what_is_no_configuration_is_left_to_the_parser(tmp_path: Path, text: str) -> None:
    assert absolute_paths(text, tmp_path) == text


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration and its texts below the working directory."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "conf"
    folder.mkdir()
    write_texts(folder)
    text = CONFIG.replace("{folder}/texts", "texts").replace("rounds = 3", "rounds = 1")
    (folder / "c.toml").write_text(f"{text}\n[baselines]\nmethods = []\n")
    return folder


def test_a_run_keeps_whole_paths_and_is_continued_from_anywhere(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fpld.run("conf/c.toml", out="runs/one", overrides={"run.rounds": 1})
    assert run.folder == type(run.folder)("runs/one")  # outputs start at the working directory
    assert run.config.data.path == f"{project}/texts"
    monkeypatch.chdir(project)
    again = fpld.resume(tmp_path / "runs/one")
    assert again.loss == run.loss


def test_a_run_of_an_earlier_version_is_continued(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It kept relative paths, from the folder in which it was started."""
    monkeypatch.chdir(project)
    with monkeypatch.context() as earlier:
        earlier.setattr(configuration, "absolute_paths", lambda text, _folder: text)
        run = fpld.run("c.toml", out="old")
    kept = run.folder / "config.toml"
    assert 'path = "texts"' in kept.read_text()
    for again in (fpld.resume("old"), fpld.run("c.toml", out="old", resume=True)):
        assert again.loss == run.loss
    assert read_config(kept)[0].data.path == f"{project}/texts"
    monkeypatch.chdir(project.parent)
    with pytest.raises(InputError, match="holds a run of another configuration"):
        fpld.run("conf/c.toml", out="conf/old", resume=True)


def test_overrides_start_at_the_working_directory(project: Path, tmp_path: Path) -> None:
    """They are of who calls, as `--out` is."""
    (tmp_path / "here").mkdir()
    text, own = (fpld.load_config("conf/c.toml", overrides=given) for given in ({}, {"data.path": "here"}))
    assert (text.data.path, own.data.path) == (f"{project}/texts", f"{tmp_path}/here")
    _, kept = read_config("conf/c.toml", overrides={"data.path": "here"})
    assert f'path = "{tmp_path}/here"' in kept
    planned = json.loads(json.dumps(read_config("conf/c.toml")[1]))
    assert f'path = "{project}/texts"' in planned
