"""Model updates in a few bits per weight: a keyed rotation, Lloyd-Max levels, and a scale that makes them unbiased.

After S. Vargaftik, R. Ben Basat, A. Portnoy, G. Mendelson, Y. Ben-Itzhak and M. Mitzenmacher, *DRIVE: one-bit
distributed mean estimation*, NeurIPS 2021, and *EDEN: communication-efficient and robust distributed mean estimation*,
ICML 2022.

Weights x are cut into chunks. A chunk of d weights is rotated by R = H D' H D / d, with Hadamard's matrix H and random
signs D, D' that both ends draw from a seed. Rotated weights are close to normal with variance |x|^2 / d, so the best
2^b levels are the same for all models: Lloyd's and Max's for a normal variable. What is sent are the numbers of the
nearest levels Q(Rx) and the scale |x|^2 / <Rx, Q(Rx)>. Then scale R^-1 Q(Rx) is x on average, and the square of its
error is D / (1 - D) |x|^2 where d is large; D is the distortion of the levels. H D alone has a bias where few weights
make up most of a chunk.

Each tensor has its own number of bits b, from 1 to 8. Those of one number are one vector, cut into chunks together.
Bits are given where they lower sum_t w_t |x_t|^2 D / (1 - D) most for each bit that they cost, as Theorem 5 gives them
to nodes. The weight w_t of a tensor says how much its squared error matters: nodes take the curvature of their model on
public text (`Student.curvature`). The default, for models that have none, is one over the tensor's mean square:
embeddings move six times as far as other weights, and by the squared error alone would take all bits.

The bytes, little-endian; names and shapes are not sent, since both ends have the model:

    offset  bytes  field
         0      3  magic "bit"
         3      1  bits of all tensors, or 0 if they differ
         4      8  number of weights
        12      T  if they differ: the bits of each tensor, by the order of names
              4 c  a float32 scale for each chunk, tensors of the fewest bits first
             rest  the levels' numbers from the lowest, b bits each, in the same order

The sizes of chunks are powers of two that follow the binary digits of the number of weights, so at most 255 weights of
padding are sent for each number of bits. `update_bytes` states the largest length, and no update is longer.
"""

from __future__ import annotations

import hashlib
import math
import struct
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fpld import validation
from fpld.errors import FrameError, InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fpld.types import Array, Arrays, Bytes, Floats, Floats32, Reals

MAX_CHUNK = 1 << 16  # weights in a chunk: larger ones gain nothing
MIN_CHUNK = 1 << 8  # weights in a chunk: smaller ones have a bias
MAX_BITS = 8
SCALE = np.dtype("<f4")
HEADER = struct.Struct("<3sBQ")
MAGIC = b"bit"
MAX_SCALE = float(np.finfo(np.float32).max) / MAX_CHUNK
"""The largest scale: below it the sums of the inverse rotation cannot overflow."""
_GROUP_CHUNKS = 64  # chunks that are rotated at a time

