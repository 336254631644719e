"""Token sequences as bytes: an adaptive context-mixing coder in integer arithmetic.

A node that sends text sends it in this form. A token id is coded bit by bit, from the most significant one. Each bit is
predicted by four adaptive models: one knows only the bits of the token before it, the others also the last one, two or
three tokens of the sequence. Their predictions are mixed in the logistic domain (Mahoney, *Adaptive weighing of context
models for lossless data compression*, 2005), and the mixed probability goes to the range coder:

    p = squash(sum_j w_j stretch(p_j))        stretch(p) = ln(p / (1 - p)),  squash its inverse
    w_j += rate (bit - p) stretch(p_j)

The weights are chosen by how often the models of one, two and three tokens have been used, so that a model is trusted
when it has seen its context. It differs from the textbook in that all of it is integers, in tables that are written
down here: encoder and decoder are two machines, and must compute the same. Nothing is learnt beforehand, so no end
needs a text or a model to read a message. On text that the demonstration's models write it takes 6.3 to 6.7 bits per
token, where the prediction of the model that they started from takes 6.0 to 6.3.

The first token of each sequence is not coded: both ends know it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld import validation
from fpld.codecs import rangecoder
from fpld.codecs.rangecoder import RATES
from fpld.errors import BudgetError, FrameError, InputError
from fpld.kernels import borrowing_kernel, inlined

if TYPE_CHECKING:
    from fpld.types import Array, Tokens

# 65536 / (1 + exp(-x)), rounded, for x from -12 to 12 in quarters. Written down, so that no machine's exp() matters.
# fmt: off
_LOGISTIC = np.array([
    0, 1, 1, 1, 1, 1, 2, 2, 3, 4, 5, 6, 8, 10, 13, 17, 22, 28, 36, 47, 60, 77, 98, 126, 162, 208, 267, 342, 439, 562,
    720, 922, 1179, 1506, 1921, 2446, 3108, 3938, 4971, 6249, 7812, 9702, 11955, 14595, 17625, 21025, 24743, 28693,
    32768, 36843, 40793, 44511, 47911, 50941, 53581, 55834, 57724, 59287, 60565, 61598, 62428, 63090, 63615, 64030,
    64357, 64614, 64816, 64974, 65097, 65194, 65269, 65328, 65374, 65410, 65438, 65459, 65476, 65489, 65500, 65508,
    65514, 65519, 65523, 65526, 65528, 65530, 65531, 65532, 65533, 65534, 65534, 65535, 65535, 65535, 65535, 65535,
    65536,
], np.int64)
# fmt: on

_UNITS_PER_NAT = 256  # of a stretched probability
_MAX_STRETCHED = 12 * _UNITS_PER_NAT - 1
_UNITS_PER_ENTRY = 64  # of `_LOGISTIC`
_CODED_BITS = 16
_MIN_PROBABILITY = 24  # in 2^-16: no bit is ever certain

_ORDERS = 4  # models, of contexts with 0 to 3 tokens
_INITIAL_WEIGHT = 1 << 15  # in 2^-16
_LEARNING_RATE = 6
_LEARNING_SHIFT = 18
_MAX_TABLE_BITS = 22
_ENTRIES_PER_BIT = 4  # of a table, for each bit that is coded: fewer collide more often

# The classes of how often a model was used, by which weights are chosen: up to these uses, for one, two, three tokens.
_CLASS_ENDS = np.array([[0, 3, 19], [0, 2, 11], [0, 2, 255]], np.int64)
_CLASSES = 4
_HALF = 1 << (rangecoder.PROBABILITY_BITS - 1)


class TextModel(NamedTuple):
    """Hold the adaptive models and the weights by which they are mixed.

    `models` [4, size] are packed as those of the range coder are; an entry that was never used is 0. `weights`
    [classes, 4] are in 2^-16. The others are room: the hashes of the last tokens, and one bit's entries and inputs.
    """

    models: Array
    weights: Array
    contexts: Array
    places: Array
    inputs: Array


def new_model(tokens: int, vocab: int) -> TextModel:
    """Return the models for a text of so many tokens, before the first."""
    bits = max(_ENTRIES_PER_BIT * tokens * (vocab - 1).bit_length(), 1 << 10).bit_length()
    return TextModel(
        np.zeros((_ORDERS, 1 << min(bits, _MAX_TABLE_BITS)), np.int32),
        np.full((_CLASSES**3, _ORDERS), _INITIAL_WEIGHT, np.int64),
        np.zeros(_ORDERS, np.int64),
        np.zeros(_ORDERS, np.int64),
        np.zeros(_ORDERS, np.int64),
    )


def encode_tokens(sequences: Tokens, vocab: int, *, capacity: int) -> bytes:
    """Encode sequences [S, T] of token ids, but for the first of each; raise `BudgetError` beyond `capacity` bytes.

    >>> data = encode_tokens(np.array([[1, 2, 3, 2, 3, 2, 3]]), 1024, capacity=100)
    >>> decode_tokens(data, np.array([1]), 7, 1024).tolist()
    [[1, 2, 3, 2, 3, 2, 3]]
    """
    ids = _checked(sequences, vocab)
    coder = rangecoder.writer(capacity, np.zeros(1, np.int32))
    _code(coder, new_model(ids.size, vocab), ids, _width(vocab), vocab)
    length = rangecoder.finish(coder)
    if length < 0:
        raise BudgetError(
            f"text of {ids.shape[0]} x {ids.shape[1]} tokens must fit into {capacity} bytes, and does not"
        )
    return coder.data[:length].tobytes()


def decode_tokens(data: bytes | memoryview, first: Tokens, length: int, vocab: int) -> Tokens:
    """Decode as many sequences as there are first tokens, `length` tokens each; raise `FrameError` for other bytes."""
    ids = np.zeros((len(first), length), np.int32)
    ids[:, 0] = first
    coder = rangecoder.reader(rangecoder.as_code(data), np.zeros(1, np.int32))
    sound = _code(coder, new_model(ids.size, vocab), ids, _width(vocab), vocab) and rangecoder.at_end(coder)
    if not sound:
        raise FrameError("the text's code is not one: it is cut or changed, or of another number of sequences")
    return ids


def _checked(sequences: Tokens, vocab: int) -> Tokens:
    ids = np.asarray(sequences)
    if ids.ndim != 2 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise InputError(f"sequences must be token ids of shape (sequences, length), got {ids.dtype} {ids.shape}")
    validation.integer("vocab", vocab, least=2)
    if ids.min() < 0 or ids.max() >= vocab:
        raise InputError(f"sequences must hold ids of 0 to {vocab - 1}, got {ids.min()} to {ids.max()}")
    return ids.astype(np.int32)


def _width(vocab: int) -> int:
    """Return the bits of a token id."""
    return (vocab - 1).bit_length()


@inlined
def _squash(x: Any) -> Any:
    """Return the probability of a stretched one, in 2^-16."""
    y = min(max(x, -_MAX_STRETCHED - 1), _MAX_STRETCHED) + _MAX_STRETCHED + 1
    at = y // _UNITS_PER_ENTRY
    rest = y % _UNITS_PER_ENTRY
    return (_LOGISTIC[at] * (_UNITS_PER_ENTRY - rest) + _LOGISTIC[at + 1] * rest) // _UNITS_PER_ENTRY


def _stretch_table() -> Array:
    """Return the stretched probabilities of (p + 1/2) / 4096: the largest ones whose probability is no larger."""
    levels = np.array([_squash_plain(x) for x in range(-_MAX_STRETCHED - 1, _MAX_STRETCHED + 1)])
    wanted = (np.arange(1 << 12) << 4) + 8
    return np.searchsorted(levels, wanted, side="right") - 1 - (_MAX_STRETCHED + 1)


def _squash_plain(x: int) -> int:
    at, rest = divmod(x + _MAX_STRETCHED + 1, _UNITS_PER_ENTRY)
    return int((_LOGISTIC[at] * (_UNITS_PER_ENTRY - rest) + _LOGISTIC[at + 1] * rest) // _UNITS_PER_ENTRY)


_STRETCH = _stretch_table().astype(np.int64)
_STRETCH_SHIFT = rangecoder.PROBABILITY_BITS - 12


@inlined
def _hashed(a: Any, b: Any) -> Any:
    """Mix two numbers below 2^31 into one; no product leaves 63 bits, so plain Python computes the same."""
    x = a * 0x2545F491 + b * 0x1E35A7BD
    x = ((x ^ (x >> 31)) & 0x7FFFFFFF) * 0x2C1B3C6D
    return (x ^ (x >> 29)) & 0x7FFFFFFF


@inlined
def _use_class(order: Any, uses: Any) -> Any:
    """Return the class of how often the model of `order` tokens was used."""
    ends = _CLASS_ENDS[order - 1]
    if uses <= ends[0]:
        return 0
    if uses <= ends[1]:
        return 1
    return 2 if uses <= ends[2] else 3


@inlined
def _code_token(coder: Any, model: Any, contexts: Any, width: Any, token: Any) -> Any:
    """Write or read a token id, from its most significant bit; return it. `contexts` are hashes of the last tokens."""
    models = model.models
    places = model.places
    inputs = model.inputs
    mask = models.shape[1] - 1
    prefix = np.int64(1)
    for k in range(width - 1, -1, -1):
        row = np.int64(0)
        for order in range(_ORDERS):
            place = _hashed(contexts[order], prefix) & mask
            places[order] = place
            packed = np.int64(models[order, place])
            uses = packed & ((1 << rangecoder.COUNT_BITS) - 1)
            inputs[order] = 0 if uses == 0 else _STRETCH[(packed >> rangecoder.COUNT_BITS) >> _STRETCH_SHIFT]
            if order > 0:
                row = row * _CLASSES + _use_class(order, uses)
        weights = model.weights[row]
        mixed = np.int64(0)
        for order in range(_ORDERS):
            mixed += weights[order] * inputs[order]
        p = min(max(_squash(mixed >> 16), _MIN_PROBABILITY), (1 << _CODED_BITS) - _MIN_PROBABILITY)
        bit = rangecoder.code_decision(coder, p, (token >> k) & 1)
        error = (bit << _CODED_BITS) - p
        for order in range(_ORDERS):
            change = inputs[order] * error * _LEARNING_RATE
            weights[order] += (change + (1 << (_LEARNING_SHIFT - 1))) >> _LEARNING_SHIFT
            packed = np.int64(models[order, places[order]])
            uses = packed & ((1 << rangecoder.COUNT_BITS) - 1)
            learnt = packed >> rangecoder.COUNT_BITS if uses else np.int64(_HALF)
            if bit:
                learnt += ((1 << rangecoder.PROBABILITY_BITS) - learnt) * RATES[uses] >> 16
            else:
                learnt -= learnt * RATES[uses] >> 16
            models[order, places[order]] = learnt << rangecoder.COUNT_BITS | min(uses + 1, rangecoder.MAX_COUNT)
        prefix = prefix << 1 | bit
    return prefix - (1 << width)


@borrowing_kernel
def _code(coder: Any, model: Any, ids: Any, width: Any, vocab: Any) -> Any:
    """Write or read all sequences in place; return whether every token is one of the vocabulary."""
    contexts = model.contexts
    for row in range(ids.shape[0]):
        last = np.int64(ids[row, 0]) + 1
        second = np.int64(0)
        third = np.int64(0)
        for t in range(1, ids.shape[1]):
            contexts[0] = 0
            contexts[1] = _hashed(last, np.int64(1))
            contexts[2] = _hashed(contexts[1], second + 2)
            contexts[3] = _hashed(contexts[2], third + 3)
            token = _code_token(coder, model, contexts, width, np.int64(ids[row, t]))
            if token >= vocab:
                return False
            ids[row, t] = token
            third = second
            second = last
            last = token + 1
    return True
