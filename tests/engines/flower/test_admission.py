"""Who does not get as far as the app: the SuperLink turns them away. Real processes, and one node that is let in."""

from __future__ import annotations

import contextlib
import shutil
import time
from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fpld.engines.flower.credentials import PublicKeys, make_certificates
from fpld.engines.flower.launch.aggregator import AggregatorProcesses
from fpld.engines.flower.launch.processes import ChildProcess, LaunchError, check_port, free_port, wait_ready
from fpld.engines.flower.launch.runner import APP_FILES
from fpld.engines.flower.patches.runner import ControlClient, UnreachableError
from fpld.engines.flower.site.config import Invitation, init_node
from fpld.errors import InputError
from tests.engines.flower.conftest import NAMES, Deployment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.waits]


def supernode(home: Path, address: str, *security: str) -> ChildProcess:
    command = ["flower-supernode", "--superlink", address, "--port", str(free_port()), "--max-retries", "2"]
    return ChildProcess([*command, *security], home / "supernode.log", home / "flower")


def tls(home: Path) -> Sequence[str]:
    return "--root-certificates", str(home / "ca.pem"), "--auth-supernode-private-key", str(home / "auth.key")


@contextlib.contextmanager
def superlink(deployment: Deployment) -> Iterator[ControlClient]:
    """Run a deployment's SuperLink, and a connection to it."""
    flower = deployment.config.flower
    assert flower is not None
    (deployment.folder / "flower").mkdir()
    children = AggregatorProcesses(flower, deployment.folder / "flower", insecure=False)
    assert children.ca is not None
    try:
        with ControlClient(children.address, children.ca) as control:
            with pytest.raises(UnreachableError, match="the SuperLink does not answer ListNodes"):
                control.admit({})
            children.start_superlink()
            children.wait()
            yield control
    finally:
        children.stop()


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own, when it packs an app
def test_a_hundred_nodes_are_admitted_over_one_connection(tmp_path: Path) -> None:
    """In seconds, and once: a second time nothing is registered. A key that is none is named."""
    address = f"127.0.0.1:{free_port()}"
    deployment = Deployment(tmp_path, [("wait = 0.2", f'wait = 0.2\naddress = "{address}"')], address=address)
    keys = {}
    for number in range(100):
        key = ec.generate_private_key(ec.SECP384R1()).public_key()
        keys[f"node-{number}"] = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    with superlink(deployment) as control:
        begun = time.monotonic()
        control.admit(keys)
        control.admit(keys)
        assert time.monotonic() - begun < 30
        log = (tmp_path / "flower/superlink.log").read_text()
        assert log.count("Created node_id=") == 100
        with pytest.raises(InputError, match=r"mine\.pub must hold the ECDSA key"):
            control.admit({"mine": "ssh-rsa AAAA"})
        run = control.start_run(APP_FILES)
        control.stop_runs()
        control.stop_runs()  # those that have ended stay so
        assert run > 0


def test_plaintext_unregistered_and_wrong_authority_are_turned_away(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    deployment = Deployment(tmp_path, [("wait = 0.2", f'wait = 0.2\naddress = "{address}"')], address=address)
    nodes = tmp_path / "nodes"
    make_certificates(tmp_path / "other", address, ["127.0.0.1"], days=1)
    for name, federation in (("stranger", "certs"), ("misled", "other")):
        init_node(nodes / name, name, Invitation.read(tmp_path / federation / "federation.toml"), 'data = "."')
    shutil.copy(nodes / "east/auth.key", nodes / "misled/auth.key")  # the right key, but another authority
    with superlink(deployment) as control:
        keys = {name: PublicKeys.read(tmp_path / f"keys/{name}.pub").auth for name in NAMES}
        control.admit(keys)
        control.admit(keys)  # as after a restart: what the database knows is not registered again
        children = {
            "north": supernode(nodes / "north", address, *tls(nodes / "north")),
            "plaintext": supernode(nodes / "south", address, "--insecure"),
            "keyless": supernode(nodes / "east", address, "--root-certificates", str(nodes / "east/ca.pem")),
            "stranger": supernode(nodes / "stranger", address, *tls(nodes / "stranger")),
            "misled": supernode(nodes / "misled", address, *tls(nodes / "misled")),
        }
        try:
            end = time.monotonic() + 90
            while any(child.alive for name, child in children.items() if name != "north") and time.monotonic() < end:
                time.sleep(0.2)
            assert children["north"].alive
            assert "SuperNode ID" in children["north"].log.read_text()
            for name in ("plaintext", "keyless", "stranger", "misled"):
                assert not children[name].alive, name
                assert children[name].process.returncode != 0, name
                assert "SuperNode ID" not in children[name].log.read_text(), name
                assert "SuperLink" in children[name].exit_reason(), name
        finally:
            for child in children.values():
                child.stop()


def test_what_does_not_start_is_reported_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="flower-superlink stopped at once"):
        wait_ready(
            ChildProcess(["flower-superlink", "--port", "1", "--no-such-flag"], tmp_path / "log", tmp_path),
            "http://127.0.0.1:1/health",
            None,
        )
    with pytest.raises(LaunchError, match=r"cannot listen at 203\.0\.113\.1:80"):
        check_port("203.0.113.1", 80)
    (tmp_path / "certs").mkdir()
    (tmp_path / "certs/ca.pem").write_text("")
    with pytest.raises(InputError, match=r"must hold all of ca\.pem, server\.pem and server\.key, or none"):
        make_certificates(tmp_path / "certs", "a:1", ["a"], days=1)
