"""Seeds: one number for a run, and one derived from it for every single use."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *labels: str | int) -> int:
    """Derive the seed of one use from a run's seed and what it is for; other labels, other seeds.

    >>> derive_seed(0, "local", 1, "clinic") == derive_seed(0, "local", 1, "clinic") != derive_seed(0, "local", 2)
    True
    """
    text = "\x1f".join([str(seed), *(f"{type(label).__name__}:{label}" for label in labels)])
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"fpld seed").digest()
    return int.from_bytes(digest, "little") >> 1


def derive_key(seed: int) -> bytes:
    """Derive the key of a run on one machine; a deployment draws one at random."""
    return hashlib.blake2b(str(seed).encode(), digest_size=32, person=b"fpld run key").digest()
