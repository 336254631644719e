"""Model updates in one bit per weight: a keyed rotation, the signs, and a scale that makes the result unbiased.

After S. Vargaftik, R. Ben Basat, A. Portnoy, G. Mendelson, Y. Ben-Itzhak and M. Mitzenmacher, *DRIVE: one-bit
distributed mean estimation*, NeurIPS 2021, and *EDEN*, ICML 2022. All weights x are one vector, cut into chunks. A
chunk of d weights is rotated by R = H D' H D / d, with Hadamard's matrix H and random signs D, D' that both ends draw
from a seed. sign(Rx) and the scale |x|^2 / |Rx|_1 are sent, and scale R^-1 sign(Rx) is x on average. The square of its
error is (pi/2 - 1) |x|^2 on average where d is large. H D alone has a bias where few weights make up most of a chunk.

The bytes, little-endian: magic, the number of weights, a float32 scale for each chunk, the signs. Names and shapes are
not sent: both ends have the model. The sizes of chunks are powers of two that follow the number's binary digits, so at
most 255 signs of padding are sent.
"""

from __future__ import annotations

import hashlib
import math
import struct
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import validation
from fpld.errors import FrameError, InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[np.float32]]

MAX_CHUNK = 1 << 16  # weights in a chunk: larger ones gain nothing
MIN_CHUNK = 1 << 8  # weights in a chunk: smaller ones have a bias
SCALE = np.dtype("<f4")
HEADER = struct.Struct("<4sQ")
MAGIC = b"1bit"
_GROUP_CHUNKS = 64  # chunks that are rotated at a time


def encode_update(update: Mapping[str, NDArray[np.floating[Any]]], *, seed: int) -> bytes:
    """Encode an update, weights by name; the seed must be another one for each node and round.

    >>> len(encode_update({"weight": np.ones((1000, 1000))}, seed=7))  # 125,000 and some scales
    125108
    """
    vector = _flatten(update)
    sizes = chunk_sizes(vector.size)
    padded = np.zeros(sum(sizes), np.float32)
    padded[: vector.size] = vector
    scales = []
    signs = []
    for part, shape, flips in _groups(sizes, seed):
        x = padded[part].reshape(shape)
        rotated = _rotate(x, flips)
        length = np.abs(rotated).sum(axis=1, dtype=np.float64)
        square = np.square(x, dtype=np.float64).sum(axis=1)
        scales.append(np.divide(square, length, out=np.zeros_like(length), where=length > 0).astype(SCALE))
        signs.append(np.packbits(rotated > 0))
    return b"".join([HEADER.pack(MAGIC, vector.size), *(part.tobytes() for part in (*scales, *signs))])


