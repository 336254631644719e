"""How the uniform codec's kernels are called: encode a block of contexts, decode nodes and add them up.

Importing this imports numba. Layouts go to the kernels as arrays of integers, the dither as keys and phases.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import validation
from fpld.codecs.dither import Dither
from fpld.codecs.uniform import kernels as _kernels
from fpld.codecs.uniform.kernels import BATCH, LANES, Layouts, Nodes, Sums
from fpld.codecs.uniform.layout import check_payload_size, payload_layout, read_ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from fpld.codecs.uniform.layout import Layout
    from fpld.types import Bytes, Floats, Floats32, Ints, Plan

kernels: Any = _kernels  # numba checks their types


@lru_cache(maxsize=256)
def _as_arrays(layout: Layout) -> Layouts:
    """Return one layout as the kernels take it; groups without digits are left out."""
    groups: list[tuple[int, ...]] = []
    digits: list[int] = []
    for g in layout.groups:
        if g.radices:
            groups.append((g.start, g.lanes, g.width, len(digits), len(g.radices), g.offset))
            digits += g.radices
    planes = [(p.width, p.place, p.offset, p.length) for p in layout.planes]
    return Layouts(
        np.array(groups, np.int64),
        np.array(digits, np.int64),
        np.array(planes, np.int64).reshape(len(planes), 4),
        np.array([[0, len(groups), 0, len(planes)]]),
        np.array([layout.low]),
    )


def _joined(layouts: Sequence[Layouts]) -> Layouts:
    """Concatenate layouts: first digits and bounds count on from layout to layout."""
    sizes = [(len(each.groups), len(each.radices), len(each.planes)) for each in layouts]
    starts = np.cumsum([(0, 0, 0), *sizes], axis=0)
    groups = [
        each.groups + np.array([0, 0, 0, start, 0, 0]) for each, start in zip(layouts, starts[:-1, 1], strict=True)
    ]
    return Layouts(
        np.concatenate(groups),
        np.concatenate([each.radices for each in layouts]),
        np.concatenate([each.planes for each in layouts]),
        np.stack([starts[:-1, 0], starts[1:, 0], starts[:-1, 2], starts[1:, 2]], axis=1),
        np.concatenate([each.lows for each in layouts]),
    )


def _phases(dither: Dither) -> npt.NDArray[np.uint16]:
    """Return a slot's phases, repeated so that a run of lanes can begin at any of them."""
    return np.resize(dither.phases() if dither.slots > 1 else np.zeros(1, np.uint16), 256 + LANES)


def encode_block(
    logits: Floats32,
    layout: Layout,
    clip: float | None,
    limit: float,
    keys: npt.NDArray[np.uint32],
    dither: Dither,
    out: Bytes,
) -> Floats | None:
    """Encode contexts of one layout into `out` [n, bytes]; return their ranges, or None if one cannot be coded.

    The ranges are pairs of centre and half-range. `keys` are those of the dither for these contexts. Without a clip
    logits must lie within `limit`.
    """
    ranges = np.zeros((len(logits), 2))
    bad = kernels.encode_rows(logits, clip or 0.0, limit, _as_arrays(layout), keys, ~_phases(dither), ranges, out)
    return ranges if bad < 0 else None


def add_nodes(
    payloads: Sequence[bytes | memoryview],
    plans: Sequence[Plan],
    rows: range,
    total: Floats32,
    sampled: Ints | None = None,
    noise: Floats | None = None,
    weights: Floats | None = None,
) -> Floats:
    """Add every node's values of the contexts in `rows` to `total` [n, V], in order; return their summed variances.

    `noise` [k, V] takes the sum of the variances of the `sampled` contexts, which count from the first of the rows.
    With `weights` [n, V], a value counts by the inverse of its variance, and `weights` takes the sum of those. The
    kernel takes a few nodes at a time, so that what they add to stays in the cache.
    """
    for payload, plan in zip(payloads, plans, strict=True):
        validation.block_range(rows, plan.contexts)
        check_payload_size(payload, plan)
    edges = [np.zeros((0 if out is None else len(out), total.shape[1] + 1)) for out in (noise, weights)]
    place_of = np.full(len(rows), -1)
    if sampled is not None:
        place_of[sampled] = np.arange(len(sampled))
    node_variance = np.zeros(len(plans))
    for first in range(0, len(plans), BATCH):
        batch = slice(first, first + BATCH)
        nodes, layouts = _batch(payloads[batch], plans[batch], rows)
        sums = Sums(total, node_variance[batch], place_of, *edges)
        kernels.add_rows(nodes, layouts, rows.start, sums, weights is not None)
    for out, edge in zip((noise, weights), edges, strict=True):
        if out is not None:
            out += np.cumsum(edge, axis=1, out=edge)[:, :-1]
    return node_variance


def _batch(payloads: Sequence[bytes | memoryview], plans: Sequence[Plan], rows: range) -> tuple[Nodes, Layouts]:
    """Return a batch of nodes and their layouts as the kernel takes them."""
    shares = [payload_layout(plan, len(data)) for plan, data in zip(plans, payloads, strict=True)]
    layouts = list(dict.fromkeys(layout for share in shares for layout in share.layouts))
    dithers = [Dither.of(plan) for plan in plans]
    streams = list(dict.fromkeys((dither.key, dither.stream) for dither in dithers))
    ranges = [read_ranges(data, plan, rows) for data, plan in zip(payloads, plans, strict=True)]
    arrays = [_readonly(data) for data in payloads]
    nodes = Nodes(
        tuple(arrays + [arrays[0]] * (BATCH - len(arrays))),
        np.array([share.range_bytes for share in shares]),
        np.array([[layout.size for layout in share.layouts] for share in shares]),
        np.array([share.longer for share in shares]),
        np.array([[layouts.index(layout) for layout in share.layouts] for share in shares]),
        np.stack([centres for centres, _ in ranges]),
        np.stack([halves for _, halves in ranges]),
        np.array([streams.index((dither.key, dither.stream)) for dither in dithers]),
        np.stack([Dither(*stream).keys(rows) for stream in streams]),
        np.stack([_phases(dither) for dither in dithers]),
    )
    return nodes, _joined([_as_arrays(layout) for layout in layouts])


def _readonly(data: bytes | memoryview) -> Bytes:
    array = np.frombuffer(data, np.uint8)
    array.flags.writeable = False
    return array
