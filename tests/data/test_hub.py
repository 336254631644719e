"""Names of a hub: fetched from a server on loopback into a cache, read from there by name, and pushed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, NamedTuple

import pytest

from fpld.data.hub import HubName, hub_folder, parse_hub_name, text_folder
from fpld.errors import InputError
from tests.data.hub_server import serve_hub
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
    environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    environment |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
        "HF_HOME": str(tmp_path_factory.mktemp("home")),
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
    for bad in ("north/tiny@main", f"north/tiny@{COMMIT[:7]}", f"north/news:en[:1%]@{COMMIT}", f"a/b:../c@{COMMIT}"):
        with pytest.raises(InputError):
            parse_hub_name(bad)


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

    from fpld.data import read_documents

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
