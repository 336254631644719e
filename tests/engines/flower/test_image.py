"""The deployment of deploy/compose.yaml, as the image of deploy/Dockerfile runs it: no rights, a read-only root.

Where no base image can be had none can be built. What compose file and image ask of the programs is tried without
Docker: each service is a process with a mount namespace of its own, in which its volumes are where the file says. All
share a network namespace, in which the name of the aggregator's service is known.
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
from typing import TYPE_CHECKING, Any

import pytest
import yaml  # type: ignore[import-untyped]

from fpld.config import read_config
from tests.engines.flower.conftest import NAMES
from tests.engines.flower.machines import Machines
from tests.test_package import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

USER = "10001"
RECIPE = (ROOT / "deploy/Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
# The arguments: a folder of volumes, a file of hosts, the user, capabilities, "--", pairs of a source and where it is
# mounted, "--", folders that others may not enter each with what is needed of it, "--", and the command.
SCRIPT = """
set -e
folder=$1; hosts=$2; user=$3; capabilities=$4; shift 5
mount --make-rprivate /
volumes=$(mktemp -d "$folder/volumes.XXXXXX"); mount --bind "$folder" "$volumes"
mount -t tmpfs -o mode=755 tmpfs /srv
while [ "$1" != -- ]; do
    case $2 in *.toml) touch "$2" ;; *) mkdir -p "$2" ;; esac
    mount --bind "$volumes/${1#$folder/}" "$2"; shift 2
done
shift
while [ "$1" != -- ]; do
    aside=$(mktemp -d "$folder/aside.XXXXXX"); mount --bind "$2" "$aside"
    mount -t tmpfs -o mode=755 tmpfs "$1"; mkdir -p "$2"; mount --bind "$aside" "$2"
    shift 2
done
shift
mount --bind "$hosts" /etc/hosts
cd /srv/fpld 2>/dev/null || cd /srv
for place in $(awk '{print $5}' /proc/self/mountinfo | sort -r); do
    case $place in /proc*|/sys*|/dev*|/srv*) ;; *) mount -o remount,ro,bind "$place" ;; esac
done
exec setpriv --reuid "$user" --regid "$user" --clear-groups --no-new-privs --bounding-set="$capabilities" \
    --inh-caps=-all "$@"
"""
LINUX = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.skipif(sys.platform != "linux", reason="namespaces and /proc"),
    pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can change the user"),
    pytest.mark.skipif(None in map(shutil.which, ("unshare", "nsenter", "setpriv", "ip")), reason="needs util-linux"),
]


def hidden(needed: Path) -> list[str]:
    """Return the first folder on the way to what is needed that others may not enter, and what is needed of it."""
    for folder in reversed(needed.parents):
        if not folder.stat().st_mode & 1:
            return [str(folder), str(needed)]
    return []


class Services:
    """The services of the compose file, without Docker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.machines = Machines(folder)
        self._network = subprocess.Popen(["/usr/bin/unshare", "--net", "sleep", "600"])
        self._hosts = folder / "hosts"
        self._hosts.write_text("127.0.0.1 localhost aggregator\n")
        shutil.copy(ROOT / "deploy/consortium.toml", folder)
        for name in COMPOSE["volumes"]:
            (folder / name).mkdir()
        self._within = ["nsenter", f"--net=/proc/{self._network.pid}/ns/net"]
        self.machines.wait_for(lambda: self._other_network(), 20)
        subprocess.run([*self._within, "ip", "link", "set", "lo", "up"], check=True)

    def _other_network(self) -> bool:
        namespaces = [os.readlink(f"/proc/{process}/ns/net") for process in (self._network.pid, "self")]
        return len(set(namespaces)) == 2

    def within(self, name: str) -> list[str]:
        """Return the command that runs another one as a service's container does."""
        service = SERVICES[name]
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        capabilities = ",".join(["-all", *(f"+{each.lower()}" for each in service.get("cap_add", []))])
        mounts = []
        for volume in service["volumes"]:
            source, target, *_ = volume.split(":")
            mounts += [str(self.folder / source.removeprefix("./")), target]
        needed = [word for path in {Path(sys.base_prefix), Path(sys.prefix), ROOT} for word in hidden(path)]
        first = [str(self.folder), str(self._hosts), service["user"], capabilities, "--", *mounts, "--", *needed, "--"]
        return [*self._within, "unshare", "--mount", "bash", "-c", SCRIPT, "image", *first]

    def command(self, name: str) -> list[str]:
        """Return what a service runs, in the words of the file."""
        service = SERVICES[name]
        words = [*service.get("entrypoint", json.loads(_instruction("ENTRYPOINT"))), *service["command"]]
        return [word.replace("$$", "$") for word in words]

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Start a service."""
        environment = {**os.environ, "HOME": str(self.folder / "home"), "TMPDIR": "/srv/fpld"}
        with (self.folder / f"{name}.out").open("ab") as output:
            command = [*self.within(name), *self.command(name)]
            self.machines.running[name] = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        return self.machines.running[name]

    def healthy(self, name: str) -> bool:
        """Run a service's check, and that of the image, which must agree."""
        check = SERVICES[name]["healthcheck"]["test"]
        assert check[0] == "CMD"
        image = json.loads(_instruction("HEALTHCHECK").partition("CMD ")[2])
        environment = {**os.environ, **SERVICES[name]["environment"]}
        codes = {
            bool(subprocess.run([*self.within(name), *each], env=environment, capture_output=True).returncode)
            for each in (check[1:], image)
        }
        (code,) = codes
        return not code

    def end(self) -> None:
        """Leave nothing behind."""
        self.machines.kill_all()
        self._network.kill()
        self._network.wait()


