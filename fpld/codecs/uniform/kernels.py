"""The uniform codec in loops: the same bytes and values as the arrays of `fpld.codecs.uniform.codec`, in one pass.

Every inner loop runs over contiguous lanes of small integers and vectorises. No address depends on payload data:
whatever the bytes are, a kernel reads and writes the same places. Shifts by a variable amount and signed indices stop
the vectoriser, hence the multiplications by powers of two and the unsigned places. A slice counts a reference, which
costs more than a hundred coordinates, hence whole arrays with places in them. Named tuples are taken apart before a
loop, for the same reason.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba import float32, int32, uint8, uint16, uint32, uint64

from fpld.codecs.dither import GOLDEN, MIX_1, MIX_2, PERMUTATIONS
from fpld.kernels import kernel

LANES = 4096  # at a time: what the loops over digits touch stays in the cache
BATCH = 8  # nodes of a pass

_GOLDEN = np.uint32(GOLDEN)
_MIX_1 = np.uint32(MIX_1)
_MIX_2 = np.uint32(MIX_2)
_TURN = PERMUTATIONS - 1
# Bits of a float32: of infinity, beyond which there is only NaN, and of the sign.
INFINITE = 0x7F800000
SIGN = 0x80000000

Array = np.ndarray[Any, np.dtype[Any]]


class Layouts(NamedTuple):
    """Layouts of contexts as integers.

    `groups` [group, 6] has start, lanes, width, first digit, digits and byte offset; `radices` those of all digits;
    `planes` [plane, 4] width, place, byte offset and length. Layout l has the groups bounds[l, 0] to bounds[l, 1] and
    the planes bounds[l, 2] to bounds[l, 3], and symbols with lows[l] raw bits.
    """

    groups: Array
    radices: Array
    planes: Array
    bounds: Array
    lows: Array


class Nodes(NamedTuple):
    """Payloads of a batch of nodes, always `BATCH` of them, and how to read each.

    `offsets` [node] is where contexts begin; `sizes` and `layouts` [node, 2] are the bytes and the layout of the first
    `longer` contexts, and of the others. `centres` and `halves` [node, row] are the ranges. `streams` [node] says which
    row of `keys` [stream, row, 4] the dither comes from, and `phases` [node, ...] where in it a node stands.
    """

    payloads: tuple[Array, ...]
    offsets: Array
    sizes: Array
    longer: Array
    layouts: Array
    centres: Array
    halves: Array
    streams: Array
    keys: Array
    phases: Array


class Sums(NamedTuple):
    """What `add_rows` adds to: values [row, V], and the variance of each node over all its coordinates.

    `noise` [sampled, V + 1] and `weights` [row, V + 1] take differences from coordinate to coordinate of what is
    constant over a run of them; `place_of` [row] says where in `noise` a context's variances belong, or -1.
    """

    total: Array
    node_variance: Array
    place_of: Array
    noise: Array
    weights: Array


class _Channel(NamedTuple):
    """The numbers that turn a value into its place on the grid: see `fpld.codecs.uniform.codec`."""

    centre: Any
    slope: Any
    offset: Any
    top: Any


class _Lanes(NamedTuple):
    """Where a run of `count` lanes begins among values, phases and the values that come next."""

    count: Any
    values: Any
    phases: Any
    ahead: Any


@kernel
def _words(key, out):
    """Fill a context's dither words: `fpld.codecs.dither.mix`."""
    counter = key[0]
    b = key[1]
    c = key[2]
    for j in range(out.size):
        h = uint32(counter ^ (counter >> uint32(16)))
        counter = uint32(counter + _GOLDEN)
        h = uint32(h * _MIX_1)
        h ^= b
        h ^= h >> uint32(15)
        h = uint32(h * _MIX_2)
        h = uint32(h + c)
        h ^= h >> uint32(15)
        out[j] = h


@kernel
def _load(body, lower, upper, x, n):
    for j in range(n):
        x[j] = uint16(body[lower + j]) | (uint16(body[upper + j]) << uint16(8))


@kernel
def _add_digits(x, n, radix, units, c, phases, o, scale, base, total):
    """Take the next digit of each lane and add its values."""
    for j in range(n):
        t = uint32(uint32(x[j]) * radix)
        x[j] = uint16(t)
        y = uint16(units[c + j] + phases[o + j])
        z = int32(((t >> uint32(16)) << uint32(16)) | uint32(y))
        total[c + j] += float32(z) * scale + base


@kernel
def _digits(x, n, radix, factor, symbols):
    """Take the next digit of each lane, as the upper part of a symbol."""
    for j in range(n):
        t = uint32(uint32(x[j]) * uint32(radix))
        x[j] = uint16(t)
        symbols[j] = uint16(uint16(t >> uint32(16)) * factor)


