"""The process of a run at the aggregator: it admits the nodes, submits the run to the SuperLink, and does it.

    python -m fpld.engines.flower.launch.runner JOB      (a `RunnerJob` in JSON)

It is started together with the SuperLink. With the patch `runner` it does all of this itself. On stock Flower it calls
Flower's own programs, as their documentation says: `flwr supernode register`, `flwr run`, and a `flower-superexec`,
which starts the ServerApp in a process of its own. That one loads the app which was submitted: two lines that import
the installed package. It finds its job in the environment, so that no path of this machine goes to the nodes.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpld import config as configuration
from fpld.engines.flower.credentials import PublicKeys, is_revoked, public_key_file
from fpld.engines.flower.launch.aggregator import KILLED_CODE, RunnerJob
from fpld.engines.flower.launch.processes import LaunchError, find_program, prepare_child
from fpld.engines.flower.log import FolderLogHandler
from fpld.engines.flower.patches import choose, is_on
from fpld.engines.flower.patches.retry import retry_sooner
from fpld.engines.flower.server import RUN_VARIABLE, server_app
from fpld.engines.flower.site.resources import watch_memory
from fpld.errors import FpldError
from fpld.federation.telemetry import listen
from fpld.storage.run_folder import STATUS, RunFolder
from fpld.validation import shortened_list

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fpld.config import Config

log = logging.getLogger("fpld.engines.flower.launch.runner")  # as a program the module has another __name__

_APP = """\
from fpld.engines.flower.client import client_app, run_forked
from fpld.engines.flower.server import server_app

