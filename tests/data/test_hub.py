"""Names of a hub: fetched from a server on loopback into a cache, read from there by name, and pushed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

from fpld.data import read_documents
from fpld.data.hub import HubName, describe_source, hub_folder, parse_hub_name, text_folder
from fpld.engines.flower.site.config import Site, Terms, check_models
from fpld.errors import BudgetError, InputError
from fpld.storage.arrays import dump_arrays
from tests.data.hub_server import serve_hub
from tests.federation.conftest import CONFIG, write_texts
from tests.tiny_llama import make_llama

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("huggingface_hub")

COMMIT = "a" * 40
MODEL = f"north/tiny@{COMMIT}"
TEXT = f"north/news:en@{COMMIT}"


class LoopbackHub(NamedTuple):
    """A server, its folder, and the environment of a process that talks to it."""

    root: Path
    environment: dict[str, str]

    def fpld(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command of its own, as a site or an aggregator would."""
        return subprocess.run(
            [sys.executable, "-m", "fpld", *arguments],
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHub]:
    root = tmp_path_factory.mktemp("hub")
    server = serve_hub(root)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    for name in ("north/tiny", "north/private"):
        make_llama(root / "models" / name / COMMIT, 300, text="snow ice wind and the wolf " * 20)
        (root / "models" / name / COMMIT / "pytorch_model.bin").write_bytes(b"a pickle")
    texts = root / "datasets/north/news" / COMMIT
    for folder, word in (("en", "snow"), ("de", "Schnee")):
        (texts / folder).mkdir(parents=True)
        (texts / folder / "part.jsonl").write_text(f'{{"text": "{word} and ice"}}\n')
    (texts / "en/load.py").write_text("raise SystemExit")
    write_texts(root)
    (root / "datasets/north/many").mkdir()
    (root / "texts").rename(root / "datasets/north/many" / COMMIT)  # a folder for each node of a federation
    environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    environment |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
        "HF_HOME": str(tmp_path_factory.mktemp("home")),
        "FPLD_CACHE": str(tmp_path_factory.mktemp("cache")),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    yield LoopbackHub(root, environment)
    server.shutdown()
    server.server_close()
    thread.join()


def test_names_have_a_whole_commit() -> None:
    assert parse_hub_name(MODEL) == HubName("north/tiny", COMMIT)
    assert parse_hub_name(TEXT) == HubName("north/news", COMMIT, "en")
    assert str(parse_hub_name(TEXT)) == TEXT
    for path in ("texts", "smollm2", "/models/tiny@1", "../x", "a/b/c@main"):
        assert parse_hub_name(path) is None
    for bad in ("north/tiny@main", f"north/tiny@{COMMIT[:7]}", f"a/b:../c@{COMMIT}"):
        with pytest.raises(InputError):
            parse_hub_name(bad)


@pytest.mark.parametrize(
    ("share", "most"), [(":1%", 10.0), (":0.5 %", 5.0), (":100%", 1000.0), (":2kB", 2000.0), (":1.5 MB", 1.5e6)]
)
def test_shares_of_a_dataset(share: str, most: float) -> None:
    for folder in ("", ":en"):
        text = f"north/news{folder}[{share}]@{COMMIT}"
        name = parse_hub_name(text)
        assert name == HubName("north/news", COMMIT, folder[1:], share)
        assert str(name) == text
        assert name.most_bytes(1000) == most


@pytest.mark.parametrize("share", ["1%", ":", ":0%", ":101%", ":9", ":-1%", ":nan%", "5:", ":1%]["])
def test_what_is_no_share_is_refused(share: str) -> None:
    with pytest.raises(InputError, match=r"must have a share such as \[:1%\] or \[:200MB\]"):
        parse_hub_name(f"north/news:en[{share}]@{COMMIT}")
    with pytest.raises(InputError, match="--repo-type dataset"):
        hub_folder(f"north/news[:1%]@{COMMIT}", "model")


