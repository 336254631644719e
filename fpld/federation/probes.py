"""The probe set of a round: the same in every round, or other contexts of the public text each time.

Both ends draw it by themselves, from the run's seed, the round and the public text: no context is sent again. What they
drew is compared by its digest, which every task names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fpld.data import ProbeSet
from fpld.seeds import derive_seed
from fpld.storage.arrays import read_arrays

if TYPE_CHECKING:
    from pathlib import Path

PROBE, PUBLIC = "probe.json", "public.safetensors"


def round_probe(first: Path, public: Path | None, seed: int, round: int) -> ProbeSet:
    """Return the probe set of a round: that in the file `first`, or as many other contexts of a `public` text."""
    probe = ProbeSet.load(first)
    if public is None:
        return probe
    return probe.redraw(read_arrays(public)[0]["tokens"], seed=derive_seed(seed, "probe", round))
