"""The table of docs/operating.md: each fault is caused, in one deployment, and must look as the page says.

A cell of the table has in backquotes what must be there: in the state and reason of the site, in its log, in what the
aggregator's trace says of it. The health check ends with the exit code that stands there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from fpld.cli import main
from fpld.engines.flower.credentials import make_certificates
from fpld.engines.flower.launch.connection import HEALTHY_STATES, SiteState, read_state
from fpld.engines.flower.log import last_texts
from fpld.engines.flower.site.config import Invitation, init_node
from tests.engines.flower.machines import Machines, rounds
from tests.test_package import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.waits,
    pytest.mark.skipif(sys.platform != "linux", reason="tmpfs and LD_PRELOAD"),
]
PAGE = (ROOT / "docs/operating.md").read_text()
# Sites by the faults of the table.
SITES = {
    "none": "north",
    "another probe set": "probe",
    "full disk": "disk",
    "another authority": "authority",
    "a key that was not admitted": "stranger",
    "expired certificate": "expired",
    "clock off by an hour": "clock",
    "revoked": "revoked",
    "a second process with one key": "copy",
}
ANSWERING = ("north", "probe", "disk")  # the others are not let in
CLOCKS = {"expired": 24 * 3600, "clock": 3600}  # seconds by which a site's clock is ahead
DISK_BYTES = 400_000
WAIT_SECONDS = 75
COMPILER = shutil.which("cc")


class Fault(NamedTuple):
    """A row of the table: what the site, its log and the aggregator say, and the exit code of the health check."""

    site: list[str]
    log: list[str]
    aggregator: list[str]
    health: int


def table() -> dict[str, Fault]:
    """Read the table of the page."""
    lines = PAGE.partition("## What a fault looks like")[2].partition("\n## ")[0].splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")][2:]
    faults = {}
    for fault, *cells, health in rows:
        site, log, aggregator = (re.findall(r"`([^`]+)`", cell) for cell in cells)
        faults[fault.strip()] = Fault(site, log, aggregator, int(health))
    return faults


def shorten_certificate(certs: Path) -> None:
    """Sign the aggregator's certificate anew, so that it ends in half a day."""
    authority = x509.load_pem_x509_certificate((certs / "ca.pem").read_bytes())
    key = load_pem_private_key((certs / "ca.key").read_bytes(), None)
    old = x509.load_pem_x509_certificate((certs / "server.pem").read_bytes())
    builder = (
        x509.CertificateBuilder()
        .issuer_name(authority.subject)
        .subject_name(old.subject)
        .public_key(old.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(old.not_valid_before_utc)
        .not_valid_after(datetime.now(UTC) + timedelta(hours=12))
    )
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, critical=extension.critical)
    made = builder.sign(key, hashes.SHA256())  # type: ignore[arg-type]
    (certs / "server.pem").write_bytes(made.public_bytes(Encoding.PEM))


class Consortium:
    """A deployment with a site for each fault."""

    def __init__(self, folder: Path) -> None:
        others = [name for name in (*SITES.values(), "idle") if name not in ("north", "copy")]
        nodes = "".join(f'[[nodes]]\nname = "{name}"\nbits = 4.0\n\n' for name in others)
        self.machines = Machines(
            folder,
            ("rounds = 3", "rounds = 1\nquorum = 1"),
            ("[student]", f"{nodes}[student]"),
        )
        text = self.machines.deployment.file.read_text()
        self.machines.deployment.file.write_text(text.replace("wait = 90.0", f"wait = {WAIT_SECONDS}.0"))
        self.folder = folder
        self.nodes = folder / "nodes"
        self.certs = folder / "certs"
        shorten_certificate(self.certs)
        for name in others:
            self._join(name, self.certs)
        shutil.copytree(self.nodes / "north", self.nodes / "copy")
        self._spoil()

    def _join(self, name: str, certs: Path) -> None:
        source = f'data = "{self.folder}/texts/north"'
        public = init_node(self.nodes / name, name, Invitation.read(certs / "federation.toml"), source)
        shutil.copy(public, self.folder / "keys")

    def _spoil(self) -> None:
        """Cause the faults that are files."""
        make_certificates(self.folder / "other", self.machines.address, ["127.0.0.1"], days=2)
        shutil.copy(self.folder / "other/ca.pem", self.nodes / "authority/ca.pem")
        shutil.rmtree(self.nodes / "stranger")  # made anew, with other keys than those that were admitted
        federation = Invitation.read(self.certs / "federation.toml")
        init_node(self.nodes / "stranger", "stranger", federation, f'data = "{self.folder}/texts/north"')
        (self.folder / "keys/revoked.revoked").touch()
        file = self.nodes / "probe/node.toml"
        file.write_text(f'{file.read_text()}\nprobe = "{"ab" * 32}"\n')

    def start(self, name: str) -> None:
        """Start a site, with its clock."""
        environment = []
        if name in CLOCKS:
            environment = ["env", f"LD_PRELOAD={self.folder}/clock.so", f"TEST_CLOCK_AHEAD={CLOCKS[name]}"]
        self.machines.within = environment
        self.machines.node(name)
        self.machines.within = []

    def state(self, name: str) -> SiteState:
        return read_state(self.nodes / name)


