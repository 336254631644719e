"""The uniform codec in loops: the same bytes and values as `fpld.codecs.channel`, at the speed of memory.

Every inner loop runs over contiguous lanes of small integers and vectorises. No address depends on payload data:
whatever the bytes are, a kernel reads and writes the same places. Shifts by a variable amount and signed indices stop
the vectoriser, hence the multiplications by powers of two and the slices.
"""

import math

import numpy as np
from numba import float32, int32, uint8, uint16, uint32

from fpld.compiled import kernel
from fpld.dither import GOLDEN, MIX_1, MIX_2, PERMUTATIONS

LANES = 4096  # at a time: what the loops over digits touch stays in the cache
BATCH = 8  # nodes of a pass

_GOLDEN, _MIX_1, _MIX_2 = np.uint32(GOLDEN), np.uint32(MIX_1), np.uint32(MIX_2)
_TURN = PERMUTATIONS - 1
INFINITE = 0x7F800000  # the bits from which on a float is not finite


@kernel
def _words(key, out):
    """Fill a context's dither words: `fpld.dither.mix`."""
    a, b, c = key[0], key[1], key[2]
    for j in range(out.size):
        h = uint32(uint32(j) * _GOLDEN + a)
        h ^= h >> uint32(16)
        h = uint32(h * _MIX_1)
        h ^= b
        h ^= h >> uint32(15)
        h = uint32(h * _MIX_2)
        h = uint32(h + c)
        h ^= h >> uint32(15)
        out[j] = h


@kernel
def _load(x, lower, upper):
    for j in range(lower.size):
        x[j] = uint16(lower[j]) | (uint16(upper[j]) << uint16(8))


@kernel
def _add_digits(x, radix, units, phases, scale, base, total):
    """Take the next digit of each lane and add its values."""
    for j in range(total.size):
        t = uint32(uint32(x[j]) * radix)
        x[j] = uint16(t)
        y = uint16(units[j] + phases[j])
        z = int32(((t >> uint32(16)) << uint32(16)) | uint32(y))
        total[j] += float32(z) * scale + base


@kernel
def _digits(x, radix, factor, symbols):
    """Take the next digit of each lane, as the upper part of a symbol."""
    for j in range(symbols.size):
        t = uint32(uint32(x[j]) * uint32(radix))
        x[j] = uint16(t)
        symbols[j] = uint16(uint16(t >> uint32(16)) * factor)


@kernel
def _raw(data, down, mask, factor, symbols):
    """Put raw bits of a plane into their place: (data >> shift & mask) << place, in multiplications."""
    for j in range(symbols.size):
        bits = uint16(uint16(uint16(data[j]) * down) >> uint16(8)) & mask
        symbols[j] = symbols[j] | uint16(bits * factor)


@kernel
def _add_symbols(symbols, units, phases, scale, base, total):
    for j in range(total.size):
        y = uint16(units[j] + phases[j])
        z = int32((uint32(symbols[j]) << uint32(16)) | uint32(y))
        total[j] += float32(z) * scale + base


@kernel
def _planes(body, first, planes, c, symbols):
    """Add the raw bits of the coordinates from c on: byte j of a plane holds coordinates j, j + length, ..."""
    n = symbols.size
    for p in range(planes.shape[0]):
        width, place, at, length = planes[p, 0], planes[p, 1], planes[p, 2], planes[p, 3]
        done = 0
        while done < n:
            turn, j = divmod(c + done, length)
            count = min(n - done, length - j)
            place_in = first + at + j
            down, mask = uint16(256 >> (turn * width)), uint16((1 << width) - 1)
            _raw(body[place_in : place_in + count], down, mask, uint16(1 << place), symbols[done : done + count])
            done += count


