"""The mixture rule in loops: what `fpld.rules.mixture` does node by node, at a fraction of the cost.

Every inner loop runs over contiguous float32 numbers and vectorises. Sums go over a fixed number of lanes, so they do
not depend on the machine's vectors, nor on how contexts are cut into blocks.
"""

import numpy as np
from numba import float32, int32, uint64

from fpld.compiled import kernel

LANES = 1024
_LOWEST = -87.0  # below, exp is not a normal float32: taken as exp(-87), which is nothing beside 1
_MAGNITUDE = 0x7FFFFFFF


@kernel
def _exp(x):
    """Return exp(x) for x <= 0 to 1e-7 of its value: 2^n times a polynomial (Cephes' expf) on the rest."""
    x = max(x, float32(_LOWEST))
    n = np.floor(x * float32(1.44269504) + float32(0.5))
    r = (x - n * float32(0.693359375)) - n * float32(-2.12194440e-4)
    p = float32(1.9875691500e-4) * r + float32(1.3981999507e-3)
    p = p * r + float32(8.3334519073e-3)
    p = p * r + float32(4.1665795894e-2)
    p = p * r + float32(1.6666665459e-1)
    p = p * r + float32(5.0000001201e-1)
    p = p * (r * r) + r + float32(1.0)
    return p * np.int32((int32(n) + int32(127)) << int32(23)).view(np.float32)


@kernel
def _extremes(row):
    """Return the smallest and the largest of a row: floats as integers in their order, since those vectorise."""
    least, most = int32(_MAGNITUDE), int32(-_MAGNITUDE - 1)
    for v in range(row.size):
        bits = np.float32(row[v]).view(np.int32)
        key = int32(bits ^ (int32(bits >> int32(31)) & int32(_MAGNITUDE)))
        least, most = int32(min(least, key)), int32(max(most, key))
    return _float(least), _float(most)


@kernel
def _float(key):
    return np.int32(key ^ (int32(key >> int32(31)) & int32(_MAGNITUDE))).view(np.float32)


@kernel
def _exponentials(logits, row, start, n, high, lanes):
    for j in range(n):
        e = _exp(logits[start + j] - high)
        row[start + j] = e
        lanes[j] += e


@kernel
def _unbiased(values, bias, out):
    """Take a context's bias [1 or V] out of its values."""
    if bias.size == 1:
        shift = bias[0]
        for j in range(out.size):
            out[j] = values[j] - shift
    else:
        for j in range(out.size):
            out[j] = values[j] - bias[j]


@kernel
def add(values, bias, weight, small, total, top):
    """Add a node's probabilities [rows, V] by its weight to `total`; the bias of its logits is [1 or rows, 1 or V].

    `top` takes the largest logarithm, but only in contexts where some probability is below exp(`small`): what is larger
    can be read off the sum.
    """
    vocab = values.shape[1]
    logits, row, lanes = np.empty(vocab, np.float32), np.empty(vocab, np.float32), np.empty(LANES, np.float32)
    for r in range(values.shape[0]):
        _unbiased(values[r], bias[min(r, bias.shape[0] - 1)], logits)
        least, most = _extremes(logits)
        lanes[:] = 0
        for c in range(0, vocab, LANES):
            _exponentials(logits, row, uint64(c), uint64(min(LANES, vocab - c)), most, lanes)
        whole = lanes.sum()
        _accumulate(row, float32(weight) / whole, total[r])
        logarithm = float32(most + np.log(whole))
        if least - logarithm < small:
            _highest(logits, float32(logarithm - np.log(weight)), top[r])


@kernel
def _accumulate(row, share, total):
    for j in range(total.size):
        total[j] += row[j] * share


@kernel
def _highest(logits, logarithm, top):
    for j in range(top.size):
        top[j] = max(top[j], logits[j] - logarithm)
