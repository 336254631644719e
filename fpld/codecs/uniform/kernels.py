"""The uniform codec in loops: the same bytes and values as `fpld.codecs.uniform.channel`, at the speed of memory.

Every inner loop runs over contiguous lanes of small integers and vectorises. No address depends on payload data:
whatever the bytes are, a kernel reads and writes the same places. Shifts by a variable amount and signed indices stop
the vectoriser, hence the multiplications by powers of two and the unsigned places; a slice counts a reference, which
costs more than a hundred coordinates, hence whole arrays with places in them.
"""

import math

import numpy as np
from numba import float32, int32, uint8, uint16, uint32, uint64

from fpld.codecs.dither import GOLDEN, MIX_1, MIX_2, PERMUTATIONS
from fpld.compiled import kernel

LANES = 4096  # at a time: what the loops over digits touch stays in the cache
BATCH = 8  # nodes of a pass

_GOLDEN, _MIX_1, _MIX_2 = np.uint32(GOLDEN), np.uint32(MIX_1), np.uint32(MIX_2)
_TURN = PERMUTATIONS - 1
INFINITE, SIGN = 0x7F800000, 0x80000000  # the bits from which on a float is not finite; its sign


@kernel
def _words(key, out):
    """Fill a context's dither words: `fpld.codecs.dither.mix`."""
    counter, b, c = key[0], key[1], key[2]
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
        width, place, at, length = planes[p, 0], planes[p, 1], planes[p, 2], planes[p, 3]
        done = 0
        while done < n:
            turn, j = divmod(c + done, length)
            count = min(n - done, length - j)
            factor, mask = uint16(1 << (8 + place - width * turn)), uint16(((1 << width) - 1) << place)
            _raw(body, uint64(first + at + j), uint64(count), factor, mask, symbols, uint64(done))
            done += count


@kernel
def _constants(half, centre, levels):
    """Return the step and the value of z = 0, as `fpld.codecs.uniform.channel` has them."""
    if levels == 1:
        return 0.0, centre, half * half
    step = 2.0 * half / (levels - 1)
    return step, centre - step * (levels / 2.0 - 2.0**-17), step * step / 12.0


@kernel
def add(
    payloads,
    sides,
    sizes,
    longer,
    layout_of,
    bounds,
    groups,
    radices,
    planes,
    lows,
    centres,
    halves,
    streams,
    keys,
    phases,
    row,
    total,
    weighted,
    place_of,
    noise,
    weights,
    noise_of,
    words,
    units,
):
    """Decode the contexts from `row` on and add them to `total`, node by node in order.

    `noise` and `weights` take differences from coordinate to coordinate of what is constant over a run of them;
    `place_of` says where in `noise` a context's belong, or -1.
    """
    x, symbols = np.empty(LANES, np.uint16), np.empty(LANES, np.uint16)
    for r in range(total.shape[0]):
        drawn, noisy = -1, place_of[r]
        out = total[r]
        for k in range(streams.size):
            if streams[k] != drawn:
                drawn = streams[k]
                _words(keys[drawn, r], words)
            turn = int(keys[drawn, r, 3]) & _TURN
            body, own = payloads[k], phases[k]
            absolute = row + r
            short = 1 if absolute >= longer[k] else 0
            first = sides[k] + absolute * sizes[k, short] + (longer[k] if short else 0)
            ell = layout_of[k, short]
            low = lows[ell]
            for g in range(bounds[ell, 0], bounds[ell, 1]):
                start, lanes, width = groups[g, 0], groups[g, 1], groups[g, 2]
                digit, count, at = groups[g, 3], groups[g, 4], first + groups[g, 5]
                for d in range(count):
                    levels = radices[digit + d] << low
                    _, _, variance = _constants(halves[k, r], centres[k, r], levels)
                    noise_of[k] += lanes * variance
                    begin, end = start + d * lanes, start + (d + 1) * lanes
                    if noisy >= 0:
                        noise[noisy, begin] += variance
                        noise[noisy, end] -= variance
                    if weighted:
                        weight = 1.0 / max(variance, 1e-30)
                        weights[r, begin] += weight
                        weights[r, end] -= weight
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
                        step, base, variance = _constants(halves[k, r], centres[k, r], radix << low)
                        if weighted:
                            step /= max(variance, 1e-30)
                            base /= max(variance, 1e-30)
                        c = start + d * lanes + s
                        place, o = uint64(c), uint64((c + turn) & _TURN)
                        scale, offset = float32(step / 65536.0), float32(base)
                        if low == 0:
                            _add_digits(x, size, uint32(radix), units, place, own, o, scale, offset, out)
                        else:
                            _digits(x, size, uint16(radix), uint16(1 << low), symbols)
                            _planes(body, first, planes, bounds[ell, 2], bounds[ell, 3], c, symbols, n)
                            _add_symbols(symbols, size, units, place, own, o, scale, offset, out)