client = client_app(runner=run_forked)
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
"""
APP_FILES = {"fpld_app.py": _APP.encode(), "pyproject.toml": _PROJECT.encode()}
_MAX_RETRY_SECONDS = 0.5  # the SuperLink is on this machine
_CONNECTION = "fpld"  # the name of the SuperLink in the configuration of Flower's command line
_COMMAND_SECONDS = 60.0
_START_SECONDS = 120.0  # for the SuperLink to answer
_POLL_SECONDS = 1.0
_LIST_SECONDS = 15.0  # between two looks at the run's state, each of which is a process


def run_job() -> None:
    """Do the run of the job on the command line."""
    job = RunnerJob(**json.loads(sys.argv[1]))
    watch_memory(Path(job.out))
    try:
        config, _ = configuration.read_config(job.config, seed=job.seed)
        choose(config.engine.patches)
        with listen(FolderLogHandler(Path(job.out))):
            retry_sooner(_MAX_RETRY_SECONDS)
            patched = is_on("runner")
            keys = _keys(config)
            if patched:
                from fpld.engines.flower.patches.runner import submit_run

                submit_run(job, keys, APP_FILES)
            else:
                sys.exit(StockRun(job).do(keys))
    except FpldError as error:
        sys.stderr.write(f"ERROR: {error}\n")
        sys.exit(1)
    from fpld.engines.flower.patches.runner import run_serverapp

    run_serverapp(job, server_app(job.config, out=job.out, seed=job.seed))


def _keys(config: Config) -> dict[str, str]:
    """Return the public key of each node that was not revoked, in the form of OpenSSH."""
    names = [node.name for node in config.nodes if not is_revoked(config, node.name)]
    return {name: PublicKeys.read(public_key_file(config, name)).auth for name in names}


class StockRun:
    """A run by Flower's own programs; their folder is that of the job's secret."""

    def __init__(self, job: RunnerJob) -> None:
        self._job = job
        self._folder = Path(job.secret).parent

    def do(self, keys: Mapping[str, str]) -> int:
        """Submit the run and wait for its end; return the exit code of this process."""
        self._configure()
        self._wait_for_superlink()
        if self._job.ca is not None:
            self._admit(keys)
        log.info("admitted: %s", shortened_list(list(keys)))
        for run in self._flwr("list", _CONNECTION).get("runs", []):
            if not str(run["status"]).startswith("finished"):
                self._flwr("stop", str(run["run-id"]), _CONNECTION)
        superexec = self._start_superexec()
        try:
            return self._wait_for_end(superexec, self._submit())
        finally:
            superexec.terminate()

    def _configure(self) -> None:
        """Write the configuration of Flower's command line, and the app."""
        trust = "insecure = true" if self._job.ca is None else f"root-certificates = {json.dumps(self._job.ca)}"
        text = f'[superlink]\ndefault = "{_CONNECTION}"\n\n[superlink.{_CONNECTION}]\n'
        text += f'address = "{self._job.address}"\n{trust}\n'
        folder = RunFolder(self._folder)
        folder.write("config.toml", text.encode())
        for name, content in APP_FILES.items():
            folder.write(f"app/{name}", content)

    def _wait_for_superlink(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while True:
            try:
                self._flwr("supernode", "list", _CONNECTION)
            except LaunchError:
                if time.monotonic() > end:
                    raise
                time.sleep(_POLL_SECONDS)
            else:
                return

    def _admit(self, keys: Mapping[str, str]) -> None:
        """Register the keys that this SuperLink has not been given yet."""
        folder = RunFolder(self._folder)
        admitted = set(folder.read_json("admitted.json")) if folder.has("admitted.json") else set()
        for name, key in keys.items():
            if key not in admitted:
                folder.write("admitted.pub", key.encode())
                arguments = ("supernode", "register", str(self._folder / "admitted.pub"), _CONNECTION, "--name", name)
                try:
                    self._flwr(*arguments)
                except LaunchError as error:  # a process that was killed had no time to note it
                    if "already" not in str(error):
                        raise
                admitted.add(key)
                folder.write_json("admitted.json", sorted(admitted))

    def _submit(self) -> str:
        return str(self._flwr("run", str(self._folder / "app"), _CONNECTION)["run-id"])

    def _start_superexec(self) -> subprocess.Popen[bytes]:
        trust = ["--insecure"] if self._job.ca is None else ["--root-certificates", self._job.ca]
        command = [find_program("flower-superexec"), "--runtime-api-address", self._job.address, *trust]
        command += ["--superexec-auth-secret-file", self._job.secret, "--parent-pid", str(os.getpid())]
        run = {"config": self._job.config, "out": self._job.out, "folder": str(Path.cwd())}
        if self._job.seed is not None:
            run["seed"] = self._job.seed  # type: ignore[assignment]
        environment = {**os.environ, RUN_VARIABLE: json.dumps(run)}
        prepare = partial(prepare_child, signal.SIGKILL)
        return subprocess.Popen(command, env=environment, preexec_fn=prepare)  # noqa: S603 - our own

    def _wait_for_end(self, superexec: subprocess.Popen[bytes], run: str) -> int:
        """Wait until the run's status says how it ended; return `KILLED_CODE` if its process ended without that."""
        store = RunFolder(Path(self._job.out))
        looked = time.monotonic()
        while True:
            time.sleep(_POLL_SECONDS)
            code = self._exit_code(store)
            if code is not None:
                return code
            if superexec.poll() is not None:
                return KILLED_CODE
            if time.monotonic() - looked > _LIST_SECONDS:
                looked = time.monotonic()
                if self._is_finished(run):
                    code = self._exit_code(store)  # it may have ended meanwhile
                    return KILLED_CODE if code is None else code

    @staticmethod
    def _exit_code(store: RunFolder) -> int | None:
        state = store.read_json(STATUS)["state"]
        return {"done": 0, "failed": 1}.get(state)

    def _is_finished(self, run: str) -> bool:
        try:
            rows = self._flwr("list", _CONNECTION, "--run-id", run).get("runs", [])
        except LaunchError:  # the SuperLink is being started again
            return False
        return any(str(row["status"]).startswith("finished") for row in rows)

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        """Call Flower's command line; return its answer, or raise `LaunchError` with the reason that it gives."""
        command = [find_program("flwr"), *arguments, "--format", "json"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)  # noqa: S603
            answer = json.loads(done.stdout[done.stdout.index("{") :])
        except subprocess.TimeoutExpired:
            raise LaunchError(f"flwr {arguments[0]} did not end within {_COMMAND_SECONDS:g} s") from None
        except ValueError:
            raise LaunchError(f"flwr {arguments[0]}: {(done.stderr or done.stdout).strip()[-500:]}") from None
        if not answer.get("success"):
            raise LaunchError(f"flwr {arguments[0]}: {answer.get('error-message') or answer}")
        return dict(answer)


if __name__ == "__main__":
    run_job()