@kernel
def _constants(half, centre, levels):
    """Give the step and the value of z = 0, as `fpld.codecs.channel` has them."""
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
    noise,
    weights,
    noise_of,
    words,
    units,
):
    """Decode the contexts from `row` on and add them to `total`, node by node in order.

    `noise` and `weights` take differences from coordinate to coordinate of what is constant over a run of them.
    """
    x, symbols = np.empty(LANES, np.uint16), np.empty(LANES, np.uint16)
    for r in range(total.shape[0]):
        drawn = -1
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
            raw = planes[bounds[ell, 2] : bounds[ell, 3]]
            for g in range(bounds[ell, 0], bounds[ell, 1]):
                start, lanes, width = groups[g, 0], groups[g, 1], groups[g, 2]
                digit, count, at = groups[g, 3], groups[g, 4], first + groups[g, 5]
                for d in range(count):
                    levels = radices[digit + d] << low
                    _, _, variance = _constants(halves[k, r], centres[k, r], levels)
                    noise_of[k] += lanes * variance
                    begin, end = start + d * lanes, start + (d + 1) * lanes
                    if r < noise.shape[0]:
                        noise[r, begin] += variance
                        noise[r, end] -= variance
                    if weighted:
                        weight = 1.0 / max(variance, 1e-30)
                        weights[r, begin] += weight
                        weights[r, end] -= weight
                for s in range(0, lanes, LANES):
                    n = min(LANES, lanes - s)
                    lane = x[:n]
                    if width == 16:
                        _load(lane, body[at + s : at + s + n], body[at + lanes + s : at + lanes + s + n])
                    elif width == 8:
                        x[0] = uint16(body[at]) << uint16(8)
                    else:
                        lane[:] = 0
                    for d in range(count):
                        radix = radices[digit + d]
                        step, base, variance = _constants(halves[k, r], centres[k, r], radix << low)
                        if weighted:
                            step /= max(variance, 1e-30)
                            base /= max(variance, 1e-30)
                        c = start + d * lanes + s
                        o = (c + turn) & _TURN
                        scale, offset = float32(step / 65536.0), float32(base)
                        if raw.shape[0] == 0:
                            _add_digits(
                                lane, uint32(radix), units[c : c + n], own[o : o + n], scale, offset, out[c : c + n]
                            )
                        else:
                            part = symbols[:n]
                            _digits(lane, uint16(radix), uint16(1 << low), part)
                            _planes(body, first, raw, c, part)
                            _add_symbols(part, units[c : c + n], own[o : o + n], scale, offset, out[c : c + n])


@kernel
def _extremes(row):
    """Give the smallest and largest float as integers in the order of the floats: infinities and NaN stand out."""
    least, most = int32(0x7FFFFFFF), int32(-0x80000000)
    for v in range(row.size):
        key = int32(row[v] ^ (int32(row[v] >> int32(31)) & int32(0x7FFFFFFF)))
        least, most = int32(min(least, key)), int32(max(most, key))
    return least, most


@kernel
def _half_unit(value):
    """Give the distance of float16 numbers around a value."""
    _, exponent = math.frexp(value)
    return 2.0 ** (max(exponent - 1, -14) - 10)


@kernel
def _range(least, most, floats, keys):
    """Give centre and half-range as float16 numbers, the range rounded up: as `fpld.codecs.channel` has them."""
    keys[0] = least ^ ((least >> int32(31)) & int32(0x7FFFFFFF))
    keys[1] = most ^ ((most >> int32(31)) & int32(0x7FFFFFFF))
    bottom, top = float(floats[0]), float(floats[1])
    middle = (top + bottom) / 2
    unit = _half_unit(middle)
    centre = np.rint(middle / unit) * unit
    reach = max(top - centre, centre - bottom)
    unit = _half_unit(reach)
    return centre, np.ceil(reach / unit) * unit


@kernel
def _quantize(values, centre, slope, offset, top, units, phases, symbols):
    for j in range(symbols.size):
        f = (values[j] - centre) * slope + offset
        f = min(max(f, float32(0)), top)
        y = uint16(units[j] + phases[j])
        symbols[j] = uint16(uint32(uint32(int32(f)) + (uint32(65535) - uint32(y))) >> uint32(16))


@kernel
def _append_values(number, radix, values, centre, slope, offset, top, units, phases):
    """Quantize values and append their symbols as digits."""
    for j in range(values.size):
        f = (values[j] - centre) * slope + offset
        f = min(max(f, float32(0)), top)
        y = uint16(units[j] + phases[j])
        digit = uint32(uint32(int32(f)) + (uint32(65535) - uint32(y))) >> uint32(16)
        number[j] = uint32(number[j] * radix + digit)


