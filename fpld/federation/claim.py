"""The beginning of a run: its folder is taken for one configuration, and says what runs it."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import fpld
from fpld.errors import InputError
from fpld.storage.files import read_utf8, remove_half_written

if TYPE_CHECKING:
    from fpld.storage.folder import RunFolder


def claim(store: RunFolder, text: str, resume: bool) -> None:
    """Take the folder for this configuration; a folder of another run is not overwritten."""
    if store.has("config.toml"):
        if not resume:
            raise InputError(f"{store.path} holds a run already: choose another --out, or continue it with --resume")
        if read_utf8(store.path / "config.toml") != text:
            raise InputError(
                f"{store.path} holds a run of another configuration: --resume with the one in its config.toml"
            )
        remove_half_written(store.path)
        return
    if resume:
        raise InputError(f"{store.path} holds no run to resume: leave --resume out to start one")
    store.write_json("versions.json", versions())
    store.write("config.toml", text.encode())


def versions() -> dict[str, str]:
    """Return the versions of Python, of this package and of its main dependencies."""
    found = {"python": platform.python_version(), "machine": platform.platform(), "fpld": fpld.__version__}
    for name in ("numpy", "torch", "tokenizers", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
