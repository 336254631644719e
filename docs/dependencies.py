"""What this package is built on, for those who check it: hashes of the tested versions, and a bill of materials.

    python -m docs.dependencies hashes          hashes.txt: the files of each version in constraints.txt (`make hashes`)
    python -m docs.dependencies sbom --out F    what is installed here for fpld, as CycloneDX 1.6 JSON (`make sbom`)

Hashes are those that the package index states, of the wheels for Linux and for any machine, and of the source where
there is no such wheel. `torch` has none: whoever installs it chooses a build (for CPUs, for a version of CUDA) and with
it an index. The bill has fpld with the extras of a node, and all that these need, at the versions that are installed.
Equal environments give equal bytes: it has no date and no random number.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag

from packaging.requirements import Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
HASHES = ROOT / "hashes.txt"
UNHASHED = {"torch"}
NODE_EXTRAS = ("flower", "fast", "text", "torch", "huggingface", "report", "dashboard", "privacy")
_PLATFORMS = re.compile(r"any|(many)?linux\w*_(x86_64|aarch64)")
_PYTHONS = re.compile(r"py2\.py3|py3\d*|cp311|cp312|cp313")  # besides wheels of the stable ABI
_HEAD = """# The files of the versions in constraints.txt, by their hashes: for Linux and Python 3.11 to 3.13.
# Made by `make hashes`. `make setup HASHES=1` installs these by hash, and builds fpld with the hatchling among them.
# torch has no hash: its build is the user's choice. What that needs besides (nvidia-*, triton) has none either.
"""


class Pin(NamedTuple):
    """A version that was tested."""

    name: str
    version: str


def pins(text: str) -> list[Pin]:
    r"""Return the pins of a file of constraints.

    >>> pins("# tested\nnumpy==2.4.0\nlm_eval==0.4.9\n")
    [Pin(name='numpy', version='2.4.0'), Pin(name='lm-eval', version='0.4.9')]
    """
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    parts = (line.partition("==") for line in lines if line)
    return [Pin(canonicalize_name(name), version) for name, _, version in parts]


class _Links(HTMLParser):
    """The files on a page of a package index, with their hashes."""

    def __init__(self) -> None:
        super().__init__()
        self.hashes: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a file that has a hash."""
        address, fragment = urldefrag(dict(attrs).get("href") or "")
        if tag == "a" and fragment.startswith("sha256="):
            self.hashes[unquote(address.rsplit("/", 1)[-1])] = fragment.removeprefix("sha256=")


def chosen_files(names: list[str], version: str) -> list[str]:
    """Return the files of a version that are for Linux or any machine; its source if there is no such wheel.

    >>> chosen_files(["a-1.0-py3-none-any.whl", "a-1.0.tar.gz", "a-1.1-py3-none-any.whl"], "1.0")
    ['a-1.0-py3-none-any.whl']
    >>> chosen_files(["a-1.0-cp311-cp311-win_amd64.whl", "a-1.0.tar.gz"], "1.0")
    ['a-1.0.tar.gz']
    """
    wheels = []
    sources = []
    for name in names:
        try:
            if name.endswith(".whl"):
                _, found, _, tags = parse_wheel_filename(name)
                if found == Version(version) and any(
                    _is_for_us(tag.interpreter, tag.abi, tag.platform) for tag in tags
                ):
                    wheels.append(name)
            elif parse_sdist_filename(name)[1] == Version(version):
                sources.append(name)
        except (InvalidWheelFilename, InvalidSdistFilename):  # an old file of another form
            continue
    return sorted(wheels) or sorted(sources)


def _is_for_us(interpreter: str, abi: str, platform: str) -> bool:
    return bool(_PLATFORMS.fullmatch(platform)) and (abi == "abi3" or bool(_PYTHONS.fullmatch(interpreter)))


def file_hashes(pin: Pin) -> list[str]:
    """Return the hashes of a version's files, as the index that pip is set up with by default states them."""
    from pip._internal.models.index import PyPI

    with urllib.request.urlopen(f"{PyPI.simple_url}/{pin.name}/", timeout=60) as page:  # noqa: S310 - an https address
        links = _Links()
        links.feed(page.read().decode())
    found = [links.hashes[name] for name in chosen_files(list(links.hashes), pin.version)]
    if not found:
        raise SystemExit(f"{pin.name}=={pin.version}: the index has no file of this version with a hash")
    return sorted(set(found))


def write_hashes() -> None:
    """Write the hashes of all pins."""
    wanted = [pin for pin in pins(CONSTRAINTS.read_text()) if pin.name not in UNHASHED]
    with ThreadPoolExecutor(8) as pool:
        hashes = list(pool.map(file_hashes, wanted))
    lines = [
        " \\\n".join([f"{pin.name}=={pin.version}", *(f"    --hash=sha256:{each}" for each in own)]) + "\n"
        for pin, own in zip(wanted, hashes, strict=True)
    ]
    HASHES.write_text(_HEAD + "".join(lines))


def bill_of_materials(extras: tuple[str, ...] = NODE_EXTRAS) -> dict[str, Any]:
    """Return what is installed for fpld with these extras, as a CycloneDX document."""
    needs: dict[str, set[str]] = {}
    found: dict[str, Distribution] = {}
    waiting = [("fpld", frozenset(extras))]
    done = set(waiting)
    while waiting:
        name, wanted = waiting.pop()
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            raise SystemExit(f"{name} is not installed: install fpld with the extras {', '.join(extras)}") from None
        needs.setdefault(name, set())
        for text in found[name].requires or []:
            need = Requirement(text)
            if need.marker is not None and not any(need.marker.evaluate({"extra": each}) for each in (*wanted, "")):
                continue
            other = canonicalize_name(need.name), frozenset(need.extras)
            if other[0] != name:
                needs[name].add(other[0])
            if other not in done:
                done.add(other)
                waiting.append(other)
    components = {name: _component(name, each) for name, each in found.items()}
    own = components.pop("fpld")
    document: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own | {"type": "application"}},
        "components": [components[name] for name in sorted(components)],
        "dependencies": [
            {"ref": _reference(found[name]), "dependsOn": sorted(_reference(found[each]) for each in needs[name])}
            for name in sorted(needs)
        ],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document, sort_keys=True))
    return document | {"serialNumber": f"urn:uuid:{serial}"}


def _component(name: str, found: Distribution) -> dict[str, Any]:
    """Return a package as CycloneDX has it; a licence is an SPDX expression where the package says one."""
    reference = _reference(found)
    own = {"type": "library", "bom-ref": reference, "name": name, "version": found.version, "purl": reference}
    if "License-Expression" in found.metadata:
        return own | {"licenses": [{"expression": found.metadata["License-Expression"]}]}
    classifiers = found.metadata.get_all("Classifier") or []
    names = [each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License :: ")]
    return own | ({"licenses": [{"license": {"name": each}} for each in names]} if names else {})


def _reference(found: Distribution) -> str:
    return f"pkg:pypi/{canonicalize_name(found.metadata['Name'])}@{found.version}"


def main() -> None:
    """Write hashes or a bill of materials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("hashes", "sbom"))
    parser.add_argument("--out", type=Path, help="file of the bill of materials (default: standard output)")
    given = parser.parse_args()
    if given.what == "hashes":
        write_hashes()
        return
    text = json.dumps(bill_of_materials(), indent=1) + "\n"
    if given.out is None:
        sys.stdout.write(text)
    else:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text)


if __name__ == "__main__":
    main()
