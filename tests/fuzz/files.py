"""Fuzzers of what is read from disks and people: files, folders of runs, configurations, commands, requests."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import shutil
import tomllib
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import tomlkit

from fpld import config as configuration
from fpld.cli import main
from fpld.data import ByteTokenizer, ProbeSet, load_tokenizer
from fpld.engines.flower.answer_schema import Evaluated, Joined
from fpld.engines.flower.credentials import SignedMessage, sign_message
from fpld.engines.flower.log import append_log, follow_log
from fpld.engines.flower.site.ledger import Ledger, Query
from fpld.engines.local import LocalEngine
from fpld.engines.pool import Inline
from fpld.errors import FpldError, InputError, ProtocolError
from fpld.federation.prepare import prepare
from fpld.federation.record import RoundRecord
from fpld.federation.rounds import Federation
from fpld.federation.state import State, commit, recall
from fpld.protocol import Task
from fpld.protocol.aggregator import AggregatorState
from fpld.report.page import run_section
from fpld.report.run import read_run_data
from fpld.storage.arrays import dump_arrays, parse_arrays
from fpld.storage.run_folder import CHECKPOINT, SEALS, RunFolder
from fpld.web.app import make_app
from tests.federation.conftest import CONFIG, write_texts
from tests.fuzz.target import ODD, Target, disturbed, mutated
from tests.helpers import make_plan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Once = Callable[[np.random.Generator], int]

LINE = {
    "round": 1,
    "nodes": ["a", "b"],
    "bits_allotted": [2.0, 2.0],
    "bits_sent": [2.0, 2.0],
    "payload_bytes": 100,
    "overhead_bytes": 272,
    "node_bytes": [186, 186],
    "weights": [1.0, 2.0],
    "noise": [0.1, 0.2],
    "kl": 0.1,
    "heldout_loss": 2.0,
    "heldout_by_node": [2.0, 2.0],
    "bandwidth_upper": 0.2,
    "bandwidth_lower": 0.1,
    "refused": [{"node": "a", "state": "refused", "reason": "late"}],
    "absent": [],
    "seconds": {"local": 1.0, "nodes": [1.0, None]},
}
RESULT = [{"method": "fpld", "heldout_loss": 2.0, "bits_per_byte": 1.0, "perplexity": 7.4, "uplink_bytes": 372}]
PROGRESS = {"round": 2, "rounds": 2, "phase": "collecting", "opened": 1.0, "updated": 2.0, "nodes": []}


def arrays(_folder: Path) -> Once:
    """Files of arrays."""
    data = dump_arrays({"a": np.arange(6.0), "b": np.ones((2, 3), np.float32)}, {"format": "x"})
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    rest = data[8 + size :]

    def once(rng: np.random.Generator) -> int:
        hostile = mutated(data, rng)
        if rng.random() < 0.6:
            text = json.dumps(disturbed(head, rng)).encode()
            hostile = len(text).to_bytes(8, "little") + text + rest
        with contextlib.suppress(InputError):
            found, _ = parse_arrays(hostile, "file")
            sum(array.nbytes for array in found.values())
        return 1

    return once


def readers(folder: Path) -> Once:
    """Probe sets, tokenizers, signed messages, logs, ledgers and checkpoints."""
    probe = folder / "probe.json"
    tokenizer = folder / "tokenizer.json"
    log = folder / "log"
    ProbeSet(np.zeros((2, 4), np.int32), 256, ByteTokenizer().digest).save(probe)
    ByteTokenizer().save(tokenizer)
    good = {path: path.read_bytes() for path in (probe, tokenizer)}
    signed = sign_message(b"key", {"kind": "joined", "name": "a", "challenge": "ab" * 32, "missing": []})
    answer = {"kind": "evaluated", "round": 1, "loss": 2.0, "tokens": 5, "bytes": 9}
    store = RunFolder(folder / "kept")
    state = State({"w": np.ones(3, np.float32)}, AggregatorState({}, {"round": 1, "agree": False}))
    commit(store, state, [RoundRecord(1, [], [], [], 0, 0)], run="run")
    kept = (store.path / "checkpoint.safetensors").read_bytes()
    append_log(log, "a line")
    lines = (log / "log.txt").read_bytes()
    ledger = Ledger(folder)
    ledger.record(Query.frame("ab" * 32, Task(make_plan(), "uniform")), b"frame")
    ledger.record(Query.loss("ab" * 32, 1, "cd" * 32), b"loss")
    entered = ledger.path.read_bytes()

    def changed(data: bytes, rng: np.random.Generator) -> bytes:
        with contextlib.suppress(ValueError):
            if rng.random() < 0.6:
                return json.dumps(disturbed(json.loads(data), rng)).encode()
        return mutated(data, rng)

    def once(rng: np.random.Generator) -> int:
        for path, load in ((probe, ProbeSet.load), (tokenizer, load_tokenizer)):
            path.write_bytes(changed(good[path], rng))
            with contextlib.suppress(InputError):
                load(path)
        altered = mutated(signed, rng)
        with contextlib.suppress(ProtocolError):
            Joined.parse(SignedMessage.parse(altered).check(b"key", "joined"))
            if altered != signed:
                raise AssertionError("an altered message was believed")
        with contextlib.suppress(ProtocolError):
            body: Any = disturbed(answer, rng)
            Evaluated.parse(body if isinstance(body, dict) else {}, round=1)
        (log / "log.txt").write_bytes(b"")
        following = follow_log(log)
        next(following)
        (log / "log.txt").write_bytes(mutated(lines, rng) + b"\n")
        next(following)
        ledger.path.write_bytes(mutated(entered, rng))
        with contextlib.suppress(InputError):
            Ledger(folder)
        _checkpoint(store, kept, rng)
        return 6

    return once


def _checkpoint(store: RunFolder, kept: bytes, rng: np.random.Generator) -> None:
    """Damage a checkpoint: it is found, or what is read is what was written."""
    data = mutated(kept, rng)
    (store.path / "checkpoint.safetensors").write_bytes(data)
    with contextlib.suppress(InputError):
        found = recall(store, run="run")
        if found is not None and found[0].student["w"].tolist() != [1.0] * 3:
            raise AssertionError("a damaged checkpoint was used in silence")


def resumed(folder: Path) -> Once:
    """Folders of runs that are resumed with a damaged file: as they were, from the state before, or an error."""
    write_texts(folder)
    text = CONFIG.format(folder=folder).replace("steps = 20", "steps = 2").replace("steps = 25", "steps = 2")
    config = configuration.parse_config(text.replace("steps = 60", "steps = 2"), "fuzz")
    store = RunFolder(folder / "run")

    def opened() -> Federation:
        return Federation(config, store, prepare(config, store), "fpld", pool=Inline())

    run = opened()
    students = {}
    for round in (1, 2):
        run.advance(LocalEngine(run, 1.0))
        students[round] = {name: array.tobytes() for name, array in run.state.student.items()}
    names = [*json.loads((store.path / SEALS).read_text()), SEALS, f"fpld/{CHECKPOINT}", "fpld/trace.jsonl"]
    good = {name: (store.path / name).read_bytes() for name in names}
    older = (store.path / "fpld/checkpoint-previous.safetensors").read_bytes()

    def once(rng: np.random.Generator) -> int:
        name = names[int(rng.integers(len(names)))]
        (store.path / name).write_bytes(mutated(good[name], rng))
        with contextlib.suppress(InputError):
            found = opened()
            least = 1 if name == f"fpld/{CHECKPOINT}" else 2
            kept = {each: array.tobytes() for each, array in found.state.student.items()}
            if found.state.round < least or kept != students[found.state.round]:
                raise AssertionError(f"a damaged {name} was used in silence")
        (store.path / name).write_bytes(good[name])
        if name == f"fpld/{CHECKPOINT}":  # which a reader may have put in the place of the newest
            (store.path / "fpld/checkpoint-previous.safetensors").unlink()
            (store.path / "fpld/checkpoint-previous.safetensors").write_bytes(older)
        return 1

    return once


def folders(folder: Path) -> Once:
    """Folders of runs, edited by hand or damaged: shown, or an error that says so."""
    run = folder / "runs/one"
    (run / "fpld").mkdir(parents=True)
    config = '[run]\nrounds = 2\n[[nodes]]\nname = "a"\nbits = 2.0\n[[nodes]]\nname = "b"\nbits = 2.0\n'
    good: dict[str, Any] = {
        "config.toml": config,
        "versions.json": {"fpld": "1"},
        "trace.jsonl": LINE,
        "result.json": RESULT,
        "fpld/progress.json": PROGRESS,
    }

    def text(name: str) -> bytes:
        return (good[name] if isinstance(good[name], str) else json.dumps(good[name]) + "\n").encode()

    for name in good:
        (run / name).write_bytes(text(name))

    def once(rng: np.random.Generator) -> int:
        name = list(good)[int(rng.integers(len(good)))]
        whole = rng.random() < 0.5 or isinstance(good[name], str)
        data = mutated(text(name), rng) if whole else json.dumps(disturbed(good[name], rng)).encode() + b"\n"
        (run / name).write_bytes(data)
        with contextlib.suppress(FpldError):
            found = read_run_data(run)
            if rng.random() < 0.1:
                run_section(found, "run")
        (run / name).write_bytes(text(name))
        return 1

    return once


def configs(_folder: Path) -> Once:
    """Configurations with odd keys and values."""
    text = CONFIG.format(folder="texts")
    tables = tomllib.loads(text)

    def once(rng: np.random.Generator) -> int:
        hostile = mutated(text.encode(), rng).decode("utf-8", "replace")
        if rng.random() < 0.7:
            with contextlib.suppress(Exception):  # what TOML cannot say is no configuration
                hostile = tomlkit.dumps(disturbed(tables, rng))  # type: ignore[arg-type]
        with contextlib.suppress(InputError):
            configuration.parse_config(hostile, "file")
        return 1

    return once


WORDS = ["allocate", "bounds", "plan", "report", "export", "data", "certs", "--json", "--weights", "--total", "--vocab"]
WORDS += ["--caps", "--floors", "--links", "--deadline", "--contexts", "1,1,16", "2048", "256", "60", "64kbit/s", "-h"]


def commands(folder: Path) -> Once:
    """Command lines: an exit code, and no traceback."""
    place = str(folder / "none")

    def once(rng: np.random.Generator) -> int:
        words = [*WORDS[7:], *(word for word in ODD if "\0" not in word), place]  # no system passes a NUL on
        chosen = [WORDS[int(rng.integers(6))], *(words[int(i)] for i in rng.integers(len(words), size=rng.integers(7)))]
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                code = main(chosen)
            except SystemExit as stopped:  # argparse
                code = stopped.code if isinstance(stopped.code, int) else 2
        if code not in (0, 2):
            raise AssertionError(f"{chosen} ended with {code}")
        return 1

    return once


def requests(folder: Path) -> Once:
    """Requests to the live page: an answer below 500, and nothing of what is not its own."""
    shutil.copytree(folders_of(folder), folder / "shown", dirs_exist_ok=True)
    open_app = make_app(folder / "shown")
    closed = make_app(folder / "shown", "the right token!")
    paths = ["/", "/api/runs", "/api/run", "/api/planner", "/api/plan", "/assets/page.css", "/login", "/assets/", "/x"]

    def once(rng: np.random.Generator) -> int:
        path = paths[int(rng.integers(len(paths)))]
        if rng.random() < 0.2:
            path += ODD[int(rng.integers(len(ODD)))][:50]
        names = ("name", "run", "links", "deadline", "total", "have", "token")
        values = [*ODD, "one", "1e6,1e6", "60", "0.5"]
        pairs = [
            f"{names[int(rng.integers(len(names)))]}={quote(values[int(rng.integers(len(values)))][:99])}"
            for _ in range(int(rng.integers(5)))
        ]
        host = str(rng.choice(["localhost", "[::1].evil", "evil", "", "127.0.0.1:80"]))
        app = open_app if rng.random() < 0.7 else closed
        method = str(rng.choice(["GET", "GET", "GET", "HEAD", "PUT", "DELETE", "POST"]))
        body: list[bytes | None] = [b""]
        if method == "POST":
            body = _form(pairs, rng)
        status = asyncio.run(answer(app, method, path, "&".join(pairs), host, body))
        if status >= 500:
            raise AssertionError(f"{method} {path}?{pairs} gave {status}")
        if host not in ("localhost", "127.0.0.1:80") and app is open_app and status != 403:
            raise AssertionError(f"host {host!r} was served")
        return 1

    return once


def folders_of(folder: Path) -> Path:
    """Make a folder with one sound run."""
    folders(folder / "source")
    return folder / "source/runs"


def _form(pairs: list[str], rng: np.random.Generator) -> list[bytes | None]:
    """Return the pieces of a form, altered, too long or cut off; None is a connection that ends."""
    data = "&".join(pairs).encode()
    if rng.random() < 0.5:
        data = mutated(b"token=" + quote(ODD[int(rng.integers(len(ODD)))]).encode(), rng)
    if rng.random() < 0.2:
        data *= int(rng.integers(100))
    cuts = sorted(rng.integers(len(data) + 1, size=int(rng.integers(4))).tolist())
    pieces = [data[start:end] for start, end in pairwise([0, *cuts, len(data)])]
    return [*pieces, None] if rng.random() < 0.3 else [*pieces]


async def answer(app: Any, method: str, path: str, query: str, host: str, body: list[bytes | None]) -> int:
    """Ask an application, with the pieces of a body, and return the status."""
    statuses: list[int] = []
    pieces = iter(body)
    count = len(body)

    async def receive() -> dict[str, Any]:
        nonlocal count
        count -= 1
        piece = next(pieces, None)
        if piece is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": piece, "more_body": count > 0}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("utf-8", "replace"),
        "query_string": query.encode(),
        "headers": [(b"host", host.encode())],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "root_path": "",
    }
    await app(scope, receive, send)
    return statuses[0]


TARGETS = [
    Target("arrays", "files", 1, arrays),
    Target("readers", "files", 1, readers),
    Target("folders", "damaged folders", 5, folders),
    Target("resumed", "damaged folders", 2, resumed),
    Target("configs", "configurations", 2, configs),
    Target("commands", "command lines", 1, commands),
    Target("requests", "requests", 1, requests),
]
