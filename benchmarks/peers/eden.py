"""EDEN: a random rotation, the best scalar quantizer of a normal variable, and a scale that removes the bias.

After S. Vargaftik, R. Ben Basat, A. Portnoy, G. Mendelson, Y. Ben-Itzhak and M. Mitzenmacher, *EDEN:
communication-efficient and robust distributed mean estimation for federated learning*, ICML 2022. The rotation R is
Hadamard after random signs; Q takes each rotated coordinate, in units of their root mean square, to a Lloyd-Max
centroid; the row states S = |x|^2 / <Rx, Q>, and R^-1 (S Q) is x on average. (Exactly so for a uniform rotation. With
Hadamard's a bias remains whose square is a thousandth of the error's at 64 coordinates; from 256 up none is found.)

Budgets between whole bits: the first rotated coordinates take a bit more than the others (after a random rotation
none is special). Below one bit those others are not sent at all, which is the paper's sparsification.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.peers.rows import Bytes, Floats32, RowCodec, from_bits, pad, read_half, to_bits, write_half
from fpld.codecs.dither import Dither
from fpld.types import Decoded

if TYPE_CHECKING:
    from fpld.types import Plan

HEADER = 2  # the scale of a row, float16
MOST_BITS = 8


@dataclass(frozen=True)
class EdenCodec(RowCodec):
    """Rotate, quantize with b or b + 1 bits, scale; any budget from three bytes a row."""

    code: int = 32803

    def least_bytes(self, vocab: int) -> int:
        """Return the bytes of a header and eight coordinates."""
        return HEADER + 1

    def most_bytes(self, vocab: int) -> int:
        """Return the bytes at eight bits for each rotated coordinate."""
        return HEADER + _dimension(vocab) * MOST_BITS // 8

    def encode_rows(self, x: Floats32, plan: Plan, rows: range, size: int) -> Bytes:
        """State the scale, then the centroid of each rotated coordinate."""
        dimension = _dimension(plan.vocab)
        rotated = _hadamard(np.pad(x, ((0, 0), (0, dimension - plan.vocab))) * _signs(plan, rows, dimension))
        square = np.square(rotated).sum(axis=1, keepdims=True)
        unit = np.sqrt(square / dimension)
        rotated /= np.where(unit > 0, unit, 1)
        parts = []
        product = np.zeros_like(square)
        for columns, bits in _split(dimension, 8 * (size - HEADER)):
            part = rotated[:, columns]
            symbols = np.searchsorted(_boundaries(bits), part)
            product += (part * _centroids(bits)[symbols]).sum(axis=1, keepdims=True)
            parts.append(to_bits(symbols, bits))
        # In units of the root mean square: S = unit * d / <Rx / unit, Q>.
        scale = np.divide(unit * dimension, product, out=np.zeros_like(unit), where=product > 0)
        body = pad(np.packbits(np.concatenate(parts, axis=1), axis=1), size - HEADER)
        return np.concatenate([write_half(np.minimum(scale, np.finfo(np.float16).max)), body], axis=1)

    def decode_rows(self, data: Bytes, plan: Plan, rows: range) -> Decoded:
        """Rotate the scaled centroids back."""
        dimension = _dimension(plan.vocab)
        scale = read_half(data[:, :HEADER], least=0.0)
        bits = np.unpackbits(data[:, HEADER:], axis=1)
        rotated = np.zeros((len(data), dimension), np.float32)
        start = 0
        kept = 0.0
        for columns, width in _split(dimension, bits.shape[1]):
            count = columns.stop - columns.start
            symbols = from_bits(bits[:, start : start + count * width], width)
            rotated[:, columns] = _centroids(width)[symbols]
            start += count * width
            kept += count * _kept(width) / dimension
        rotated *= scale
        # E|S Q|^2 = |x|^2 / kept, and the error has 1 - kept of it.
        variance = (1 - kept) * np.square(rotated).mean(axis=1, keepdims=True)
        values = (_hadamard(rotated) * _signs(plan, rows, dimension))[:, : plan.vocab]
        return Decoded(values, variance, variance / 2)  # the error is about normal


def _dimension(vocab: int) -> int:
    return 1 << (vocab - 1).bit_length()


def _split(dimension: int, total: int) -> list[tuple[slice, int]]:
    """Return the columns that take b + 1 bits and those that take b; columns without bits are left out."""
    bits, more = divmod(total, dimension)
    parts = [(slice(0, more), bits + 1), (slice(more, dimension), bits)]
    return [(columns, width) for columns, width in parts if width and columns.stop > columns.start]


def _signs(plan: Plan, rows: range, dimension: int) -> Floats32:
    words = Dither.derive(plan.run_key, round=plan.round, node=plan.node).words(rows, -(-dimension // 32))
    octets = np.ascontiguousarray(words.astype("<u4")).view(np.uint8)
    bits = np.unpackbits(octets, axis=1)[:, :dimension]
    return np.array([-1, 1], np.float32)[bits]


def _hadamard(x: Floats32) -> Floats32:
    """Multiply rows [n, d] by the Hadamard matrix over sqrt(d), which is its own inverse."""
    count, dimension = x.shape
    left = dimension.bit_length() - 1
    while left:
        size = 1 << min(left, 6)
        # Multiply along the last axis of this size, and make it the first: after all of them the order is the old one.
        x = np.swapaxes(x.reshape(count, -1, size) @ _matrix(size), 1, 2).reshape(count, dimension)
        left -= min(left, 6)
    return x


@cache
def _matrix(size: int) -> Floats32:
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(math.sqrt(size))


@cache
def _centroids(bits: int) -> Floats32:
    """Return the Lloyd-Max centroids of a normal variable: each the mean of its cell, each boundary half-way."""
    normal = NormalDist()
    levels = 1 << bits
    spread = NormalDist(sigma=math.sqrt(3))  # the best density of centroids is the cube root of the normal's
    points = np.array([spread.inv_cdf((i + 0.5) / levels) for i in range(levels)])
    for _ in range(2000):
        edges = [-math.inf, *((points[1:] + points[:-1]) / 2).tolist(), math.inf]
        mass = np.diff([normal.cdf(edge) for edge in edges])
        moved = -np.diff([normal.pdf(edge) if math.isfinite(edge) else 0.0 for edge in edges]) / mass
        done = np.abs(moved - points).max() < 1e-5
        points = (moved - moved[::-1]) / 2
        if done:
            break
    return points.astype(np.float32)


@cache
def _boundaries(bits: int) -> Floats32:
    points = _centroids(bits)
    return (points[1:] + points[:-1]) * np.float32(0.5)


@cache
def _kept(bits: int) -> float:
    """Return E[Q^2], the share of a normal variable's variance that its centroids keep."""
    points = _centroids(bits).astype(np.float64)
    cdf = [0.0, *(NormalDist().cdf(float(edge)) for edge in _boundaries(bits)), 1.0]
    return float((np.diff(cdf) * points**2).sum())
