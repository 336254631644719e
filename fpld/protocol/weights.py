"""Deltas: a student's weights on the wire, as a lossless difference to weights that the receiver has.

    offset  bytes  field
         0      4  magic "FPWD"
         4      4  version
         8     32  SHA-256 of the reference, the weights that the receiver has
        40     32  SHA-256 of the result
        72      n  zlib stream: for each array, in the order of names, a byte with its form, and its byte planes

    form 0   the array equals the reference
    form 1   differences of all bits
    form 2   a float32 array whose numbers are all float16: differences of 16 bits to the reference, rounded to float16

Both digests are of the arrays as a safetensors file without metadata. Names, shapes and types are those of the
reference, so no field of a delta decides how much is allocated. Floats that are close have bit patterns that are close,
once the patterns are ordered as the numbers are. The differences of the patterns are zigzag-coded, so that those of
either sign are small, and written byte plane by byte plane, the lowest first. The high planes are nearly all zero, and
zlib compresses them away.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.errors import InputError, ProtocolError
from fpld.storage.arrays import dump_arrays

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fpld.types import Array, Arrays

    Weights = Mapping[str, Array]

MAGIC = b"FPWD"
VERSION = 1
HEADER = struct.Struct("<4sI32s32s")
SAME = 0
ALL_BITS = 1
HALF = 2
_ZLIB_LEVEL = 6


def weights_digest(weights: Weights) -> str:
    """Return the SHA-256 of weights, in hexadecimal."""
    return hashlib.sha256(dump_arrays(dict(weights), {})).hexdigest()


def round_weights(weights: Weights, bits: int) -> Arrays:
    """Round float32 weights to 16 bits, the nearest float16; with 32 bits return them as they are.

    >>> float(round_weights({"w": np.array([0.1], np.float32)}, 16)["w"][0])
    0.0999755859375
    """
    if bits == 32:
        return dict(weights)
    rounded = {name: _half(array) if array.dtype == np.float32 else array for name, array in weights.items()}
    for name, array in rounded.items():
        if array.dtype == np.float32 and not np.isfinite(array).all():
            largest = float(np.abs(weights[name]).max())
            raise InputError(
                f"combine.weight_bits must be 32: a weight of {name!r} is {largest:g}, above the range of float16"
            )
    return rounded


def encode_delta(weights: Weights, reference: Weights) -> bytes:
    """Encode weights as a delta to a reference with the same names, shapes and types.

    >>> old = {"w": np.array([1.0, 2.0], np.float32)}
    >>> new = {"w": np.array([1.0, 2.5], np.float32)}
    >>> decode_delta(encode_delta(new, old), old)["w"].tolist()
    [1.0, 2.5]
    """
    _check_alike(weights, reference)
    head = HEADER.pack(MAGIC, VERSION, bytes.fromhex(weights_digest(reference)), bytes.fromhex(weights_digest(weights)))
    compressor = zlib.compressobj(_ZLIB_LEVEL)
    parts = [head]
    for name in sorted(reference):
        parts += [compressor.compress(part) for part in _coded(weights[name], reference[name])]
    return b"".join([*parts, compressor.flush()])


def decode_delta(data: bytes, reference: Weights) -> Arrays:
    """Return the weights of a delta.

    Raises
    ------
    ProtocolError
        The delta is malformed, is to another reference, or does not yield weights with the digest that it states.
    """
    needed, made = delta_digests(data)
    if needed != weights_digest(reference):
        raise ProtocolError("the weights that these are a difference to are not here")
    stream = _decompress(memoryview(data)[HEADER.size :], sum(1 + array.nbytes for array in reference.values()))
    weights = {}
    place = 0
    for name in sorted(reference):
        weights[name], place = _decoded(stream, place, reference[name])
    if place != len(stream):
        raise ProtocolError(f"packed weights must hold {place} bytes as their forms say, got {len(stream)}")
    if made != weights_digest(weights):
        raise ProtocolError("packed weights are damaged: their digest does not match")
    return weights


def delta_digests(data: bytes) -> tuple[str, str]:
    """Return the digests in a delta's header: of the reference that it needs, and of its result."""
    if len(data) < HEADER.size:
        raise ProtocolError(f"packed weights must have at least {HEADER.size} bytes, got {len(data)}")
    magic, version, needed, made = HEADER.unpack_from(data)
    if (magic, version) != (MAGIC, VERSION):
        raise ProtocolError(f"packed weights must be of version {VERSION}: install the same fpld at both ends")
    return needed.hex(), made.hex()


def _check_alike(weights: Weights, reference: Weights) -> None:
    for name in sorted({*weights, *reference}):
        one = weights.get(name)
        two = reference.get(name)
        if one is None or two is None or (one.shape, one.dtype) != (two.shape, two.dtype):
            raise InputError(
                f"weights {name!r} must have the same shape and type as those that they are packed against"
            )