def test_an_existing_path_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / MODEL).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_hub_name(MODEL) is None


def test_what_is_not_in_the_cache_is_an_error_with_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=rf"fpld data fetch {MODEL}.*hf download north/tiny --revision"):
        hub_folder(MODEL, "model")
    with pytest.raises(InputError, match="hf download north/news --repo-type dataset --revision"):
        text_folder(TEXT)


@pytest.mark.slow
def test_a_model_is_fetched_once_and_read_by_name_without_a_hub(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    from fpld.students.pretrained import locate, model_digest, model_tokenizer

    refused = hub.fpld("data", "fetch", MODEL, HF_HUB_OFFLINE="1")
    assert refused.returncode == 2
    assert "HF_HUB_OFFLINE" in refused.stderr
    done = hub.fpld("data", "fetch", MODEL, "--json")
    assert done.returncode == 0, done.stderr
    assert '"sha256"' in done.stdout
    # As in another process, without the server: the layout of the cache is the hub's own.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", f"{hub.environment['HF_HOME']}/hub")
    folder = locate(MODEL)
    assert folder.parts[-3:] == ("models--north--tiny", "snapshots", COMMIT)
    assert not (folder / "pytorch_model.bin").exists()
    source = hub.root / "models/north/tiny" / COMMIT
    assert model_digest(folder) == model_digest(source)
    assert model_tokenizer(MODEL).vocab == model_tokenizer(source).vocab


@pytest.mark.slow
def test_a_folder_of_a_dataset_and_a_token(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    done = hub.fpld("data", "fetch", TEXT, "--repo-type", "dataset")
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(constants, "HF_HUB_CACHE", f"{hub.environment['HF_HOME']}/hub")
    (document,) = read_documents(TEXT)
    assert document.text == "snow and ice"
    assert [file.name for file in text_folder(TEXT).iterdir()] == ["part.jsonl"]  # no code, no other folder
    name = f"north/private@{COMMIT}"
    assert hub.fpld("data", "fetch", name).returncode == 2
    assert hub.fpld("data", "fetch", name, HF_TOKEN="hf_test").returncode == 0  # noqa: S106


@pytest.mark.slow
def test_a_folder_is_pushed_with_the_token_alone(hub: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Student\n")
    (tmp_path / "model.safetensors").write_bytes(bytes(64))
    use = f"push_to_hub(Path({str(tmp_path)!r}), 'north/made')"
    code = f"from pathlib import Path; from fpld.data.hub import push_to_hub; print({use})"
    command = [sys.executable, "-c", code]
    environments = [hub.environment, {**hub.environment, "HF_TOKEN": "hf_test"}]
    refused, done = (
        subprocess.run(command, env=each, capture_output=True, text=True, check=False) for each in environments
    )
    assert "FetchError: north/made cannot be pushed" in refused.stderr
    assert "/north/made/commit/" in done.stdout, done.stderr
    pushed = hub.root / "models/north/made/pushed"
    assert {file.name: file.read_bytes() for file in pushed.iterdir()} == {
        "README.md": b"# Student\n",
        "model.safetensors": bytes(64),
    }


@pytest.mark.slow
def test_a_share_of_a_dataset_is_fetched_alone_and_recognised(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    # Six files of nearly the same size: the third one reaches the share. The newest commit is named.
    done = hub.fpld("data", "fetch", "north/many:east[:40%]", "--repo-type", "dataset", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    name = f"north/many:east[:40%]@{COMMIT}"
    assert (row["name"], row["files"]) == (name, 3)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", f"{hub.environment['HF_HOME']}/hub")
    monkeypatch.setenv("FPLD_CACHE", hub.environment["FPLD_CACHE"])
    assert [document.name for document in read_documents(name)] == ["0.txt", "1.txt", "2.txt"]
    source = describe_source(name, "dataset")
    assert source is not None
    assert (source.sha256, source.bytes) == (row["sha256"], row["bytes"])
    with pytest.raises(InputError, match="is not in the cache"):
        hub_folder(f"north/many:east@{COMMIT}", "dataset")  # the whole folder is not
    with pytest.raises(InputError, match=r"fpld data fetch 'north/many:east\[:1%\]@"):
        hub_folder(f"north/many:east[:1%]@{COMMIT}", "dataset")
    (source.folder / "1.txt").write_text("other words")
    with pytest.raises(InputError, match="is not as it was fetched"):
        describe_source(name, "dataset")


@pytest.mark.slow
def test_a_run_by_names_of_a_hub_connects_to_nobody_and_its_student_is_pushed(hub: LoopbackHub, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = f"north/many@{COMMIT}"
    for name, *more in ((text, "--repo-type", "dataset"), (MODEL,)):
        assert hub.fpld("data", "fetch", name, *more).returncode == 0
    config = CONFIG.replace("{folder}/texts", text).replace("rounds = 3", "rounds = 1\ncontinuations = 0")
    config = config.replace("contexts = 480", "contexts = 64").replace("heldout_tokens = 600", "heldout_tokens = 100")
    student = f'kind = "huggingface"\npath = "{MODEL}"\nlength = 16\nbatch = 4'
    config = config.replace('kind = "ngram"\norder = 2\nbuckets = 256\nbatch = 128', student)
    config = re.sub(r"steps = \d+", "steps = 1", config).replace('kind = "bytes"', 'kind = "huggingface"')
    (tmp_path / "c.toml").write_text(f"{config}\n[baselines]\nmethods = []\n")
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    done = hub.fpld("run", str(tmp_path / "c.toml"), "--out", str(tmp_path / "run"), "--json", **offline)
    assert done.returncode == 0, done.stderr
    sources = {row["key"]: row for row in json.loads((tmp_path / "run/sources.json").read_text())}
    assert {key: row["name"] for key, row in sources.items()} == {"data.path": text, "student.path": MODEL}
    assert all(re.fullmatch("[0-9a-f]{64}", row["sha256"]) for row in sources.values())
    out = ["--to", "huggingface", "--out", str(tmp_path / "out"), "--license", "mit"]
    done = hub.fpld("export", str(tmp_path / "run"), *out, "--push", "north/student", HF_TOKEN="hf_test")  # noqa: S106
    assert done.returncode == 0, done.stderr
    assert "/north/student/commit/" in done.stdout
    pushed = hub.root / "models/north/student/pushed"
    assert (pushed / "README.md").read_bytes() == (tmp_path / "out/README.md").read_bytes()
    assert "license: mit" in (pushed / "README.md").read_text()
    assert (pushed / "model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()


def test_a_node_allows_a_model_by_its_name(tmp_path: Path) -> None:
    """By the whole name alone: another commit is another model."""
    settings = {"path": MODEL, "parameters": 1, "vocab": 256}
    metadata = {"kind": "huggingface", "version": "1", "config": json.dumps(settings)}
    (tmp_path / "base").write_bytes(dump_arrays({"a": np.zeros(1, np.float32)}, metadata))
    for allowed in (MODEL, MODEL.replace("aaa", "bbb"), "north/tiny"):
        site = Site(Terms(name="north", models=[allowed]), tmp_path, list, bytes)
        if allowed == MODEL:
            check_models(site, [tmp_path / "base"])
        else:
            with pytest.raises(BudgetError, match="allows no such folder"):
                check_models(site, [tmp_path / "base"])


def test_a_name_without_a_commit_is_answered_with_the_command(tmp_path: Path) -> None:
    from fpld.students.pretrained import check_place

    with pytest.raises(InputError, match=r"`fpld data fetch HuggingFaceTB/SmolLM2-135M` prints the name"):
        check_place(tmp_path / "HuggingFaceTB/SmolLM2-135M")
    with pytest.raises(InputError, match=r"`fpld data fetch allenai/c4:en --repo-type dataset` prints the name"):
        read_documents(tmp_path / "allenai/c4:en")