@kernel
def _append(number, radix, factor, symbols):
    """Append the upper part of each symbol as a digit: number * radix + symbol / 2^low."""
    for j in range(symbols.size):
        high = uint32(uint32(symbols[j]) * factor) >> uint32(16)
        number[j] = uint32(number[j] * radix + high)


@kernel
def _store(number, ratio, lower, upper):
    """Write the least fraction that decodes to these digits: ceil(number 2^16 / product), exact in float64."""
    if ratio == 1.0:
        for j in range(lower.size):
            lower[j] = uint8(number[j])
            upper[j] = uint8(number[j] >> uint32(8))
        return
    for j in range(lower.size):
        word = int32(np.ceil(float(number[j]) * ratio - 2.0**-20))
        lower[j] = uint8(word)
        upper[j] = uint8(word >> int32(8))


@kernel
def _put_raw(symbols, down, mask, up, data):
    for j in range(symbols.size):
        bits = uint16(uint16(uint32(uint32(symbols[j]) * down) >> uint32(16)) & mask)
        data[j] = data[j] | uint8(bits * up)


@kernel
def encode(
    logits, bits, clip, limit, low, groups, radices, planes, keys, phases, words, units, floats, integers, ranges, out
):
    """Quantize and pack rows of logits into `out` [rows, size]; give the row that cannot be coded, or -1.

    Without a clip (0) each row's centre and half-range go to `ranges`. `bits` are the logits' bits, and `integers`
    those of `floats`, two of them.
    """
    vocab = logits.shape[1]
    symbols, number = np.empty(vocab, np.uint16), np.zeros(LANES, np.uint32)
    for r in range(logits.shape[0]):
        least, most = _extremes(bits[r])
        if most >= INFINITE or least <= -INFINITE - 1:
            return r
        centre, half = 0.0, clip
        if clip == 0:
            centre, half = _range(least, most, floats, integers)
            if abs(floats[0]) > limit or abs(floats[1]) > limit:
                return r
            ranges[r, 0], ranges[r, 1] = centre, half
        _words(keys[r], words)
        turn = int(keys[r, 3]) & _TURN
        data, values = out[r], logits[r]
        for g in range(groups.shape[0]):
            start, lanes, width = groups[g, 0], groups[g, 1], groups[g, 2]
            digit, count, at = groups[g, 3], groups[g, 4], groups[g, 5]
            for s in range(0, lanes, LANES):
                n = min(LANES, lanes - s)
                part, product = number[:n], 1.0
                for d in range(count):
                    radix = radices[digit + d]
                    levels = radix << low
                    slope = float32(0) if half == 0 else float32(65536.0 * (levels - 1) / (2.0 * half))
                    offset, top = float32((levels - 1) * 32768.0 + 0.5), float32((levels - 1) * 65536.0)
                    c = start + d * lanes + s
                    o = (c + turn) & _TURN
                    channel = float32(centre), slope, offset, top, units[c : c + n], phases[o : o + n]
                    if planes.shape[0] == 0:
                        _append_values(part, uint32(radix if d else 0), values[c : c + n], *channel)
                    else:
                        _quantize(values[c : c + n], *channel, symbols[c : c + n])
                        _append(part, uint32(radix if d else 0), uint32(65536 >> low), symbols[c : c + n])
                    product *= radix
                if width == 16:
                    first = at + s
                    _store(part, 65536.0 / product, data[first : first + n], data[first + lanes : first + lanes + n])
                elif width == 8:
                    data[at] = uint8(np.ceil(float(part[0]) * (256.0 / product) - 2.0**-20))
        for p in range(planes.shape[0]):
            wide, place, at, length = planes[p, 0], planes[p, 1], planes[p, 2], planes[p, 3]
            data[at : at + length] = 0
            for i in range(8 // wide):
                begin, end = i * length, min((i + 1) * length, vocab)
                if begin < end:
                    down, mask, up = uint32(65536 >> place), uint16((1 << wide) - 1), uint16(1 << (wide * i))
                    _put_raw(symbols[begin:end], down, mask, up, data[at : at + end - begin])
    return -1
