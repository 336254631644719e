"""Worker processes know what a script has registered, without a main guard; what they cannot import is an error."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fpld import registry
from fpld.engines.pool import Workers, make_pool
from fpld.errors import ResourceError
from fpld.rules.averages import Mean
from fpld.spawn import Origin, Registration, unreachable

ROOT = Path(__file__).parents[2]
DENSE = '"nodes[0].context_bits": 768.0, "nodes[1].context_bits": 768.0, "combine.rule": "mean"'
SCRIPT = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import fpld
from fpld.codecs.uniform.codec import UniformCodec

print("begins")

class Mine(UniformCodec):
    pass

fpld.registry.codecs.register("mine", Mine())
overrides = {{"engine.workers": 2, "codec.name": "mine", "run.rounds": 1, "baselines.methods": [], {DENSE}}}
print(fpld.run("tiny", out="out", overrides=overrides).state)
"""
NESTED = """
import multiprocessing, os, sys
from fpld.spawn import Origin, spawn_context
from job import work

class Mine:
    pass

def end(item):
    os._exit(7 if isinstance(item, Mine) else 8)

def start(method):
    process = multiprocessing.get_context(method).Process(target=end, args=(Mine(),))
    process.start()
    process.join()
    return process.exitcode

if __name__ == "__main__":
    for method in sys.argv[1:]:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = spawn_context().Process(target=work, args=(Origin.of_this_process(), method, sender))
        process.start()
        print(receiver.recv() if receiver.poll(100) else "nothing")
        process.join()
"""
JOB = """
def work(origin, method, sender):
    origin.restore()
    import __mp_main__

    sender.send(__mp_main__.start(method))
"""
GUARDED = """
import fpld

overrides = {
    "student": {"kind": "transformer", "layers": 1, "width": 16, "heads": 2, "length": 16, "batch": 4},
    "engine.workers": 1, "engine.processes": 2, "run.rounds": 1, "run.continuations": 0, "baselines.methods": [],
    "base.steps": 2, "local.steps": 2, "distill.steps": 2,
}
if __name__ == "__main__":
    print(fpld.run("tiny", out="out", overrides=overrides).state)
"""


class Local(Mean):
    """A rule of this module, which worker processes can import."""


def registered(kind: str) -> list[str]:
    """Return what was registered in a worker: a job."""
    return sorted(next(each for each in registry.REGISTRIES if each.kind == kind).registered())


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # as it is for users
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_script_without_a_main_guard_runs_once_with_a_codec_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(tmp_path, "script.py")
    assert (done.returncode, done.stdout) == (0, "begins\ndone\n"), done.stderr
    assert "cannot import" not in done.stderr


def test_a_worker_starts_processes_that_know_the_script(tmp_path: Path) -> None:
    """And nothing is written beside it."""
    (tmp_path / "script.py").write_text(NESTED)
    (tmp_path / "job.py").write_text(JOB)
    methods = [method for method in ("spawn", "forkserver") if method in multiprocessing.get_all_start_methods()]
    done = run(tmp_path, "script.py", *methods)
    assert (done.returncode, done.stdout.split()) == (0, ["7"] * len(methods)), done.stderr
    assert not list(tmp_path.glob("**/script.*.pyc"))


@pytest.mark.slow
def test_a_script_trains_in_two_processes_of_a_worker(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(GUARDED)
    done = run(tmp_path, "script.py")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_a_pool_that_is_given_a_job_after_its_end_waits_no_more_for_records() -> None:
    """A worker may die with the lock of the queue: then no end of it can be read."""
    with make_pool(1) as pool:
        assert isinstance(pool, Workers)
        assert pool.submit(len, "worker").result() == 6
        (process,) = pool._processes.values()
        process.kill()
        process.join()
        until = time.monotonic() + 60
        while not pool._broken and time.monotonic() < until:
            time.sleep(0.01)
        with pytest.raises(ResourceError, match="a worker process was killed"):
            pool.submit(len, "worker")
        assert pool._listener is None


def test_what_no_process_can_import_is_an_error_that_names_key_and_remedy(tmp_path: Path) -> None:
    """As in a notebook: a main module without a file."""
    done = run(tmp_path, "-c", SCRIPT)
    assert done.returncode == 1
    error = done.stderr.strip().splitlines()[-1]
    assert "codec.name: worker processes cannot import 'mine', it is defined in a notebook" in error
    assert error.endswith("define it in a module (a .py file) and import that, or set engine.workers = 0")
    assert not (tmp_path / "out").exists()


def test_workers_know_what_was_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (registry.rules, registry.codecs):
        monkeypatch.setattr(table, "_loaded", dict(table._loaded))
    registry.rules.register("local", Local())
    registry.rules.register("nowhere", lambda: None)  # type: ignore[arg-type]
    assert unreachable(registry.rules.get("local")) is None
    assert "cannot be pickled" in str(unreachable(registry.rules.get("nowhere")))
    before = dict(vars(sys.modules["__main__"]))
    with make_pool(1) as pool:
        assert pool.submit(registered, "rule").result() == ["local"]
    assert vars(sys.modules["__main__"]) == before
    assert [each.name for each in Origin.of_this_process().registrations] == ["local"]


def test_what_a_worker_cannot_import_is_a_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise ValueError('no such table')")
    main = sys.modules["__main__"]
    try:
        gone = pickle.dumps(Local()).replace(b"test_spawn", b"test_gone_")
        Origin(None, str(tmp_path / "broken.py"), (Registration("rule", "gone", gone),)).restore()
    finally:
        sys.modules["__main__"] = main
        sys.modules.pop("__mp_main__", None)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.endswith("broken.py: no such table")
    assert "cannot import the rule 'gone'" in second
    assert "engine.workers = 0" in second
    assert "gone" not in registry.rules
    assert multiprocessing.parent_process() is None
