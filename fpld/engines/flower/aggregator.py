"""`fpld aggregator`: a SuperLink and a run of our app on it, watched until the run is done."""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpld.engines.flower.certs import AGGREGATOR_KEY, CA, CERT, CERT_KEY
from fpld.engines.flower.children import Children
from fpld.engines.flower.expiry import ending
from fpld.engines.flower.identity import PublicKeys
from fpld.engines.flower.journal import follow, retell
from fpld.engines.flower.keys import public_file
from fpld.engines.flower.processes import check_port
from fpld.errors import FpldError, InputError, ResourceError, StorageError
from fpld.federation.status import STATUS
from fpld.storage.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fpld.config import Config, FlowerSection

log = logging.getLogger(__name__)

LEAST_SPACE = 4_000_000  # bytes of the disk below which a run is stopped
_PAUSE = 0.25


@dataclass(frozen=True, slots=True)
class Start:
    """What an aggregator is started with."""

    config: Config
    file: Path
    out: Path
    seed: int | None
    insecure: bool


def aggregate(start: Start) -> list[dict[str, Any]]:
    """Run the federation to its end; return the table's rows. What is killed on the way is started anew."""
    flower = _check(start)
    folder = RunFolder(start.out / "flower")
    with folder.lock():
        children = Children(flower, folder.path, insecure=start.insecure)
        lines = follow(start.out)
        next(lines)
        log.info("starting the SuperLink at %s", flower.address)
        try:
            children.start_superlink()
            _start_run(start, children)
            children.wait()
            return _watch(start, children, lines)
        finally:
            children.stop()


def _check(start: Start) -> FlowerSection:
    """Find out before anything starts whether all keys and certificates are there; return the section [flower]."""
    flower = start.config.flower
    if flower is None:
        raise InputError(
            f"{start.file}: [flower] is missing: where to listen, and the folders of certificates and keys"
        )
    lacking = missing(start.config, insecure=start.insecure)
    if lacking:
        raise InputError("; ".join(lacking))
    if start.insecure:
        log.warning("INSECURE: no TLS and no node authentication; anyone who reaches the port can join and start runs")
    else:
        for sentence in ending(Path(flower.certs) / name for name in (CA, CERT)):
            log.warning("%s", sentence)
    host, port = flower.address.rsplit(":", 1)
    check_port(host, int(port))
    return flower


def missing(config: Config, *, insecure: bool = False) -> list[str]:
    """Return what is missing or unsound among the nodes' public keys and the aggregator's own files."""
    found = []
    for node in config.nodes:
        try:
            PublicKeys.read(public_file(config, node.name))
        except InputError as error:
            found.append(str(error))
    folder = Path(config.flower.certs) if config.flower is not None else Path()
    wanted = [AGGREGATOR_KEY] if insecure else [AGGREGATOR_KEY, CA, CERT, CERT_KEY]
    lacking = [folder / name for name in wanted if not (folder / name).exists()]
    return [*found, *(f"{file} does not exist: put it there, or make it with `fpld certs`" for file in lacking)]


def _start_run(start: Start, children: Children) -> None:
    RunFolder(start.out).write_json(STATUS, {"state": "starting"})
    children.start_runner(start.file, start.out, start.seed)


def _watch(start: Start, children: Children, lines: Iterator[list[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Show what the run reports until it has ended; start again what was killed."""
    store, closed = RunFolder(start.out), -1
    while True:
        check_space(start.out)
        children.tend()
        code = children.ended()  # before the status: a run says how it ends, then its process ends
        status = store.read_json(STATUS)
        retell(lines)  # after it: what was said last comes out too
        if status["state"] == "done":
            rows: list[dict[str, Any]] = store.read_json("result.json")
            return rows
        if status["state"] == "failed":
            raise FpldError(f"{status['error']}; go on with --resume")
        if code is not None:
            children.bury_runner(code)
            closed = _progress(start.out, closed)
            _start_run(start, children)
        time.sleep(_PAUSE)


def _progress(out: Path, before: int) -> int:
    """Return how far the trace goes; a run that is killed twice without getting further is not started again."""
    trace = out / "fpld/trace.jsonl"
    size = trace.stat().st_size if trace.exists() else 0
    if size == before:
        raise ResourceError(
            "the run's process was killed twice in the same round: most likely memory ran out; free some, or choose a "
            "smaller student, and go on with --resume"
        )
    return size


def check_space(folder: Path) -> None:
    """Stop while the disk has room to say why: a SuperLink on a full disk answers no node any more."""
    free = shutil.disk_usage(folder).free
    if free < LEAST_SPACE:
        raise StorageError(
            f"{folder}: {free:,} bytes are left on the disk, at least {LEAST_SPACE:,} are needed: free some space, and "
            "go on with --resume; what was written before is intact"
        )