# The positive levels of 1, 2, ... bits, in 1/10000 of a standard deviation. The scale takes up a common factor: two
# levels are therefore -1 and 1.
_POSITIVE_LEVELS = (
    (10000,),
    (4528, 15104),
    (2451, 7560, 13439, 21519),
    (1284, 3880, 6568, 9423, 12562, 16180, 20690, 27326),
    (659, 1981, 3314, 4667, 6049, 7471, 8946, 10488, 12118, 13863, 15762, 17872, 20287, 23177, 26911, 32607),
    (
        334, 1003, 1673, 2346, 3022, 3703, 4389, 5083, 5785, 6497, 7219, 7955, 8705, 9472, 10257, 11065, 11897, 12758,
        13651, 14583, 15558, 16586, 17675, 18840, 20096, 21468, 22990, 24713, 26723, 29174, 32404, 37441,
    ),
    (
        168, 505, 842, 1179, 1516, 1855, 2193, 2533, 2874, 3216, 3559, 3903, 4249, 4597, 4947, 5298, 5652, 6008, 6367,
        6728, 7093, 7460, 7831, 8206, 8585, 8967, 9354, 9746, 10143, 10545, 10953, 11367, 11788, 12216, 12652, 13095,
        13548, 14009, 14481, 14964, 15459, 15967, 16489, 17027, 17581, 18154, 18748, 19364, 20006, 20677, 21380,
        22120, 22903, 23736, 24628, 25590, 26639, 27795, 29090, 30572, 32319, 34474, 37349, 41897,
    ),
    (
        84, 253, 422, 591, 760, 930, 1099, 1268, 1437, 1607, 1777, 1947, 2117, 2287, 2458, 2628, 2799, 2971, 3142,
        3314, 3486, 3659, 3832, 4005, 4179, 4353, 4527, 4703, 4878, 5054, 5231, 5408, 5585, 5764, 5942, 6122, 6302,
        6483, 6664, 6847, 7030, 7214, 7398, 7584, 7770, 7957, 8145, 8335, 8525, 8716, 8908, 9102, 9296, 9492, 9689,
        9887, 10086, 10287, 10489, 10693, 10898, 11105, 11313, 11523, 11735, 11948, 12163, 12380, 12599, 12821, 13044,
        13269, 13497, 13727, 13959, 14194, 14432, 14673, 14916, 15162, 15411, 15664, 15920, 16180, 16443, 16710,
        16981, 17256, 17536, 17820, 18110, 18404, 18704, 19009, 19321, 19639, 19963, 20295, 20635, 20982, 21339,
        21704, 22080, 22466, 22864, 23274, 23697, 24135, 24590, 25061, 25553, 26065, 26602, 27165, 27759, 28387,
        29055, 29769, 30537, 31371, 32285, 33298, 34441, 35756, 37317, 39256, 41866, 46035,
    ),
)  # fmt: skip
LEVELS = tuple(
    np.array([*(-level for level in reversed(row)), *row], np.float32) / np.float32(10000) for row in _POSITIVE_LEVELS
)
"""The levels of 1, 2, ... bits, rising."""

UPDATE_ERRORS = (0.570796, 0.133121, 0.035784, 0.00959214, 0.00251096, 0.000644655, 0.000163505, 4.11872e-05)
"""The square of the error beside that of an update, D / (1 - D), with 1, 2, ... bits."""


class _Chunks(NamedTuple):
    """Hold the chunks of all tensors with the same number of bits."""

    bits: int
    sizes: list[int]


def encode_update(
    update: Mapping[str, Reals], *, bits: float, seed: int, weights: Mapping[str, float] | None = None
) -> bytes:
    """Encode an update in at most `update_bytes` bytes.

    Parameters
    ----------
    update
        Tensors of any shapes by name.
    bits
        Bits per weight, from 1 to 8; any fraction, since tensors may differ in their bits.
    seed
        Of the rotation: another one for each node and round.
    weights
        How much the squared error of each tensor matters; by default one over the tensor's mean square.

    >>> len(encode_update({"weight": np.ones((1000, 1000))}, bits=1, seed=7))  # 125,000 and some scales
    125108
    """
    _check_update(update)
    names = sorted(update)
    sizes = [update[name].size for name in names]
    widths = [1] * len(names)
    if update_bytes(sum(sizes), bits) > update_bytes(sum(sizes), 1):
        widths = share_bits(sizes, _values(update, weights), bits)
    parts = []
    scales = []
    codes = []
    groups = _chunks(sizes, widths)
    for group in groups:
        chosen = [name for name, width in zip(names, widths, strict=True) if width == group.bits]
        vector = np.zeros(sum(group.sizes), np.float32)
        flat = np.concatenate([np.asarray(update[name], np.float32).ravel() for name in chosen])
        vector[: flat.size] = flat
        parts.append(vector)
    for piece in _pieces(groups, seed):
        x = parts[piece.group][piece.place].reshape(piece.shape)
        scale, code = _quantize(x, _rotate(x, piece.flips), groups[piece.group].bits)
        scales.append(scale)
        codes.append(code)
    return b"".join([_header(sum(sizes), widths), *(scale.tobytes() for scale in scales), *codes])