def decode_update(data: bytes, like: Mapping[str, NDArray[Any]], *, seed: int) -> Arrays:
    """Decode an update with the names and shapes of `like`.

    Raises
    ------
    FrameError
        If the bytes are not an update of these weights.
    """
    count = sum(array.size for array in like.values())
    sizes = chunk_sizes(count)
    expected = update_bytes(count)
    if len(data) != expected:
        raise FrameError(f"an update of {count} weights must be {expected} bytes long, got {len(data)}")
    magic, size = HEADER.unpack_from(data)
    if (magic, size) != (MAGIC, count):
        raise FrameError(f"the update must begin with {MAGIC!r} and {count} weights, got {magic!r} and {size}")
    scales = np.frombuffer(data, SCALE, len(sizes), HEADER.size).astype(np.float32)
    # With scales below this limit the sums of the inverse rotation cannot overflow.
    if not (np.isfinite(scales).all() and (scales >= 0).all() and scales.max() <= np.finfo(np.float32).max / MAX_CHUNK):
        raise FrameError(f"the scales of an update must be finite and at least 0, got {scales.min()} to {scales.max()}")
    signs = np.frombuffer(data, np.uint8, offset=expected - sum(sizes) // 8)
    vector = np.empty(sum(sizes), np.float32)
    row = 0
    for part, shape, flips in _groups(sizes, seed):
        bits = np.unpackbits(signs[part.start // 8 : part.stop // 8]).reshape(shape)
        rotated = _rotate_back(np.array([-1, 1], np.float32)[bits], flips)
        vector[part] = (scales[row : row + shape[0], None] * rotated).ravel()
        row += shape[0]
    return _unflatten(vector[:count], like)


def update_bytes(count: int) -> int:
    """Return the bytes of an update of `count` weights.

    >>> update_bytes(1_000_000)
    125108
    """
    sizes = chunk_sizes(count)
    return HEADER.size + SCALE.itemsize * len(sizes) + sum(sizes) // 8


def chunk_sizes(count: int) -> list[int]:
    """Return the sizes of the chunks of `count` weights: powers of two, of which the last may be padded.

    A chunk is padded where that costs fewer bytes than the scale of one more chunk.

    >>> chunk_sizes(65536 + 1024 + 250)
    [65536, 1024, 256]
    """
    sizes = [MAX_CHUNK] * (count // MAX_CHUNK)
    left = count % MAX_CHUNK
    while left > 0:
        size = max(MIN_CHUNK, 1 << (left - 1).bit_length())
        if size > MIN_CHUNK and size - left > 8 * SCALE.itemsize:
            size //= 2
        sizes.append(size)
        left -= size
    return sizes


def _flatten(update: Mapping[str, NDArray[np.floating[Any]]]) -> NDArray[np.float32]:
    """Return all weights as one vector, by the order of their names."""
    for name, array in update.items():
        if not np.issubdtype(array.dtype, np.floating):
            raise InputError(f"update[{name!r}] must be floating-point, got {array.dtype}")
        # The scale of the largest chunk must fit into float32.
        if not (np.abs(array) < np.finfo(np.float32).max / MAX_CHUNK).all():
            raise InputError(f"update[{name!r}] must hold finite numbers: did training diverge?")
    parts = [np.asarray(update[name], np.float32).ravel() for name in sorted(update)]
    vector = np.concatenate([np.empty(0, np.float32), *parts])
    if vector.size == 0:
        raise InputError("update must hold at least one weight, got none")
    return vector


def _unflatten(vector: NDArray[np.float32], like: Mapping[str, NDArray[Any]]) -> Arrays:
    ends = np.cumsum([like[name].size for name in sorted(like)])
    parts = dict(zip(sorted(like), np.split(vector, ends[:-1]), strict=True))
    return {name: parts[name].reshape(array.shape) for name, array in like.items()}


def _groups(sizes: list[int], seed: int) -> Iterator[tuple[slice, tuple[int, int], NDArray[np.float32]]]:
    """Yield groups of chunks of one size: their place in the vector, their shape [n, d], random signs [2, n, d]."""
    validation.integer("seed", seed)
    total = sum(sizes)
    first = 0
    start = 0
    drawn = np.frombuffer(hashlib.shake_256(b"fpld one bit %d" % seed).digest(total // 4), np.uint8).reshape(2, -1)
    while first < len(sizes):
        size = sizes[first]
        count = 1
        while count < _GROUP_CHUNKS and sizes[first + count : first + count + 1] == [size]:
            count += 1
        stop = start + count * size
        flips = np.array([-1, 1], np.float32)[np.unpackbits(drawn[:, start // 8 : stop // 8], axis=1)]
        yield slice(start, stop), (count, size), flips.reshape(2, count, size)
        first = first + count
        start = stop


def _rotate(x: NDArray[np.float32], flips: NDArray[np.float32]) -> NDArray[np.float32]:
    return _hadamard(_hadamard(x * flips[0]) * flips[1])


def _rotate_back(x: NDArray[np.float32], flips: NDArray[np.float32]) -> NDArray[np.float32]:
    back: NDArray[np.float32] = _hadamard(_hadamard(x) * flips[1]) * flips[0]
    return back


def _hadamard(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Multiply rows [n, d] by Hadamard's matrix over sqrt(d), which is its own inverse."""
    count, size = x.shape
    left = size.bit_length() - 1
    while left:
        step = min(left, 6)
        # Each product transforms the last axis, of 2^step values, and moves it to the front. After all products the
        # axes are in their first order again.
        x = np.swapaxes(x.reshape(count, -1, 1 << step) @ _matrix(step), 1, 2).reshape(count, size)
        left -= step
    return x


@cache
def _matrix(log_size: int) -> NDArray[np.float32]:
    matrix = np.ones((1, 1), np.float32)
    for _ in range(log_size):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(math.sqrt(len(matrix)))
