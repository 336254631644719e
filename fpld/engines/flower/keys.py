"""The nodes' public keys in the aggregator's folder, and who was revoked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fpld.errors import InputError

if TYPE_CHECKING:
    from fpld.config import Config


def is_revoked(config: Config, name: str) -> bool:
    """Return whether the aggregator has put a file NAME.revoked beside a node's public keys."""
    return config.flower is not None and (Path(config.flower.keys) / f"{name}.revoked").exists()


def public_file(config: Config, name: str) -> Path:
    """Find the public keys of a node, which its site sent to the aggregator."""
    if config.flower is None:
        raise InputError("[flower] must be given: where to listen, and the folders of certificates and keys")
    path = Path(config.flower.keys) / f"{name}.pub"
    if not path.exists():
        raise InputError(f"{path} does not exist: put the file there that `fpld init-node` made at {name!r}")
    return path