def decode_update(data: bytes | memoryview, like: Mapping[str, Array], *, seed: int) -> Arrays:
    """Decode an update with the names and shapes of `like`, as float32.

    Raises
    ------
    FrameError
        If the bytes are not an update of these weights.
    """
    names = sorted(like)
    sizes = [like[name].size for name in names]
    widths = _read_widths(data, sizes)
    groups = _chunks(sizes, widths)
    scales = _read_scales(data, widths, groups)
    codes = np.frombuffer(data, np.uint8, offset=len(data) - _code_bytes(groups))
    parts = [np.empty(sum(group.sizes), np.float32) for group in groups]
    row = 0
    start = 0
    for piece in _pieces(groups, seed):
        count, size = piece.shape
        width = groups[piece.group].bits
        end = start + count * size * width // 8
        levels = LEVELS[width - 1][_unpack(codes[start:end], width)].reshape(piece.shape)
        rotated = _rotate_back(levels, piece.flips)
        parts[piece.group][piece.place] = (scales[row : row + count, None] * rotated).ravel()
        row += count
        start = end
    by_name: Arrays = {}
    for group, part in zip(groups, parts, strict=True):
        first = 0
        for name, size, width in zip(names, sizes, widths, strict=True):
            if width == group.bits:
                by_name[name] = part[first : first + size].reshape(like[name].shape)
                first += size
    return {name: by_name[name] for name in like}


def check_update(data: bytes | memoryview, like: Mapping[str, Array]) -> None:
    """Raise `FrameError` for bytes that `decode_update` would refuse, without decoding them."""
    sizes = [like[name].size for name in sorted(like)]
    widths = _read_widths(data, sizes)
    _read_scales(data, widths, _chunks(sizes, widths))


def update_bytes(count: int, bits: float) -> int:
    """Return the most bytes that an update of `count` weights takes; with whole bits and default weights, the bytes.

    It is `bits` for each weight, padding of at most 255 weights, the scales of the chunks and the header.

    >>> update_bytes(1_000_000, 1), update_bytes(1_000_000, 2.5)
    (125108, 312644)
    """
    validation.integer("count", count, least=1)
    if not 1 <= bits <= MAX_BITS:
        raise InputError(f"bits per weight must be from 1 to {MAX_BITS}, got {bits}")
    sizes = chunk_sizes(count)
    return HEADER.size + SCALE.itemsize * len(sizes) + math.floor(Fraction(bits) * sum(sizes) / 8)


def affordable_bits(count: int, capacity: int, most: float = MAX_BITS) -> float:
    """Return the most bits per weight, up to `most`, with which an update takes at most `capacity` bytes; 0 if none do.

    >>> affordable_bits(1_000_000, 125_108), affordable_bits(1_000_000, 125_107), affordable_bits(1_000_000, 10**9, 3.5)
    (1.0, 0.0, 3.5)
    """
    if capacity >= update_bytes(count, most):
        return most
    fixed = update_bytes(count, 1) - sum(chunk_sizes(count)) // 8
    bits = 8 * (capacity - fixed) / sum(chunk_sizes(count))
    if bits < 1:
        return 0.0
    return bits if update_bytes(count, bits) <= capacity else math.nextafter(bits, 1.0)