def _decompress(data: memoryview, max_bytes: int) -> bytes:
    """Return the content of one whole zlib stream; refuse more than `max_bytes` before they are allocated."""
    decompressor = zlib.decompressobj()
    try:
        stream = decompressor.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise ProtocolError(f"packed weights must be a zlib stream, but: {error}") from None
    if len(stream) > max_bytes or not decompressor.eof or decompressor.unused_data:
        raise ProtocolError(f"packed weights must be one whole zlib stream of at most {max_bytes} bytes")
    return stream


def _coded(array: Array, reference: Array) -> list[bytes]:
    """Encode an array: its form, and its byte planes."""
    array = np.asarray(array, order="C")
    reference = np.asarray(reference, order="C")
    if array.tobytes() == reference.tobytes():
        return [bytes([SAME])]
    form = ALL_BITS
    if array.dtype == np.float32 and np.array_equal(_half(array).view(np.uint32), array.view(np.uint32)):
        form = HALF
        array = _to_half(array)
        reference = _to_half(reference)
    change = _ordered(array) - _ordered(reference)  # modulo 2^bits
    # Zigzag coding: the sign moves to the lowest bit, and the other bits are inverted if it is set.
    sign = change >> change.dtype.type(8 * change.itemsize - 1)
    change = (change << change.dtype.type(1)) ^ (np.zeros_like(sign) - sign)
    planes = change.reshape(-1, 1).view(np.uint8)
    return [bytes([form]), *(planes[:, plane].tobytes() for plane in range(planes.shape[1]))]


def _decoded(stream: bytes, place: int, reference: Array) -> tuple[Array, int]:
    """Decode the array at a place of the stream; return it, and the place after it."""
    form = stream[place] if place < len(stream) else -1
    place += 1
    if form == SAME:
        return reference.copy(), place
    if form not in (ALL_BITS, HALF) or (form == HALF and reference.dtype != np.float32):
        raise ProtocolError(f"packed weights must have arrays of forms 0, 1 or (of float32) 2, got {form}")
    base = np.asarray(_to_half(reference) if form == HALF else reference, order="C")
    size = base.nbytes
    if len(stream) - place < size:
        raise ProtocolError(f"packed weights are cut off: an array needs {size} bytes, {len(stream) - place} are left")
    planes = np.frombuffer(stream, np.uint8, size, place).reshape(base.itemsize, -1)
    change = np.ascontiguousarray(planes.T).view(_unsigned(base)).reshape(-1)
    one = change.dtype.type(1)
    change = (change >> one) ^ (np.zeros_like(change) - (change & one))
    array = _from_ordered(_ordered(base) + change, base.dtype).reshape(base.shape)
    return (array.astype(np.float32) if form == HALF else array), place + size


def _unsigned(array: Array) -> np.dtype[Any]:
    return np.dtype(f"<u{array.itemsize}")


def _ordered(array: Array) -> Array:
    """Return bit patterns as unsigned integers; those of floats are ordered as the numbers are.

    A float with the sign bit set is inverted, any other gets it set.
    """
    bits = array.reshape(-1).view(_unsigned(array))
    if array.dtype.kind != "f":
        return bits
    sign = bits.dtype.type(1 << (8 * array.itemsize - 1))
    return np.where(bits & sign, ~bits, bits | sign)


def _from_ordered(bits: Array, dtype: np.dtype[Any]) -> Array:
    if dtype.kind == "f":
        sign = bits.dtype.type(1 << (8 * dtype.itemsize - 1))
        bits = np.where(bits & sign, bits & ~sign, ~bits)
    return bits.view(dtype)


def _to_half(array: Array) -> Array:
    with np.errstate(over="ignore"):
        return array.astype(np.float16)


def _half(array: Array) -> Array:
    return _to_half(array).astype(np.float32)


class StudentDeltas:
    """Deltas of the student to what a node may have: the student before it, or the base model, which all nodes have."""

    def __init__(self, base: Arrays) -> None:
        self._base = base
        self._references = {weights_digest(base): base}
        self._student = base
        self.digest = weights_digest(base)
        self._deltas: dict[str, bytes] = {}

    def advance(self, student: Arrays) -> None:
        """Take a new student; deltas are then to the one before it, and to the base model."""
        self._references = {weights_digest(self._base): self._base, self.digest: self._student}
        self._student = student
        self.digest = weights_digest(student)
        self._deltas = {}

    def delta(self, held: str) -> bytes:
        """Return the delta for a node that holds the weights with this digest; empty if they are the student's."""
        if held == self.digest:
            return b""
        reference = held if held in self._references else next(iter(self._references))
        if reference == self.digest:  # the base model is still the student
            return b""
        if reference not in self._deltas:
            self._deltas[reference] = encode_delta(self._student, self._references[reference])
        return self._deltas[reference]

    @property
    def size(self) -> int:
        """Return the bytes of the delta to the student before this one."""
        return len(self.delta(list(self._references)[-1]))