@kernel
def _raw(body, at, n, factor, mask, symbols, done):
    """Put raw bits of a plane into their place in a symbol: (byte 2^8 2^(to - from) >> 8) & mask."""
    for j in range(n):
        bits = uint16(uint16(uint16(body[at + j]) * factor) >> uint16(8)) & mask
        symbols[done + j] = symbols[done + j] | bits


@kernel
def _add_symbols(symbols, n, units, c, phases, o, scale, base, total):
    for j in range(n):
        y = uint16(units[c + j] + phases[o + j])
        z = int32((uint32(symbols[j]) << uint32(16)) | uint32(y))
        total[c + j] += float32(z) * scale + base


@kernel
def _planes(body, first, planes, begin, end, c, symbols, n):
    """Add the raw bits of n coordinates from c on: byte j of a plane holds coordinates j, j + length, ..."""
    for p in range(begin, end):
        width = planes[p, 0]
        place = planes[p, 1]
        at = planes[p, 2]
        length = planes[p, 3]
        done = 0
        while done < n:
            turn, j = divmod(c + done, length)
            count = min(n - done, length - j)
            factor = uint16(1 << (8 + place - width * turn))
            mask = uint16(((1 << width) - 1) << place)
            _raw(body, uint64(first + at + j), uint64(count), factor, mask, symbols, uint64(done))
            done += count


@kernel
def _constants(half, centre, levels):
    """Return the step and the value of z = 0, as `fpld.codecs.uniform.codec` has them; and the variance."""
    if levels == 1:
        return 0.0, centre, half * half
    step = 2.0 * half / (levels - 1)
    return step, centre - step * (levels / 2.0 - 2.0**-17), step * step / 12.0


@kernel
def _add_variances(node, row, group, layouts, low, nodes, sums, weighted):
    """Add the variances of a group's coordinates: to the node's, to the sampled ones, and as weights."""
    start = layouts.groups[group, 0]
    lanes = layouts.groups[group, 1]
    digit = layouts.groups[group, 3]
    sampled = sums.place_of[row]
    for d in range(layouts.groups[group, 4]):
        levels = layouts.radices[digit + d] << low
        _, _, variance = _constants(nodes.halves[node, row], nodes.centres[node, row], levels)
        sums.node_variance[node] += lanes * variance
        begin = start + d * lanes
        end = begin + lanes
        if sampled >= 0:
            sums.noise[sampled, begin] += variance
            sums.noise[sampled, end] -= variance
        if weighted:
            weight = 1.0 / max(variance, 1e-30)
            sums.weights[row, begin] += weight
            sums.weights[row, end] -= weight