def chunk_sizes(count: int) -> list[int]:
    """Return the sizes of the chunks of `count` weights: powers of two, of which the last may be padded.

    A chunk is padded where that costs fewer bytes, at one bit, than the scale of one more chunk.

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


def share_bits(sizes: Sequence[int], values: Sequence[float], bits: float) -> list[int]:
    """Return the bits of each tensor, such that all are at most `update_bytes` bytes long.

    `values` are the weighted squares w_t |x_t|^2. A tensor gets its next bit in the order of what it gains for each bit
    of the message; one that has no room for it stays as it is. Since all of `bits` rounded down always fits, it is the
    result where it has the smaller error.

    >>> share_bits([1000, 1000], [1000.0, 1000.0], 2.0), share_bits([10000, 10000], [10000.0, 640000.0], 2.1)
    ([2, 2], [1, 3])
    """
    errors = np.array(UPDATE_ERRORS)
    least = min(int(bits), MAX_BITS)
    capacity = update_bytes(sum(sizes), bits)
    choices = [_raise_bits(sizes, values, start, capacity) for start in {1, least}]
    return min(choices, key=lambda widths: (float(np.dot(values, errors[np.array(widths) - 1])), widths))


def _raise_bits(sizes: Sequence[int], values: Sequence[float], start: int, capacity: int) -> list[int]:
    """Give bits one after the other, from `start` bits for each tensor on."""
    widths = [start] * len(sizes)
    moves = [
        (-value / size * (UPDATE_ERRORS[width - 1] - UPDATE_ERRORS[width]), -size, tensor, width)
        for tensor, (size, value) in enumerate(zip(sizes, values, strict=True))
        if size and value > 0
        for width in range(start, MAX_BITS)
    ]
    for _, _, tensor, width in sorted(moves):
        if widths[tensor] != width:  # the bit before this one had no room
            continue
        widths[tensor] = width + 1
        if _length(sizes, widths) > capacity:
            widths[tensor] = width
    return widths


def _values(update: Mapping[str, Reals], weights: Mapping[str, float] | None) -> list[float]:
    """Return the weighted square of each tensor, by the order of names."""
    squares = {name: float(np.square(update[name], dtype=np.float64).sum()) for name in sorted(update)}
    if weights is None:
        return [update[name].size if square > 0 else 0.0 for name, square in squares.items()]
    for name in squares:
        if not (name in weights and 0 <= weights[name] < math.inf):
            raise InputError(f"weights[{name!r}] must be a finite number of at least 0, got {weights.get(name)}")
    return [weights[name] * square for name, square in squares.items()]


def _check_update(update: Mapping[str, Reals]) -> None:
    for name, array in update.items():
        if not np.issubdtype(array.dtype, np.floating):
            raise InputError(f"update[{name!r}] must be floating-point, got {array.dtype}")
        # The scale of the largest chunk must fit into float32.
        if not (np.abs(array) < MAX_SCALE).all():
            raise InputError(f"update[{name!r}] must hold finite numbers: did training diverge?")
    if sum(array.size for array in update.values()) == 0:
        raise InputError("update must hold at least one weight, got none")


def _chunks(sizes: Sequence[int], widths: Sequence[int]) -> list[_Chunks]:
    """Return the chunks of all tensors, by rising bits."""
    counts = [0] * (MAX_BITS + 1)
    for size, width in zip(sizes, widths, strict=True):
        counts[width] += size
    return [_Chunks(width, chunk_sizes(count)) for width, count in enumerate(counts) if width in widths]


def _code_bytes(groups: Sequence[_Chunks]) -> int:
    return sum(group.bits * sum(group.sizes) for group in groups) // 8


def _header_bytes(widths: Sequence[int]) -> int:
    return HEADER.size + (len(widths) if len(set(widths)) > 1 else 0)


def _length(sizes: Sequence[int], widths: Sequence[int]) -> int:
    """Return the bytes of an update whose tensors have these bits."""
    groups = _chunks(sizes, widths)
    return _header_bytes(widths) + SCALE.itemsize * sum(len(group.sizes) for group in groups) + _code_bytes(groups)


def _header(count: int, widths: Sequence[int]) -> bytes:
    if len(set(widths)) > 1:
        return HEADER.pack(MAGIC, 0, count) + bytes(widths)
    return HEADER.pack(MAGIC, widths[0], count)


def _read_widths(data: bytes | memoryview, sizes: Sequence[int]) -> list[int]:
    """Return the bits of each tensor that an update states, once its length is the one that they imply."""
    if len(data) < HEADER.size:
        raise FrameError(f"an update must have at least {HEADER.size} bytes, got {len(data)}")
    magic, width, count = HEADER.unpack_from(data)
    if (magic, count) != (MAGIC, sum(sizes)):
        raise FrameError(f"the update must begin with {MAGIC!r} and {sum(sizes)} weights, got {magic!r} and {count}")
    widths = [width] * len(sizes) if width else list(data[HEADER.size : HEADER.size + len(sizes)])
    if len(widths) != len(sizes) or not all(1 <= value <= MAX_BITS for value in widths):
        raise FrameError(f"an update must state 1 to {MAX_BITS} bits for each of {len(sizes)} tensors")
    if not width and len(set(widths)) < 2:
        raise FrameError("an update whose tensors have the same bits must state them once")
    expected = _length(sizes, widths)
    if len(data) != expected:
        raise FrameError(f"an update of {count} weights must be {expected} bytes long by its header, got {len(data)}")
    return widths


def _read_scales(data: bytes | memoryview, widths: Sequence[int], groups: Sequence[_Chunks]) -> Floats32:
    """Return the scales of all chunks, checked."""
    count = sum(len(group.sizes) for group in groups)
    scales = np.frombuffer(data, SCALE, count, _header_bytes(widths)).astype(np.float32)
    if not ((scales >= 0) & (scales <= MAX_SCALE)).all():  # NaN is neither
        raise FrameError(
            f"the scales of an update must be from 0 to {MAX_SCALE:g}, got {scales.min()} to {scales.max()}"
        )
    return scales


def _quantize(x: Floats32, rotated: Floats32, width: int) -> tuple[Floats32, bytes]:
    """Return the scales [n] of chunks [n, d], and the numbers of the levels nearest to the rotated weights."""
    levels = LEVELS[width - 1]
    square: Floats = np.square(x, dtype=np.float64).sum(axis=1)
    deviation = np.sqrt(square / x.shape[1])
    unit = rotated / np.where(deviation > 0, deviation, 1).astype(np.float32)[:, None]
    numbers = np.searchsorted((levels[1:] + levels[:-1]) / 2, unit.ravel()).astype(np.uint8)
    product = (rotated * levels[numbers].reshape(x.shape)).sum(axis=1, dtype=np.float64)
    scales = np.divide(square, product, out=np.zeros_like(product), where=product > 0)
    return scales.astype(SCALE), _pack(numbers, width)


def _pack(numbers: Bytes, width: int) -> bytes:
    """Return numbers below 2^width as bits, the highest bit of each first."""
    return np.packbits(np.unpackbits(numbers[:, None], axis=1)[:, 8 - width :]).tobytes()


def _unpack(codes: Bytes, width: int) -> Bytes:
    bits = np.unpackbits(codes).reshape(-1, width)
    return np.packbits(bits, axis=1).ravel() >> np.uint8(8 - width)


class _Piece(NamedTuple):
    """Hold chunks of one size and group: their place in the group's vector, their shape [n, d], signs [2, n, d]."""

    group: int
    place: slice
    shape: tuple[int, int]
    flips: Floats32