@pytest.fixture
def consortium(tmp_path: Path) -> Iterator[Consortium]:
    made = Consortium(tmp_path)
    yield made
    made.machines.kill_all()
    subprocess.run(["/bin/umount", "-l", made.nodes / "disk"], capture_output=True)


def clock_library(folder: Path) -> bool:
    """Compile the library that sets a program's clock; return whether that can be done here."""
    if COMPILER is None:
        return False
    source = Path(__file__).with_name("clock.c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", folder / "clock.so", source, "-ldl"], check=True)
    return True


def small_disk(folder: Path) -> bool:
    """Put a site on a small disk of its own; return whether that can be done here."""
    aside = folder.with_name(f"{folder.name}-before")
    shutil.copytree(folder, aside)
    size = f"size={DISK_BYTES}"
    done = subprocess.run(["/bin/mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], capture_output=True)
    if done.returncode == 0:
        shutil.copytree(aside, folder, dirs_exist_ok=True)
    return done.returncode == 0


def stands(text: str, fault: Fault) -> bool:
    """Return whether a site's state and reason are those of a row."""
    return text.startswith(fault.site[0]) and all(words in text for words in fault.site)


def test_each_fault_looks_as_the_page_says(consortium: Consortium, capsys: pytest.CaptureFixture[str]) -> None:
    faults = table()
    assert set(faults) == set(SITES)
    left_out = set() if clock_library(consortium.folder) else {"clock off by an hour", "expired certificate"}
    if os.geteuid() != 0 or not small_disk(consortium.nodes / "disk"):
        left_out.add("full disk")
    names = {SITES[fault]: fault for fault in faults if fault not in left_out}
    machines = consortium.machines
    machines.aggregator()
    machines.wait_for(lambda: "admitted" in machines.said("aggregator"), 120)
    health: dict[str, int] = {}

    def look() -> None:
        """Ask for the status of each site once it stands as the page says."""
        for name, fault in names.items():
            if name in health or not stands(str(consortium.state(name)), faults[fault]):
                continue
            file = str(consortium.nodes / name / "node.toml")
            code = main(["node", "status", file, "--health", "--json"])
            (row,) = json.loads(capsys.readouterr().out)["rows"]
            if stands(f"{row['state']}: {row['reason']}", faults[fault]):
                health[name] = code

    for name in (each for each in ANSWERING if each in names):
        consortium.start(name)
    machines.wait_for(lambda: all(consortium.state(n).healthy for n in ANSWERING if n in names), 60)
    for name in (each for each in names if each not in ANSWERING):
        consortium.start(name)
    checks = {}
    for name in ("idle", "revoked"):  # the second one's state when it is tried, whatever has become of it
        code = main(["check", str(consortium.nodes / name / "node.toml"), "--connect", "--json"])
        checks[name] = code, json.loads(capsys.readouterr().out)["rows"][-1]["says"]
        look()
    end = time.monotonic() + 180
    while machines.running["aggregator"].poll() is None:
        assert time.monotonic() < end, machines.said("aggregator")[-3000:]
        look()
        time.sleep(0.1)
    assert machines.running.pop("aggregator").wait(10) == 0, machines.said("aggregator")[-3000:]
    assert set(health) == set(names), {name: consortium.state(name) for name in set(names) - set(health)}
    assert health == {name: faults[fault].health for name, fault in names.items()}
    assert checks["idle"][0] == 0
    assert checks["idle"][1].startswith("connected")
    assert checks["revoked"][0] == 2
    machines.end("north")
    assert consortium.state("north").state == "stopped"
    (line,) = rounds(machines)
    absent = {each["node"]: f"{each['state']}: {each['reason']}" for each in line["absent"]}
    said = machines.said("aggregator")
    for name, fault in names.items():
        log = "\n".join(last_texts(consortium.nodes / name))
        assert not [words for words in faults[fault].log if words not in log], (name, log)
        assert not [words for words in faults[fault].aggregator if words not in absent.get(name, "")], (name, absent)
        assert not [words for words in ("Traceback", "SSL") if words in machines.said(name)], machines.said(name)
        assert (name in absent) == (name not in ("north", "copy"))
    assert "north" in line["nodes"]
    assert "round 1 continues without" in said
    assert "Held-out text of north, and what was sent; without" in said
    assert re.search(r"student, trace and checkpoints: .*; without .* in 1 of 1 round", said.replace("\n", " "))
    assert "base" in said


def test_the_page_names_every_state() -> None:
    states = {fault.site[0] for fault in table().values()}
    assert states >= {"certificate refused", "not admitted", "waiting"}
    assert {fault.health for fault in table().values() if fault.site[0] in HEALTHY_STATES} == {0}
    assert {fault.health for fault in table().values() if fault.site[0] not in HEALTHY_STATES} == {1}
