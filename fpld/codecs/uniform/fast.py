"""What the uniform codec's kernels take, and how they are called: encode a block, decode nodes and add them up.

Layouts go to them as arrays of integers, the dither as keys and phases.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld import _check
from fpld.codecs.dither import Dither
from fpld.codecs.uniform import kernels as _kernels
from fpld.codecs.uniform.shares import check_size, read_ranges, shares_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from fpld.codecs.uniform import radix
    from fpld.types import Floats, Ints, Plan

    Bytes = npt.NDArray[np.uint8]
    Floats32 = npt.NDArray[np.float32]

kernels: Any = _kernels  # numba checks their types


class _Digits(NamedTuple):
    groups: Ints
    radices: Ints
    planes: Ints


@lru_cache(maxsize=256)
def _digits(layout: radix.Layout) -> _Digits:
    """Return a layout's groups (start, lanes, width, first digit, digits, byte), all radices, and planes."""
    groups: list[tuple[int, ...]] = []
    digits: list[int] = []
    for g in layout.groups:
        if g.radices:
            groups.append((g.start, g.lanes, g.width, len(digits), len(g.radices), g.at))
            digits += g.radices
    planes = [(p.width, p.place, p.at, p.length) for p in layout.planes]
    return _Digits(
        np.array(groups, np.int64), np.array(digits, np.int64), np.array(planes, np.int64).reshape(len(planes), 4)
    )


def _phases(dither: Dither) -> npt.NDArray[np.uint16]:
    """Return a slot's phases, repeated so that a run of lanes can begin at any of them."""
    return np.resize(dither.phases() if dither.slots > 1 else np.zeros(1, np.uint16), 256 + kernels.LANES)


def _scratch(vocab: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16]]:
    """Return room for a context's dither words, and the same memory as 16-bit numbers."""
    words = np.empty(-(-vocab // 2), np.uint32)
    return words, words.view(np.uint16)


def encode(
    part: Floats32,
    layout: radix.Layout,
    clip: float | None,
    limit: float,
    keys: npt.NDArray[np.uint32],
    dither: Dither,
    out: Bytes,
) -> Floats | None:
    """Encode some contexts into `out`; return their centres and half-ranges, or None if one cannot be coded."""
    ranges, floats = np.zeros((len(part), 2)), np.zeros(2, np.float32)
    scratch = ~_phases(dither), *_scratch(part.shape[1]), floats, floats.view(np.uint32)
    limits = clip or 0.0, limit
    bad = kernels.encode(part, part.view(np.uint32), *limits, layout.low, *_digits(layout), keys, *scratch, ranges, out)
    return ranges if bad < 0 else None


def add(
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
        _check.rows(rows, plan.contexts)
        check_size(payload, plan)
    vocab = total.shape[1]
    edges = [np.zeros((0 if asked is None else len(asked), vocab + 1)) for asked in (noise, weights)]
    place_of = np.full(len(rows), -1)
    if sampled is not None:
        place_of[sampled] = np.arange(len(sampled))
    noise_of = np.zeros(len(plans))
    scratch = _scratch(vocab)
    for first in range(0, len(plans), kernels.BATCH):
        batch = slice(first, first + kernels.BATCH)
        arguments = _arguments(payloads[batch], plans[batch], rows)
        kernels.add(*arguments, rows.start, total, weights is not None, place_of, *edges, noise_of[batch], *scratch)
    for asked, edge in zip((noise, weights), edges, strict=True):
        if asked is not None:
            asked += np.cumsum(edge, axis=1, out=edge)[:, :-1]
    return noise_of


def _arguments(payloads: Sequence[bytes | memoryview], plans: Sequence[Plan], rows: range) -> tuple[Any, ...]:
    """Return what the kernel needs of a batch of nodes."""
    shares = [shares_of(plan, len(data)) for plan, data in zip(plans, payloads, strict=True)]
    layouts = list(dict.fromkeys(layout for share in shares for layout in share.layouts))
    digits = [_digits(layout) for layout in layouts]
    starts = np.cumsum([[0, 0, 0], *((len(d.groups), len(d.radices), len(d.planes)) for d in digits)], axis=0)
    groups = [d.groups + np.array([0, 0, 0, start, 0, 0]) for d, start in zip(digits, starts[:-1, 1], strict=True)]
    bounds = np.stack([starts[:-1, 0], starts[1:, 0], starts[:-1, 2], starts[1:, 2]], axis=1)
    dithers = [Dither.of(plan) for plan in plans]
    streams = list(dict.fromkeys((dither.key, dither.stream) for dither in dithers))
    ranges = [read_ranges(data, plan, rows) for data, plan in zip(payloads, plans, strict=True)]
    arrays = [_readonly(data) for data in payloads]
    return (
        tuple(arrays + [arrays[0]] * (kernels.BATCH - len(arrays))),
        np.array([share.side for share in shares]),
        np.array([[layout.size for layout in share.layouts] for share in shares]),
        np.array([share.longer for share in shares]),
        np.array([[layouts.index(layout) for layout in share.layouts] for share in shares]),
        bounds,
        np.concatenate(groups),
        np.concatenate([d.radices for d in digits]),
        np.concatenate([d.planes for d in digits]),
        np.array([layout.low for layout in layouts]),
        np.stack([centres for centres, _ in ranges]),
        np.stack([halves for _, halves in ranges]),
        np.array([streams.index((dither.key, dither.stream)) for dither in dithers]),
        np.stack([Dither(*stream).keys(rows) for stream in streams]),
        np.stack([_phases(dither) for dither in dithers]),
    )


def _readonly(data: bytes | memoryview) -> Bytes:
    array = np.frombuffer(data, np.uint8)
    array.flags.writeable = False
    return array
