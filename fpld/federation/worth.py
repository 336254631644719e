"""What a student is worth on the nodes' held-out texts: one mean, over the same sites in every round."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.federation.engine import Heldout
    from fpld.federation.state import Line


MEANS = "heldout_loss", "heldout_bits_per_byte", "heldout_sites"
"""What `with_means` says in a line of the trace."""


def measured(heldout: Heldout) -> Line:
    """Return what a line of the trace says of an evaluation, before any mean is taken."""
    return {"heldout_by_node": list(heldout.losses), "heldout_bytes_per_token": heldout.bytes_per_token}


def common_sites(trace: Sequence[Line]) -> list[int]:
    """Return the sites that evaluated every round that anybody evaluated.

    >>> common_sites([{"heldout_by_node": [3.0, 1.0]}, {"heldout_by_node": [2.0, None]}])
    [0]
    """
    known = [line["heldout_by_node"] for line in trace if any(loss is not None for loss in line["heldout_by_node"])]
    return [site for site in range(len(known[0])) if all(line[site] is not None for line in known)] if known else []


def with_means(trace: Sequence[Line], names: Sequence[str]) -> list[Line]:
    """Return the lines of a trace with the mean loss over the sites that all rounds have, and these sites' names.

    A site that misses a round leaves the mean of all: rounds would else differ by who answered. Where no site is left,
    or nobody evaluated a round, the mean is None.
    """
    sites = common_sites(trace)
    named = [names[site] for site in sites]
    return [
        {**line, **_mean([line["heldout_by_node"][i] for i in sites], line), "heldout_sites": named} for line in trace
    ]


def _mean(losses: Sequence[float | None], line: Line) -> Line:
    known = [loss for loss in losses if loss is not None]
    loss = float(np.mean(known)) if known else None
    size = line.get("heldout_bytes_per_token")
    bits = None if loss is None or size is None else loss / float(np.log(2)) / size
    return {"heldout_loss": loss, "heldout_bits_per_byte": bits}