def _instruction(name: str) -> str:
    """Return the last instruction of a name in the recipe, without the name."""
    found: list[str] = re.findall(rf"^{name} ((?:.*\\\n)*.*)$", RECIPE, re.MULTILINE)
    return found[-1].replace("\\\n", " ")


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Iterator[Services]:
    with tempfile.TemporaryDirectory(prefix="fpld-image-") as name:  # pytest's own folders are for its user alone
        folder = Path(name)
        folder.chmod(0o755)
        monkeypatch.setenv("NUMBA_CACHE_DIR", "/srv/fpld/.numba")
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        started = Services(folder)
        yield started
        started.end()


def test_compose_image_and_configuration_agree() -> None:
    assert f"USER {USER}" in RECIPE
    assert "--read-only" in RECIPE
    # Kernels are compiled as the user that runs them, with their cache set, and before the volume hides the place.
    order = [
        RECIPE.index(line) for line in ("NUMBA_CACHE_DIR=/srv/fpld", f"\nUSER {USER}", "fpld warm; fi", "\nVOLUME")
    ]
    assert order == sorted(order)
    config, _ = read_config(ROOT / "deploy/consortium.toml")
    assert [node.name for node in config.nodes] == list(NAMES)
    assert set(SERVICES) == {"prepare", "aggregator", *NAMES}
    assert set(COMPOSE["volumes"]) == {"aggregator", *NAMES}
    for name in NAMES:
        assert SERVICES[name]["user"] == USER
        assert SERVICES[name]["volumes"] == [f"{name}:/srv/fpld"]
        assert SERVICES[name]["depends_on"] == {"prepare": {"condition": "service_completed_successfully"}}
        assert f"{name}=" in SERVICES["prepare"]["command"][0]


def test_a_site_in_kubernetes_goes_outwards_only_and_has_no_rights() -> None:
    """The manifests; `docs/deploy.md` says by which schemas they were checked besides."""
    documents = list(yaml.safe_load_all((ROOT / "deploy/kubernetes/site.yaml").read_text()))
    kinds = [document["kind"] for document in documents]
    assert kinds == ["PersistentVolumeClaim", "PersistentVolumeClaim", "Deployment", "NetworkPolicy"]
    assert {document["metadata"]["namespace"] for document in documents} == {"fpld"}
    claims = {document["metadata"]["name"] for document in documents[:2]}
    deployment = documents[2]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["replicas"] == 1
    assert deployment["strategy"] == {"type": "Recreate"}  # a key is used by one process
    for selector in (deployment["selector"], documents[3]["spec"]["podSelector"]):
        assert selector["matchLabels"].items() <= labels.items()
    pod = deployment["template"]["spec"]
    assert pod["securityContext"]["runAsUser"] == int(USER)
    assert pod["automountServiceAccountToken"] is False
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    claimed = [
        each["persistentVolumeClaim"]["claimName"] for each in volumes.values() if "persistentVolumeClaim" in each
    ]
    assert set(claimed) == claims
    for container in (*pod["initContainers"], *pod["containers"]):
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        limits = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container["securityContext"] == limits
        assert "ports" not in container
    (node,) = pod["containers"]
    assert node["readinessProbe"]["exec"]["command"] == ["fpld", "node", "status", node["args"][1], "--health"]
    policy = documents[3]["spec"]
    assert policy["ingress"] == []
    assert sorted(policy["policyTypes"]) == ["Egress", "Ingress"]


@pytest.mark.parametrize("_", [pytest.param(None, marks=LINUX, id="")])
def test_the_services_of_the_compose_file_make_a_run(services: Services, _: None) -> None:
    """`prepare`, then all at once; every check of health knows what runs. The root cannot be written to."""
    assert services.start("prepare").wait(60) == 0, services.machines.said("prepare")
    probe = "touch inside && ! touch /outside 2>/dev/null && ! touch /tmp/outside 2>/dev/null && id -u"
    done = subprocess.run([*services.within("north"), "sh", "-c", probe], capture_output=True, text=True)
    assert done.stdout == f"{USER}\n", done.stderr
    assert not services.healthy("north")
    for name in ("aggregator", *NAMES):
        services.start(name)
    trace = services.folder / "aggregator/runs/one/fpld/trace.jsonl"
    services.machines.wait_for(trace.exists, 240)
    assert services.healthy("aggregator")
    assert services.healthy("north")
    said = services.machines.said
    assert services.machines.running.pop("aggregator").wait(120) == 0, said("aggregator")
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [line["nodes"] for line in lines] == [list(NAMES)] * 2
    assert "base" in said("aggregator")
    for name in NAMES:
        services.machines.end(name)
    services.machines.wait_for(lambda: not services.machines.processes(), 20)
    assert services.healthy("aggregator")  # a run that is done is sound
    assert not services.healthy("north")
