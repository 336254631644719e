"""A student's weights as they travel: a lossless difference to weights that the receiver has, packed.

offset  bytes  field
     0      4  magic "FPWD"
     4      4  version
     8     32  SHA-256 of the weights that the receiver has, the reference
    40     32  SHA-256 of the weights that come of it
    72      n  zlib: for each array, by name, a byte with its form and then its planes

Both digests are of the arrays as a safetensors file without metadata. Names, shapes and types are those of the
reference, so nothing in a message says how much to allocate. Numbers that are near each other have bit patterns that
are near: what is sent is the difference of the patterns as integers, small ones of either sign first, byte by byte from
the lowest plane to the highest. The high planes are nearly all zero, which zlib finds.

    form 0   the array is the reference
    form 1   differences of all its bits
    form 2   a float32 array whose numbers are all float16: differences of 16 bits to the reference, rounded to float16
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

    Array = np.ndarray[Any, np.dtype[Any]]
    Weights = Mapping[str, Array]

MAGIC = b"FPWD"
VERSION = 1
HEADER = struct.Struct("<4sI32s32s")
SAME, ALL_BITS, HALF = 0, 1, 2
_LEVEL = 6


def weights_digest(weights: Weights) -> str:
    """Name weights by their SHA-256."""
    return hashlib.sha256(dump_arrays(dict(weights), {})).hexdigest()


def rounded(weights: Weights, bits: int) -> dict[str, Array]:
    """Return weights of which each float32 has no more than so many bits: all 32, or the nearest float16.

    >>> float(rounded({"w": np.array([0.1], np.float32)}, 16)["w"][0])
    0.0999755859375
    """
    if bits == 32:
        return dict(weights)
    found = {name: _half(array) if array.dtype == np.float32 else array for name, array in weights.items()}
    for name, array in found.items():
        if array.dtype == np.float32 and not np.isfinite(array).all():
            most = float(np.abs(weights[name]).max())
            raise InputError(
                f"combine.weight_bits must be 32: a weight of {name!r} is {most:g}, above what 16 bits hold"
            )
    return found


def pack_weights(weights: Weights, reference: Weights) -> bytes:
    """Return the message that makes weights out of a reference; both have the same names, shapes and types.

    >>> old = {"w": np.array([1.0, 2.0], np.float32)}
    >>> new = {"w": np.array([1.0, 2.5], np.float32)}
    >>> unpack_weights(pack_weights(new, old), old)["w"].tolist()
    [1.0, 2.5]
    """
    _check_alike(weights, reference)
    head = HEADER.pack(MAGIC, VERSION, bytes.fromhex(weights_digest(reference)), bytes.fromhex(weights_digest(weights)))
    packer = zlib.compressobj(_LEVEL)
    parts = [head]
    for name in sorted(reference):
        parts += [packer.compress(part) for part in _coded(weights[name], reference[name])]
    return b"".join([*parts, packer.flush()])


def unpack_weights(data: bytes, reference: Weights) -> dict[str, Array]:
    """Return the weights that a message makes out of a reference; believe it only if their digest is the stated one."""
    if len(data) < HEADER.size:
        raise ProtocolError(f"packed weights must have at least {HEADER.size} bytes, got {len(data)}")
    magic, version, before, after = HEADER.unpack_from(data)
    if (magic, version) != (MAGIC, VERSION):
        raise ProtocolError(f"packed weights must be of version {VERSION}: install the same fpld at both ends")
    if before.hex() != weights_digest(reference):
        raise ProtocolError("the weights that these are a difference to are not here")
    stream = _unpacked(memoryview(data)[HEADER.size :], sum(1 + array.nbytes for array in reference.values()))
    weights, place = {}, 0
    for name in sorted(reference):
        weights[name], place = _decoded(stream, place, reference[name])
    if place != len(stream):
        raise ProtocolError(f"packed weights must hold {place} bytes as their forms say, got {len(stream)}")
    if after.hex() != weights_digest(weights):
        raise ProtocolError("packed weights are damaged: what comes of them is not what their digest names")
    return weights


def packed_for(data: bytes) -> tuple[str, str]:
    """Return the digests that a message states: of the weights that it needs, and of those that it makes."""
    if len(data) < HEADER.size:
        raise ProtocolError(f"packed weights must have at least {HEADER.size} bytes, got {len(data)}")
    _, _, before, after = HEADER.unpack_from(data)
    return before.hex(), after.hex()


def _check_alike(weights: Weights, reference: Weights) -> None:
    for name in sorted({*weights, *reference}):
        one, two = weights.get(name), reference.get(name)
        if one is None or two is None or (one.shape, one.dtype) != (two.shape, two.dtype):
            raise InputError(
                f"weights {name!r} must have the same shape and type as those that they are packed against"
            )


def _unpacked(data: memoryview, most: int) -> bytes:
    """Return what a zlib stream holds, all of it and no more than may be."""
    unpacker = zlib.decompressobj()
    try:
        stream = unpacker.decompress(data, most + 1)
    except zlib.error as error:
        raise ProtocolError(f"packed weights must be a zlib stream, but: {error}") from None
    if len(stream) > most or not unpacker.eof or unpacker.unused_data:
        raise ProtocolError(f"packed weights must be one whole zlib stream of at most {most} bytes")
    return stream


def _coded(array: Array, reference: Array) -> list[bytes]:
    """Return an array's form, and its planes."""
    array, reference = np.asarray(array, order="C"), np.asarray(reference, order="C")
    if array.tobytes() == reference.tobytes():
        return [bytes([SAME])]
    form = ALL_BITS
    if array.dtype == np.float32 and np.array_equal(_half(array).view(np.uint32), array.view(np.uint32)):
        form, array, reference = HALF, _to_half(array), _to_half(reference)
    change = _ordered(array) - _ordered(reference)  # modulo 2^bits
    top = change >> change.dtype.type(8 * change.itemsize - 1)
    change = (change << change.dtype.type(1)) ^ (np.zeros_like(top) - top)
    planes = change.reshape(-1, 1).view(np.uint8)
    return [bytes([form]), *(planes[:, plane].tobytes() for plane in range(planes.shape[1]))]


def _decoded(stream: bytes, place: int, reference: Array) -> tuple[Array, int]:
    """Return the array at a place of the stream, and the place after it."""
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
    found = _from_ordered(_ordered(base) + change, base.dtype).reshape(base.shape)
    return (found.astype(np.float32) if form == HALF else found), place + size


def _unsigned(array: Array) -> np.dtype[Any]:
    return np.dtype(f"<u{array.itemsize}")


def _ordered(array: Array) -> Array:
    """Return bit patterns as unsigned integers; those of floats rise with the numbers, the negative ones turned."""
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
