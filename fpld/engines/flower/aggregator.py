"""`fpld aggregator`: a SuperLink, a SuperExec and a run of our app on them, watched until the run is done."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpld.engines.flower.certs import AGGREGATOR_KEY, CA, CERT, CERT_KEY
from fpld.engines.flower.expiry import ending
from fpld.engines.flower.identity import PublicKeys, write_secret
from fpld.engines.flower.journal import follow, retell
from fpld.engines.flower.processes import Child, LaunchError, call, call_json, check_port, wait_ready
from fpld.engines.flower.server import is_revoked, public_file
from fpld.errors import FpldError, InputError, StorageError
from fpld.federation.status import STATUS
from fpld.storage.files import write_atomic
from fpld.storage.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fpld.config import Config

log = logging.getLogger(__name__)

_APP = """\
from fpld.engines.flower import client_app, server_app

client = client_app()
server = server_app()
"""
_PROJECT = """\
[project]
name = "fpld-run"
version = "1.0.0"
description = "A federation of fpld"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fpld"

[tool.flwr.app.components]
serverapp = "fpld_app:server"
clientapp = "fpld_app:client"

[tool.flwr.app.config]
config = ""
out = ""
folder = ""
seed = -1
"""
DATABASE = "state.db"
_LINK = "fpld"
LEAST_SPACE = 4_000_000  # bytes of the disk below which a run is stopped
_PAUSE = 0.5
_RESTARTS = 10
_LOOK = 60.0  # seconds between two questions to the SuperLink about the run: each is a process of its own


@dataclass(frozen=True, slots=True)
class Start:
    """What an aggregator is started with."""

    config: Config
    file: Path
    out: Path
    seed: int | None
    insecure: bool


def aggregate(start: Start) -> list[dict[str, Any]]:
    """Run the federation to its end; return the table's rows. SuperLink and SuperExec are started anew if they die."""
    _check(start)
    folder = RunFolder(start.out / "flower")
    with folder.lock():
        (folder.path / "keys").mkdir(exist_ok=True)
        fresh = not folder.has(DATABASE)
        with _superlink(start, folder.path) as children:
            _register(start, folder.path)
            lines = follow(start.out)
            next(lines)
            run = _submit(start, folder.path, fresh=fresh)
            return _watch(start, folder.path, run, children, lines)


def _check(start: Start) -> None:
    """Find out before anything starts whether all keys and certificates are there."""
    flower = start.config.flower
    if flower is None:
        raise InputError(
            f"{start.file}: [flower] is missing: where to listen, and the folders of certificates and keys"
        )
    lacking = missing(start.config, insecure=start.insecure)
    if lacking:
        raise InputError("; ".join(lacking))
    if not start.insecure:
        for sentence in ending(Path(flower.certs) / name for name in (CA, CERT)):
            log.warning("%s", sentence)
    host, port = flower.address.rsplit(":", 1)
    check_port(host, int(port))


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


def _local(start: Start) -> str:
    """Return the address at which this machine reaches the SuperLink."""
    assert start.config.flower is not None  # noqa: S101 - _check has said so
    host, port = start.config.flower.address.rsplit(":", 1)
    return f"{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"  # noqa: S104


class Children:
    """SuperLink and SuperExec, kept alive: what they know is in a database, so a restart loses nothing."""

    def __init__(self, commands: dict[str, list[str]], folder: Path, url: str, ca: Path | None) -> None:
        self._commands, self._folder, self._url, self._ca = commands, folder, url, ca
        self.children: dict[str, Child] = {}
        self._restarts = 0

    def start(self, name: str) -> None:
        """Start one of them; the SuperLink until it answers."""
        self.children[name] = Child(self._commands[name], self._folder / f"{name}.log", self._folder)
        if name == "superlink":
            wait_ready(self.children[name], self._url, self._ca)

    def tend(self) -> None:
        """Start again what has died."""
        for name, child in list(self.children.items()):
            if not child.alive:
                self._restarts += 1
                if self._restarts > _RESTARTS:
                    raise LaunchError(f"{child.name} stops again and again: {child.last_words()}")
                log.warning("%s stopped (%s): starting it again", child.name, child.last_words())
                child.stop()  # what it has started must not go on without it
                self.start(name)

    def stop(self) -> None:
        """End both, the SuperExec with the run first."""
        for child in reversed(self.children.values()):
            child.stop()