def _pieces(groups: Sequence[_Chunks], seed: int) -> Iterator[_Piece]:
    """Yield all chunks, some at a time, with the random signs of their rotation."""
    validation.integer("seed", seed)
    total = sum(sum(group.sizes) for group in groups)
    drawn = np.frombuffer(hashlib.shake_256(b"fpld one bit %d" % seed).digest(total // 4), np.uint8).reshape(2, -1)
    used = 0
    for number, (_, sizes) in enumerate(groups):
        first = 0
        start = 0
        while first < len(sizes):
            size = sizes[first]
            count = 1
            while count < _GROUP_CHUNKS and sizes[first + count : first + count + 1] == [size]:
                count += 1
            stop = start + count * size
            signs = drawn[:, (used + start) // 8 : (used + stop) // 8]
            flips = np.array([-1, 1], np.float32)[np.unpackbits(signs, axis=1)]
            yield _Piece(number, slice(start, stop), (count, size), flips.reshape(2, count, size))
            first = first + count
            start = stop
        used += start


def _rotate(x: Floats32, flips: Floats32) -> Floats32:
    return _hadamard(_hadamard(x * flips[0]) * flips[1])


def _rotate_back(x: Floats32, flips: Floats32) -> Floats32:
    back: Floats32 = _hadamard(_hadamard(x) * flips[1]) * flips[0]
    return back


def _hadamard(x: Floats32) -> Floats32:
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
def _matrix(log_size: int) -> Floats32:
    matrix = np.ones((1, 1), np.float32)
    for _ in range(log_size):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(math.sqrt(len(matrix)))