@kernel
def add_rows(nodes, layouts, first_row, sums, weighted):
    """Decode the contexts from `first_row` on and add them to `sums`, node by node in order.

    With `weighted` a value counts by the inverse of its variance.
    """
    groups = layouts.groups
    radices = layouts.radices
    planes = layouts.planes
    keys = nodes.keys
    streams = nodes.streams
    vocab = sums.total.shape[1]
    words = np.empty((vocab + 1) // 2, np.uint32)
    units = words.view(np.uint16)
    x = np.empty(LANES, np.uint16)
    symbols = np.empty(LANES, np.uint16)
    for r in range(sums.total.shape[0]):
        drawn = -1
        out = sums.total[r]
        for k in range(streams.size):
            # Nodes of one stream follow each other: its words are drawn once.
            if streams[k] != drawn:
                drawn = streams[k]
                _words(keys[drawn, r], words)
            turn = int(keys[drawn, r, 3]) & _TURN
            body = nodes.payloads[k]
            phases = nodes.phases[k]
            half = nodes.halves[k, r]
            centre = nodes.centres[k, r]
            longer = nodes.longer[k]
            row = first_row + r
            short = 1 if row >= longer else 0
            first = nodes.offsets[k] + row * nodes.sizes[k, short] + (longer if short else 0)
            ell = nodes.layouts[k, short]
            low = layouts.lows[ell]
            first_plane = layouts.bounds[ell, 2]
            last_plane = layouts.bounds[ell, 3]
            for g in range(layouts.bounds[ell, 0], layouts.bounds[ell, 1]):
                start = groups[g, 0]
                lanes = groups[g, 1]
                width = groups[g, 2]
                digit = groups[g, 3]
                count = groups[g, 4]
                at = first + groups[g, 5]
                _add_variances(k, r, g, layouts, low, nodes, sums, weighted)
                for s in range(0, lanes, LANES):
                    n = min(LANES, lanes - s)
                    size = uint64(n)
                    if width == 16:
                        _load(body, uint64(at + s), uint64(at + lanes + s), x, size)
                    elif width == 8:
                        x[0] = uint16(body[at]) << uint16(8)
                    else:
                        x[:n] = 0
                    for d in range(count):
                        radix = radices[digit + d]
                        step, base, variance = _constants(half, centre, radix << low)
                        if weighted:
                            step /= max(variance, 1e-30)
                            base /= max(variance, 1e-30)
                        c = start + d * lanes + s
                        place = uint64(c)
                        o = uint64((c + turn) & _TURN)
                        scale = float32(step / 65536.0)
                        offset = float32(base)
                        if low == 0:
                            _add_digits(x, size, uint32(radix), units, place, phases, o, scale, offset, out)
                        else:
                            _digits(x, size, uint16(radix), uint16(1 << low), symbols)
                            _planes(body, first, planes, first_plane, last_plane, c, symbols, n)
                            _add_symbols(symbols, size, units, place, phases, o, scale, offset, out)


@kernel
def _look(row, seen):
    """Merge a row's bits into `seen`: the largest as signed, the largest and the smallest as unsigned numbers."""
    signed = int32(seen[0])
    most = uint32(seen[1])
    least = uint32(seen[2])
    for v in range(row.size):
        signed = max(signed, int32(row[v]))
        most = max(most, row[v])
        least = min(least, row[v])
    seen[0] = signed
    seen[1] = most
    seen[2] = least


@kernel
def _reset(seen):
    seen[0] = -0x80000000
    seen[1] = 0
    seen[2] = 0xFFFFFFFF


@kernel
def _finite(seen):
    """Return whether all that was seen is finite: beyond the infinities, of either sign, there is only NaN."""
    return seen[0] < INFINITE and seen[1] < INFINITE + SIGN


@kernel
def _half_unit(value):
    """Return the distance of float16 numbers around a value."""
    _, exponent = math.frexp(value)
    return 2.0 ** (max(exponent - 1, -14) - 10)


@kernel
def _range(seen, floats, bits):
    """Return centre and half-range as float16 numbers, the range rounded up: as `fpld.codecs.uniform.codec` has them.

    As signed numbers, floats of plus sign are in order and above the others; as unsigned ones, those of minus sign are
    in reversed order and above the others. If all have one sign, the smallest number is the other end.
    """
    bits[0] = uint32(seen[1] if seen[1] >= SIGN else seen[2])
    bits[1] = uint32(seen[0] if seen[0] >= 0 else seen[2])
    bottom = float(floats[0])
    top = float(floats[1])
    middle = (top + bottom) / 2
    unit = _half_unit(middle)
    centre = np.rint(middle / unit) * unit
    reach = max(top - centre, centre - bottom)
    unit = _half_unit(reach)
    return centre, np.ceil(reach / unit) * unit


@kernel
def _quantize(values, ahead, channel, lanes, units, phases, symbols, seen):
    """Compute the symbols of values, and merge the bits of the next ones, `ahead`, into `seen`.

    So the next row's way from memory is hidden behind arithmetic. `phases` are 65535 less those of the dither.
    """
    n, c, o, at = lanes
    centre, slope, offset, top = channel
    signed = int32(seen[0])
    most = uint32(seen[1])
    least = uint32(seen[2])
    for j in range(n):
        f = (values[c + j] - centre) * slope + offset
        f = min(max(f, float32(0)), top)
        y = uint16(phases[o + j] - units[c + j])
        symbols[j] = uint16(uint32(uint32(int32(f)) + uint32(y)) >> uint32(16))
        next_bits = ahead[at + j]
        signed = max(signed, int32(next_bits))
        most = max(most, next_bits)
        least = min(least, next_bits)
    seen[0] = signed
    seen[1] = most
    seen[2] = least


@kernel
def _append(number, n, radix, symbols):
    """Append each symbol as a digit: number * radix + symbol."""
    for j in range(n):
        number[j] = uint16(uint16(number[j] * radix) + symbols[j])


@kernel
def _append_upper(number, n, radix, factor, symbols):
    """Append the upper part of each symbol as a digit: number * radix + symbol / 2^low."""
    for j in range(n):
        high = uint16(uint32(uint32(symbols[j]) * uint32(factor)) >> uint32(16))
        number[j] = uint16(uint16(number[j] * radix) + high)


@kernel
def _fraction(number, n, product):
    """Turn numbers below the product into fractions of 2^16, rounded up: ceil(number 2^16 / product).

    In float32 the quotient is right to 1/100; what the integer next to it leaves says whether it is too small.
    """
    ratio = float32(65536.0 / product)
    whole = uint32(product)
    for j in range(n):
        nearest = int32(float32(number[j]) * ratio + float32(0.5))
        rest = int32(uint32(uint32(number[j]) << uint32(16)) - uint32(uint32(nearest) * whole))
        number[j] = uint16(nearest + int32(rest > int32(0)))


@kernel
def _store(number, n, data, lower, upper):
    for j in range(n):
        data[lower + j] = uint8(number[j])
        data[upper + j] = uint8(number[j] >> uint16(8))


@kernel
def _put_raw(symbols, done, n, factor, mask, data, at):
    """Put raw bits into their place in a plane: (symbol 2^8 2^(to - from) >> 8) & mask, which shifts either way."""
    for j in range(n):
        bits = uint16(uint16(symbols[done + j] * factor) >> uint16(8)) & mask
        data[at + j] = data[at + j] | uint8(bits)


@kernel
def _put_planes(symbols, n, c, planes, data):
    """Put the raw bits of n coordinates from c on into their planes; see `_planes`."""
    for p in range(planes.shape[0]):
        width = planes[p, 0]
        place = planes[p, 1]
        at = planes[p, 2]
        length = planes[p, 3]
        done = 0
        while done < n:
            turn, j = divmod(c + done, length)
            count = min(n - done, length - j)
            to = width * turn
            factor = uint16(1 << (8 + to - place))
            mask = uint16(((1 << width) - 1) << to)
            _put_raw(symbols, uint64(done), uint64(count), factor, mask, data, uint64(at + j))
            done += count


@kernel
def encode_rows(logits, clip, limit, layout, keys, phases, ranges, out):
    """Quantize and pack rows of logits into `out` [row, byte], all zero; return the row that cannot be coded, or -1.

    `layout` has the one layout of all rows. Without a clip (0) each row's centre and half-range go to `ranges`, and
    logits must lie within `limit`.
    """
    groups = layout.groups
    radices = layout.radices
    planes = layout.planes
    low = layout.lows[0]
    bits = logits.view(np.uint32)
    words = np.empty((logits.shape[1] + 1) // 2, np.uint32)
    units = words.view(np.uint16)
    # Bottom and top of a row, and their bits.
    floats = np.zeros(2, np.float32)
    integers = floats.view(np.uint32)
    symbols = np.empty(LANES, np.uint16)
    number = np.zeros(LANES, np.uint16)
    seen = np.empty(3, np.int64)
    last = logits.shape[0] - 1
    _reset(seen)
    _look(bits[0], seen)
    for r in range(logits.shape[0]):
        if not _finite(seen):
            return r
        centre = 0.0
        half = clip
        if clip == 0:
            centre, half = _range(seen, floats, integers)
            if abs(floats[0]) > limit or abs(floats[1]) > limit:
                return r
            ranges[r, 0] = centre
            ranges[r, 1] = half
        _reset(seen)
        _words(keys[r], words)
        turn = int(keys[r, 3]) & _TURN
        data = out[r]
        values = logits[r]
        # The next row is looked at in its order, so that memory keeps up.
        ahead = bits[min(r + 1, last)]
        looked = 0
        for g in range(groups.shape[0]):
            start = groups[g, 0]
            lanes = groups[g, 1]
            width = groups[g, 2]
            digit = groups[g, 3]
            count = groups[g, 4]
            at = groups[g, 5]
            for s in range(0, lanes, LANES):
                n = min(LANES, lanes - s)
                size = uint64(n)
                product = 1
                for d in range(count):
                    radix = radices[digit + d]
                    levels = radix << low
                    slope = float32(0) if half == 0 else float32(65536.0 * (levels - 1) / (2.0 * half))
                    offset = float32((levels - 1) * 32768.0 + 0.5)
                    top = float32((levels - 1) * 65536.0)
                    c = start + d * lanes + s
                    channel = _Channel(float32(centre), slope, offset, top)
                    places = _Lanes(size, uint64(c), uint64((c + turn) & _TURN), uint64(looked))
                    _quantize(values, ahead, channel, places, units, phases, symbols, seen)
                    looked += n
                    over = uint16(radix if d else 0)  # what was before the first digit does not count
                    if low == 0:
                        _append(number, size, over, symbols)
                    else:
                        _append_upper(number, size, over, uint16(65536 >> low), symbols)
                        _put_planes(symbols, n, c, planes, data)
                    product *= radix
                if width == 16:
                    if product < 65536:
                        _fraction(number, size, product)
                    _store(number, size, data, uint64(at + s), uint64(at + s + lanes))
                elif width == 8:
                    data[at] = uint8(-(-(int(number[0]) << 8) // product))
    return -1