@kernel
def _look(row, seen):
    """Take a row's bits into `seen`: the largest as signed, the largest and the smallest as unsigned numbers."""
    signed, most, least = int32(seen[0]), uint32(seen[1]), uint32(seen[2])
    for v in range(row.size):
        signed, most, least = max(signed, int32(row[v])), max(most, row[v]), min(least, row[v])
    seen[0], seen[1], seen[2] = signed, most, least


@kernel
def _forget(seen):
    seen[0], seen[1], seen[2] = -0x80000000, 0, 0xFFFFFFFF


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
    """Return centre and half-range as float16 numbers, the range rounded up: as `fpld.codecs.uniform.channel` has them.

    As signed numbers, floats of plus sign are in order and above the others; as unsigned ones, those of minus sign are
    in reversed order and above the others. If all have one sign, the smallest number is the other end.
    """
    bits[0] = uint32(seen[1] if seen[1] >= SIGN else seen[2])
    bits[1] = uint32(seen[0] if seen[0] >= 0 else seen[2])
    bottom, top = float(floats[0]), float(floats[1])
    middle = (top + bottom) / 2
    unit = _half_unit(middle)
    centre = np.rint(middle / unit) * unit
    reach = max(top - centre, centre - bottom)
    unit = _half_unit(reach)
    return centre, np.ceil(reach / unit) * unit


@kernel
def _quantize(values, c, n, centre, slope, offset, top, units, phases, o, symbols, ahead, at, seen):
    """Return the symbols of values, and look at what comes next: its way from memory is hidden behind arithmetic.

    `phases` are here what the dither takes from 65535.
    """
    signed, most, least = int32(seen[0]), uint32(seen[1]), uint32(seen[2])
    for j in range(n):
        f = (values[c + j] - centre) * slope + offset
        f = min(max(f, float32(0)), top)
        y = uint16(phases[o + j] - units[c + j])
        symbols[j] = uint16(uint32(uint32(int32(f)) + uint32(y)) >> uint32(16))
        next_bits = ahead[at + j]
        signed, most, least = max(signed, int32(next_bits)), max(most, next_bits), min(least, next_bits)
    seen[0], seen[1], seen[2] = signed, most, least


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
    ratio, whole = float32(65536.0 / product), uint32(product)
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
        width, place, at, length = planes[p, 0], planes[p, 1], planes[p, 2], planes[p, 3]
        done = 0
        while done < n:
            turn, j = divmod(c + done, length)
            count = min(n - done, length - j)
            to = width * turn
            factor, mask = uint16(1 << (8 + to - place)), uint16(((1 << width) - 1) << to)
            _put_raw(symbols, uint64(done), uint64(count), factor, mask, data, uint64(at + j))
            done += count


@kernel
def encode(
    logits, bits, clip, limit, low, groups, radices, planes, keys, phases, words, units, floats, integers, ranges, out
):
    """Quantize and pack rows of logits into `out` [rows, size], all zero; return the row that cannot be coded, or -1.

    Without a clip (0) each row's centre and half-range go to `ranges`. `bits` are the logits' bits, and `integers`
    those of `floats`, two of them.
    """
    symbols, number, seen = np.empty(LANES, np.uint16), np.zeros(LANES, np.uint16), np.empty(3, np.int64)
    last = logits.shape[0] - 1
    _forget(seen)
    _look(bits[0], seen)
    for r in range(logits.shape[0]):
        if not _finite(seen):
            return r
        centre, half = 0.0, clip
        if clip == 0:
            centre, half = _range(seen, floats, integers)
            if abs(floats[0]) > limit or abs(floats[1]) > limit:
                return r
            ranges[r, 0], ranges[r, 1] = centre, half
        _forget(seen)
        _words(keys[r], words)
        turn = int(keys[r, 3]) & _TURN
        data, values, ahead, looked = out[r], logits[r], bits[min(r + 1, last)], 0  # in order, so that memory keeps up
        for g in range(groups.shape[0]):
            start, lanes, width = groups[g, 0], groups[g, 1], groups[g, 2]
            digit, count, at = groups[g, 3], groups[g, 4], groups[g, 5]
            for s in range(0, lanes, LANES):
                n = min(LANES, lanes - s)
                size, product = uint64(n), 1
                for d in range(count):
                    radix = radices[digit + d]
                    levels = radix << low
                    slope = float32(0) if half == 0 else float32(65536.0 * (levels - 1) / (2.0 * half))
                    offset, top = float32((levels - 1) * 32768.0 + 0.5), float32((levels - 1) * 65536.0)
                    c = start + d * lanes + s
                    channel = float32(centre), slope, offset, top, units, phases, uint64((c + turn) & _TURN)
                    _quantize(values, uint64(c), size, *channel, symbols, ahead, uint64(looked), seen)
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
