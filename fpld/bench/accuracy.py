"""Compare codecs on a scene: what arrives of the nodes' mean for the bits that are sent, and at what speed.

Who takes part: every registered codec, and peers that the caller brings along. Each sends the same logits of K nodes at
each budget that it can meet, and what is decoded is compared with the exact mean in two ways.

**The mean of logits.** `kl` is KL(softmax(mean of the nodes' logits) || softmax(mean of what is decoded)), averaged
over contexts; `mse` is the mean square of the same error, rows centred. Their limit is reverse water-filling over the
scene's coordinates, for nodes that code without each other (`RateLimit`).

**The mean target**, the mean of probabilities, which a student is distilled to. With p the exact mean, pi what both
ends hold before (the prior's probabilities, or equal ones where there is no prior) and t the mean of what is decoded:

    noise   mean over contexts of sum_v (t_v - p_v)^2: for an unbiased label the variance of the mean target
    slope   sum <t - pi, p - pi> / sum |p - pi|^2, over all contexts: how much of the way from pi to p arrives

An unbiased label has slope 1 but for chance, whatever its noise; `slope_se` is the standard error. A codec that leaves
out what is small, or sends it rounded towards the prior, is below 1: more contexts do not average that out.

Speeds are in coordinates per second, over that of numpy's `acc += x` in float32, timed in turn with them on the same
logits: medians over the nodes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from fpld.codecs.base import decode, encode
from fpld.codecs.prior import CLASS_OF, CLASSES, in_eighths, make_prior
from fpld.errors import InputError
from fpld.numerics import centre, kl, softmax, split
from fpld.paper.theory import rate_for, reverse_water_filling
from fpld.registry import codecs
from fpld.seeds import derive_key
from fpld.target import rounded_prediction
from fpld.types import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

    from fpld.bench.scenes import LogitScene
    from fpld.codecs.base import Codec
    from fpld.types import Decoded, Floats, Floats32, Reals

    Peers = Callable[[int], dict[str, Codec]]

Row = dict[str, Any]
T = TypeVar("T")

LIMIT = "limit"  # the row of what reverse water-filling says
_LIMIT_COORDINATES = 1 << 20  # that are enough to compute it
_BLOCK_COORDINATES = 1 << 20  # compared at a time
_FIGURES = {"kl": "KL (nats)", "noise": "noise of the mean target"}


@dataclass(frozen=True, slots=True)
class Contender:
    """Hold a codec that takes part, its name, and the fields of the plan that it is tried under.

    `stratified`: the nodes share a grid of the dither, as they do in a run.
    """

    name: str
    codec: Codec
    fields: dict[str, Any] = field(default_factory=dict)
    stratified: bool = False


def no_peers(nodes: int) -> dict[str, Codec]:  # noqa: ARG001  # the form of all peers
    """Return no peers."""
    return {}


def read_peers(module: str) -> Peers:
    """Return a module's function `peers(nodes)`, which returns codecs by name for a federation of so many nodes."""
    try:
        peers: Peers = import_module(module).peers
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"--peers must name a module with a function peers(nodes), got {module!r}: {error}") from None
    return peers


def scene_contenders(scene: LogitScene, peers: Peers = no_peers) -> list[Contender]:
    """List who takes part; the uniform codec does so twice, with a range for each context and with one clip."""
    registered = [_registered(name, codecs.get(name), scene) for name in codecs.names()]
    clip = float(max(np.abs(logits).max() for logits in scene.logits))
    one_clip = Contender("uniform-clip", codecs.get("uniform"), {"clip": max(clip, 1e-6)}, stratified=True)
    return [*registered, one_clip, *(Contender(name, codec) for name, codec in peers(scene.nodes).items())]


def _registered(name: str, codec: Codec, scene: LogitScene) -> Contender:
    """Return a codec with what a run would give it: a prior if the scene has one; if not, a slot of the dither.

    Sampled labels have both.
    """
    traits = codec.traits
    prior = {"prior": make_prior(scene.prior)} if traits.prior and scene.prior is not None else {}
    return Contender(name, codec, prior, stratified=traits.dither and (not prior or traits.sparse))