@contextlib.contextmanager
def _superlink(start: Start, folder: Path) -> Iterator[Children]:
    assert start.config.flower is not None  # noqa: S101 - _check has said so
    host, port = start.config.flower.address.rsplit(":", 1)
    certs = Path(start.config.flower.certs).resolve()
    secret = folder / "superexec.secret"
    if not secret.exists():
        write_secret(secret, secrets.token_hex(32).encode())
    link = ["flower-superlink", "--host", host, "--port", port, "--isolation", "process"]
    link += ["--database", str(folder / DATABASE), "--disable-runtime-dependency-installation"]
    execute = ["flower-superexec", "--runtime-api-address", _local(start)]
    for command in (link, execute):
        command += ["--superexec-auth-secret-file", str(secret)]
    if start.insecure:
        log.warning("INSECURE: no TLS and no node authentication; anyone who reaches the port can join and start runs")
        link.append("--insecure")
        execute.append("--insecure")
        connection = f'address = "{_local(start)}"\ninsecure = true\n'
    else:
        link += ["--ssl-ca-certfile", str(certs / CA), "--ssl-certfile", str(certs / CERT)]
        link += ["--ssl-keyfile", str(certs / CERT_KEY), "--enable-supernode-auth"]
        execute += ["--root-certificates", str(certs / CA)]
        connection = f'address = "{_local(start)}"\nroot-certificates = "{certs / CA}"\n'
    write_atomic(
        folder / "config.toml", f'[superlink]\ndefault = "{_LINK}"\n\n[superlink.{_LINK}]\n{connection}'.encode()
    )
    url = f"http{'' if start.insecure else 's'}://{_local(start)}/health"
    commands = {"superlink": link, "superexec": execute}
    children = Children(commands, folder, url, None if start.insecure else certs / CA)
    log.info("starting the SuperLink at %s:%s", host, port)
    try:
        for name in commands:
            children.start(name)
        yield children
    finally:
        children.stop()


def _register(start: Start, folder: Path) -> None:
    """Admit the nodes' keys; a database from before may know them already."""
    if start.insecure:
        return
    for node in start.config.nodes:
        if is_revoked(start.config, node.name):
            continue
        file = folder / "keys" / f"{node.name}.pub"
        file.write_text(PublicKeys.read(public_file(start.config, node.name)).auth + "\n")
        try:
            call_json(["flwr", "supernode", "register", str(file), _LINK, "--name", node.name], folder)
        except LaunchError as error:
            if "already in use" not in str(error):
                raise
    log.info("admitted: %s", ", ".join(node.name for node in start.config.nodes))


def _submit(start: Start, folder: Path, *, fresh: bool) -> int:
    """Write our app, stop what an aggregator that was killed has left, and start a new run."""
    write_atomic(folder / "app" / "fpld_app.py", _APP.encode())
    write_atomic(folder / "app" / "pyproject.toml", _PROJECT.encode())
    for old in [] if fresh else call_json(["flwr", "list", _LINK], folder).get("runs", []):
        if not str(old.get("status", "")).startswith("finished"):
            with contextlib.suppress(LaunchError):
                call_json(["flwr", "stop", str(old["run-id"]), _LINK], folder)
    RunFolder(start.out).write_json(STATUS, {"state": "starting"})
    values = {"config": str(start.file), "out": str(start.out.resolve()), "folder": str(Path.cwd())}
    given = " ".join(f"{name}={json.dumps(value)}" for name, value in values.items())
    if start.seed is not None:
        given += f" seed={start.seed}"
    return int(call_json(["flwr", "run", str(folder / "app"), _LINK, "--run-config", given], folder)["run-id"])


def _watch(
    start: Start, folder: Path, run: int, children: Children, lines: Iterator[list[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """Show what the run reports until it has ended."""
    store = RunFolder(start.out)
    look = time.monotonic() + _LOOK
    while True:
        check_space(start.out)
        children.tend()
        status = store.read_json(STATUS)  # before the lines: what was said last comes out too
        retell(lines)
        if status["state"] == "done":
            rows: list[dict[str, Any]] = store.read_json("result.json")
            return rows
        if status["state"] == "failed":
            raise FpldError(f"{status['error']}; go on with --resume")
        if time.monotonic() > look:
            look = time.monotonic() + _LOOK
            _ask(folder, run)
        time.sleep(_PAUSE)


def check_space(folder: Path) -> None:
    """Stop while the disk has room to say why: a SuperLink on a full disk answers no node any more."""
    free = shutil.disk_usage(folder).free
    if free < LEAST_SPACE:
        raise StorageError(
            f"{folder}: {free:,} bytes are left on the disk, at least {LEAST_SPACE:,} are needed: free some space, and "
            "go on with --resume; what was written before is intact"
        )


def _ask(folder: Path, run: int) -> None:
    """Find out from the SuperLink whether the run has ended without a word."""
    with contextlib.suppress(LaunchError):  # a SuperLink that was just started again
        found = call_json(["flwr", "list", _LINK, "--run-id", str(run)], folder)
        status = str(found["runs"][0].get("status", ""))
        if status.startswith("finished") and "completed" not in status:
            said = call(["flwr", "log", str(run), _LINK, "--show"], folder)
            raise FpldError(f"the run ended: {status}: {' '.join(said.split())[-800:]}; go on with --resume")
