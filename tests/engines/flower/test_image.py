"""A deployment as the image of deploy/Dockerfile runs it: a user without rights, and a root that cannot be written to.

Where no base image can be had none can be built. What its settings ask of the programs is tried without Docker, in a
mount namespace of their own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.engines.flower.conftest import NAMES
from tests.engines.flower.machines import Machines, rounds
from tests.test_package import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

USER = 10001
RECIPE = (ROOT / "deploy/Dockerfile").read_text()
# The arguments: the one folder that can be written to, "--", folders that others may not enter each with what is needed
# of it, "--", and the command.
SCRIPT = """
set -e
writable=$1; shift 2
mount --make-rprivate /
while [ "$1" != -- ]; do
    aside=$(mktemp -d "$writable/aside.XXXXXX"); mount --bind "$2" "$aside"
    mount -t tmpfs -o mode=755 tmpfs "$1"; mkdir -p "$2"; mount --bind "$aside" "$2"
    shift 2
done
shift
mount --bind "$writable" "$writable"; cd "$writable"
for place in $(awk '{print $5}' /proc/self/mountinfo | sort -r); do
    case $place in /proc*|/sys*|/dev*|"$writable"*) ;; *) mount -o remount,ro,bind "$place" ;; esac
done
exec setpriv --reuid USER --regid USER --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
"""

# A codec without kernels: this user cannot read those that are compiled already, and would compile them anew.
CHANGES = (
    ("rounds = 3", "rounds = 2"),
    ("bits = 1.5", "bits = 32.0"),
    ("bits = 4.0", "bits = 32.0"),
    ("[engine]", '[codec]\nname = "float32"\n\n[engine]'),
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.skipif(sys.platform != "linux", reason="namespaces and /proc"),
    pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can change the user"),
    pytest.mark.skipif(None in map(shutil.which, ("unshare", "setpriv")), reason="needs util-linux"),
]


def hidden(needed: Path) -> list[str]:
    """Return the first folder on the way to what is needed that others may not enter, and what is needed of it."""
    for folder in reversed(needed.parents):
        if not folder.stat().st_mode & 1:
            return [str(folder), str(needed)]
    return []


@pytest.fixture
def some(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    with tempfile.TemporaryDirectory(prefix="fpld-image-") as name:  # pytest's own folders are for its user alone
        folder = Path(name)
        folder.chmod(0o755)
        machines = Machines(folder, *CHANGES)
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(folder / "home/.numba"))
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        monkeypatch.chdir(folder)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, USER, USER)
        needed = [word for path in {Path(sys.base_prefix), Path(sys.prefix), ROOT} for word in hidden(path)]
        script = SCRIPT.replace("USER", str(USER))
        machines.within = ["unshare", "--mount", "bash", "-c", script, "image", str(folder), "--", *needed, "--"]
        yield machines
        machines.kill_all()  # only if a test has failed


def healthy(some: Machines, what: Path) -> bool:
    """Run the image's check of its health."""
    check = re.search(r"HEALTHCHECK[^[]*CMD (\[.*\])$", RECIPE, re.MULTILINE)
    assert check is not None
    environment = {**os.environ, "FPLD_HEALTH": str(what)}
    return subprocess.run([*some.within, *json.loads(check[1])], env=environment, capture_output=True).returncode == 0


def test_a_trial_without_tls_as_the_image_runs_it(some: Machines) -> None:
    """Both ends with --insecure, which is said; the check of the image's health knows what runs."""
    assert f"USER {USER}" in RECIPE
    assert "--read-only" in RECIPE
    probe = "touch inside && ! touch /outside 2>/dev/null && ! touch /tmp/outside 2>/dev/null && id -u"
    done = subprocess.run([*some.within, "sh", "-c", probe], capture_output=True, text=True)
    assert done.stdout == f"{USER}\n", done.stderr
    some.aggregator("--insecure")
    for name in NAMES:
        some.start(name, "node", some.folder / "nodes" / name / "node.toml", "--insecure")
    some.wait_for(lambda: rounds(some), 240)
    assert healthy(some, some.folder / "flower")
    assert healthy(some, some.folder / "nodes/north/node.toml")
    assert some.running.pop("aggregator").wait(120) == 0, some.said("aggregator")
    assert "INSECURE: no TLS and no node authentication" in some.said("aggregator")
    assert [line["nodes"] for line in rounds(some)] == [list(NAMES)] * 2
    some.clean_up()
    assert healthy(some, some.folder / "flower")  # a run that is done is sound
    assert not healthy(some, some.folder / "nodes/north/node.toml")