class RateLimit:
    """Compute the limit of a scene by reverse water-filling over its coordinates.

    Of a coordinate the limit knows what a codec may know: its class by the prior, the class's residual variance, and
    the weight that KL gives it. A code of Gaussian residuals with these variances cannot lose less at the same bits;
    errors of K nodes are taken to be independent. Real residuals have longer tails than Gaussian ones, and nodes that
    agree and share a grid of the dither do not err independently: so a codec can come out below.
    """

    def __init__(self, scene: LogitScene) -> None:
        every = max(scene.shape[0] * scene.shape[1] // _LIMIT_COORDINATES, 1)
        logits = scene.logits[:, ::every].astype(np.float64)
        weights = softmax(logits.mean(axis=0))
        if scene.prior is None:
            residuals = logits
            classes = np.zeros(weights.shape, np.int64)
        else:
            prior = scene.prior[::every].astype(np.float64)
            residuals = logits - prior
            classes = CLASS_OF[-in_eighths(prior)].astype(np.int64)
        # Softmax does not see a constant in a context, and the mean of a class is side information that costs nothing.
        residuals = residuals - residuals.mean(axis=-1, keepdims=True)
        count = np.maximum(np.bincount(classes.ravel(), minlength=CLASSES), 1)
        mean, square = (
            np.bincount(classes.ravel(), weights=part.ravel(), minlength=CLASSES) / count
            for part in (residuals.mean(axis=0), np.square(residuals).mean(axis=0))
        )
        variance = np.maximum(square - mean**2, 0)
        self.products: Floats = (weights * variance[classes]).ravel()
        self.scale = scene.shape[1] / (2 * scene.nodes)  # from the mean over coordinates to KL per context

    def kl(self, bits: float) -> float:
        """Return the least KL at so many bits per coordinate."""
        return self.scale * reverse_water_filling(self.products, bits)

    def bits(self, kl: float) -> float:
        """Return the least bits per coordinate for a KL."""
        return rate_for(self.products, kl / self.scale)


def decoded_probabilities(decoded: Decoded) -> Reals:
    """Return decoded probabilities: the codec's own, or the softmax of its logits with their bias taken out."""
    if decoded.probabilities is not None:
        return decoded.probabilities
    return softmax(decoded.values - decoded.bias, np.float32)


class MeanTarget:
    """Hold a scene's exact mean of probabilities, and those that both ends hold before."""

    def __init__(self, scene: LogitScene) -> None:
        self._mean = np.zeros(scene.shape, np.float32)
        for logits in scene.logits:
            self._mean += softmax(logits, np.float32) / np.float32(scene.nodes)
        self._before: Floats32 = (
            np.full((scene.shape[0], 1), 1 / scene.shape[1], np.float32)
            if scene.prior is None
            else rounded_prediction(scene.prior)
        )

    def errors(self, probabilities: Reals) -> tuple[float, float, float]:
        """Return noise, slope and the slope's standard error of a mean target [m, V]."""
        noise, along, length = (np.empty(len(probabilities)) for _ in range(3))
        for rows in split(*self._mean.shape):
            part = slice(rows.start, rows.stop)
            error = (probabilities[part] - self._mean[part]).astype(np.float64)
            change = (self._mean[part] - self._before[part]).astype(np.float64)
            noise[part] = np.square(error).sum(axis=1)
            along[part] = (error * change).sum(axis=1)
            length[part] = np.square(change).sum(axis=1)
        total = max(float(length.sum()), 1e-300)
        off = float(along.sum()) / total
        # A ratio of sums over contexts whose errors are independent.
        scatter = float(np.sqrt(np.square(along - off * length).sum())) / total
        return float(noise.mean()), 1 + off, scatter


class CodecRow(NamedTuple):
    """What a codec does to a scene at a budget; the limit has no speed and no mean target.

    `bits` is the budget per coordinate and `context_bits` that per context. `above_limit` is how many more bits per
    coordinate were sent than reverse water-filling needs for that `kl`. The others are as in the module's docstring.
    """

    scene: str
    codec: str
    bits: float
    context_bits: float
    bits_sent: float
    kl: float
    mse: float | None = None
    noise: float | None = None
    slope: float | None = None
    slope_se: float | None = None
    encode_ratio: float | None = None
    decode_ratio: float | None = None
    above_limit: float | None = None


COLUMNS = CodecRow._fields


class SkippedBudget(NamedTuple):
    """A budget that a codec cannot meet, and why."""

    scene: str
    codec: str
    bits: float
    reason: str


class _Sent(NamedTuple):
    """What arrives of all nodes: the sums of decoded logits and of probabilities, bytes, and three times in seconds."""

    total: Floats32
    probabilities: Floats32
    size: int
    encode: float
    decode: float
    add: float


class _Exact(NamedTuple):
    """What the rows of a scene are compared with: its exact mean logits and mean target, and its limit."""

    logits: Floats
    target: MeanTarget
    limit: RateLimit


def compare_codecs(
    scene: LogitScene, contenders: Sequence[Contender], budgets: Sequence[float], seed: int, tick: Callable[[], None]
) -> tuple[list[Row], list[SkippedBudget]]:
    """Send a scene through every codec at every budget.

    Parameters
    ----------
    budgets
        Bits per coordinate.
    seed
        Of the dither and of all draws.
    tick
        Called after each codec and budget.

    Returns
    -------
    The rows, with the columns of `CodecRow`, and the budgets that codecs cannot meet. After the codecs' rows of a
    budget comes that of the limit.
    """
    exact = _Exact(scene.logits.mean(axis=0, dtype=np.float64), MeanTarget(scene), RateLimit(scene))
    rows: list[CodecRow] = []
    skipped: list[SkippedBudget] = []
    for bits in budgets:
        for contender in contenders:
            try:
                sent = _send(scene, contender, bits, seed)
            except InputError as error:
                skipped.append(SkippedBudget(scene.name, contender.name, bits, str(error)))
            else:
                rows.append(_codec_row(scene, contender, bits, sent, exact))
            tick()
        if any(row.bits == bits for row in rows):
            rows.append(_limit_row(scene, bits, exact.limit))
    return [row._asdict() for row in rows], skipped


def _codec_row(scene: LogitScene, contender: Contender, bits: float, sent: _Sent, exact: _Exact) -> CodecRow:
    """Return the row of a codec at a budget, from what it sent."""
    divergence, square = _compare(exact.logits, sent.total / np.float32(scene.nodes))
    noise, slope, slope_se = exact.target.errors(sent.probabilities / np.float32(scene.nodes))
    bits_sent = 8 * sent.size / scene.logits.size
    return CodecRow(
        scene=scene.name,
        codec=contender.name,
        bits=bits,
        context_bits=bits * scene.shape[1],
        bits_sent=bits_sent,
        kl=divergence,
        mse=square,
        noise=noise,
        slope=slope,
        slope_se=slope_se,
        encode_ratio=sent.add / sent.encode,
        decode_ratio=sent.add / sent.decode,
        above_limit=bits_sent - exact.limit.bits(max(divergence, 1e-300)),
    )


def _limit_row(scene: LogitScene, bits: float, limit: RateLimit) -> CodecRow:
    """Return the row of the limit at a budget."""
    return CodecRow(
        scene=scene.name,
        codec=LIMIT,
        bits=bits,
        context_bits=bits * scene.shape[1],
        bits_sent=bits,
        kl=limit.kl(bits),
        above_limit=0.0,
    )


def _send(scene: LogitScene, contender: Contender, bits: float, seed: int) -> _Sent:
    contexts, vocab = scene.shape
    total, probabilities, scratch = (np.zeros(scene.shape, np.float32) for _ in range(3))
    size = 0
    encodes: list[float] = []
    decodes: list[float] = []
    adds: list[float] = []
    for node in range(scene.nodes):
        plan = Plan(
            run_key=derive_key(seed),
            round=1,
            node=node,
            probe=bytes(32),
            contexts=contexts,
            vocab=vocab,
            bits=bits * vocab,
            slot=node if contender.stratified else 0,
            slots=scene.nodes if contender.stratified else 1,
            **contender.fields,
        )
        logits = scene.logits[node]
        adds += [_seconds(partial(np.add, scratch, logits, out=scratch))[0] for _ in range(2)]
        seconds, payload = _seconds(partial(encode, contender.codec, logits, plan))
        encodes.append(seconds)
        adds += [_seconds(partial(np.add, scratch, logits, out=scratch))[0] for _ in range(2)]
        seconds, decoded = _seconds(partial(decode, contender.codec, payload, plan))
        decodes.append(seconds)
        total += decoded.values
        probabilities += decoded_probabilities(decoded)
        size += len(payload)
    return _Sent(total, probabilities, size, median(encodes), median(decodes), median(adds))


def _seconds(act: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = act()
    return time.perf_counter() - start, result


def _compare(exact: Floats, mean: Floats32) -> tuple[float, float]:
    """Return KL and centred mean square error, averaged over contexts, a block of contexts at a time."""
    divergence = 0.0
    square = 0.0
    stride = max(_BLOCK_COORDINATES // exact.shape[1], 1)
    for start in range(0, len(exact), stride):
        part = exact[start : start + stride]
        error = centre(mean[start : start + stride] - part)
        divergence += float(kl(part, error).sum())
        square += float(np.square(error).sum())
    return divergence / len(exact), square / exact.size


def draw_comparison(rows: Sequence[Row], figure: FigureBase) -> None:
    """Draw KL and the noise of the mean target over bits sent: a column for each scene and a line for each codec."""
    scenes = list(dict.fromkeys(row["scene"] for row in rows))
    panels = figure.subplots(2, len(scenes), squeeze=False)
    for column, scene in enumerate(scenes):
        for axes, (name, label) in zip(panels[:, column], _FIGURES.items(), strict=True):
            _draw_lines(rows, scene, name, axes)
            axes.set(title=scene, xlabel="bits sent per coordinate", ylabel=label, xscale="log", yscale="log")
            axes.grid(alpha=0.3, which="both")
    panels[0, -1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_lines(rows: Sequence[Row], scene: str, column: str, axes: Axes) -> None:
    for index, name in enumerate(dict.fromkeys(row["codec"] for row in rows)):
        pairs = [(r["bits_sent"], r[column]) for r in rows if (r["scene"], r["codec"]) == (scene, name)]
        points = sorted({pair for pair in pairs if pair[1] is not None and min(pair) > 0})
        marker = "osv^Dx+*<>"[index % 10]
        if points and name == LIMIT:
            axes.plot(*zip(*points, strict=True), color="black", linestyle="--", label="limit (independent nodes)")
        elif points:
            line = "-" if index < 10 else ":"  # ten colours are not enough
            axes.plot(*zip(*points, strict=True), line, marker=marker, color=f"C{index % 10}", label=name)
