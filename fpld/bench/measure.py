"""What a codec does to a scene at a budget: KL and error of the mean, bits really sent, speed."""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from fpld.bench.limit import Limit
from fpld.bench.mixture import Mixture, chances_of
from fpld.codecs import decode, encode
from fpld.errors import InputError
from fpld.numerics import centre, kl
from fpld.seeds import derive_key
from fpld.types import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

    from fpld.bench.contenders import Contender
    from fpld.bench.scenes import Floats32, Scene

Row = dict[str, Any]
T = TypeVar("T")
COLUMNS = (
    "scene",
    "codec",
    "bits",
    "context_bits",
    "bits_sent",
    "kl",
    "mse",
    "noise",
    "slope",
    "slope_se",
    "encode_ratio",
    "decode_ratio",
    "above_limit",
)
LIMIT = "limit"  # the row of what reverse water-filling says
_BLOCK = 1 << 20  # coordinates at a time


class Left(NamedTuple):
    """A codec that cannot meet a budget, and why."""

    scene: str
    codec: str
    bits: float
    reason: str


class _Passed(NamedTuple):
    """The nodes' logits after the codec: their sum, and that of probabilities, the bytes sent, and three times.

    These are seconds of encode, of decode and of a plain sum.
    """

    total: Floats32
    chances: Floats32
    sent: int
    encode: float
    decode: float
    add: float


def measure(
    scene: Scene, contenders: Sequence[Contender], budgets: Sequence[float], seed: int, tick: Callable[[], None]
) -> tuple[list[Row], list[Left]]:
    """Send the scene through every codec at every budget (bits per coordinate); say who was left out.

    `kl` is KL(softmax(mean of the nodes' logits) || softmax(mean of what is decoded)), averaged over contexts; `mse`
    is the mean square of the same error, rows centred. Speeds are in coordinates per second, over that of numpy's
    `acc += x` in float32, timed in turn with them on the same logits: medians over the nodes. `above_limit` is how many
    more bits per coordinate were sent than reverse water-filling needs for that kl; the limit has rows of its own.
    `noise`, `slope` and `slope_se` are of the mean target (`Mixture`).
    """
    limit, mixture = Limit(scene), Mixture(scene)
    true = scene.logits.mean(axis=0, dtype=np.float64)
    rows: list[Row] = []
    left: list[Left] = []
    for bits in budgets:
        for contender in contenders:
            try:
                passed = _send(scene, contender, bits, seed)
            except InputError as error:
                left.append(Left(scene.name, contender.name, bits, str(error)))
            else:
                divergence, square = _compare(true, passed.total / np.float32(scene.nodes))
                sent = 8 * passed.sent / scene.logits.size
                ratios = passed.add / passed.encode, passed.add / passed.decode
                above = sent - limit.bits(max(divergence, 1e-300))
                asked = scene.name, contender.name, bits, bits * scene.shape[1], sent
                errors = divergence, square, *mixture.errors(passed.chances / np.float32(scene.nodes))
                rows.append(dict(zip(COLUMNS, (*asked, *errors, *ratios, above), strict=True)))
            tick()
        if not any(row["bits"] == bits for row in rows):
            continue
        known = {"scene": scene.name, "codec": LIMIT, "bits": bits, "context_bits": bits * scene.shape[1]}
        known |= {"bits_sent": bits, "kl": limit.kl(bits), "above_limit": 0.0}
        rows.append({column: known.get(column) for column in COLUMNS})
    return rows, left


def _send(scene: Scene, contender: Contender, bits: float, seed: int) -> _Passed:
    contexts, vocab = scene.shape
    total, chances, scratch = (np.zeros(scene.shape, np.float32) for _ in range(3))
    sent = 0
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
        chances += chances_of(decoded)
        sent += len(payload)
    return _Passed(total, chances, sent, median(encodes), median(decodes), median(adds))


def _seconds(act: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = act()
    return time.perf_counter() - start, result


def _compare(true: np.ndarray[Any, np.dtype[np.float64]], mean: Floats32) -> tuple[float, float]:
    """Return KL and centred mean square error, averaged over contexts, a block of contexts at a time."""
    divergence, square = 0.0, 0.0
    stride = max(_BLOCK // true.shape[1], 1)
    for start in range(0, len(true), stride):
        part = true[start : start + stride]
        error = centre(mean[start : start + stride] - part)
        divergence += float(kl(part, error).sum())
        square += float(np.square(error).sum())
    return divergence / len(true), square / true.size


def draw(rows: Sequence[Row], figure: FigureBase) -> None:
    """Draw KL and the noise of the mean target over bits sent: a column for each scene and a line for each codec."""
    scenes = list(dict.fromkeys(row["scene"] for row in rows))
    panels = figure.subplots(2, len(scenes), squeeze=False)
    for column, scene in enumerate(scenes):
        for axes, (name, label) in zip(panels[:, column], _DRAWN.items(), strict=True):
            _lines(rows, scene, name, axes)
            axes.set(title=scene, xlabel="bits sent per coordinate", ylabel=label, xscale="log", yscale="log")
            axes.grid(alpha=0.3, which="both")
    panels[0, -1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


_DRAWN = {"kl": "KL (nats)", "noise": "noise of the mean target"}


def _lines(rows: Sequence[Row], scene: str, column: str, axes: Axes) -> None:
    for index, name in enumerate(dict.fromkeys(row["codec"] for row in rows)):
        found = [(r["bits_sent"], r[column]) for r in rows if (r["scene"], r["codec"]) == (scene, name)]
        points = sorted({point for point in found if point[1] is not None and min(point) > 0})
        marker = "osv^Dx+*<>"[index % 10]
        if points and name == LIMIT:
            axes.plot(*zip(*points, strict=True), color="black", linestyle="--", label="limit (independent nodes)")
        elif points:
            line = "-" if index < 10 else ":"  # ten colours are not enough
            axes.plot(*zip(*points, strict=True), line, marker=marker, color=f"C{index % 10}", label=name)
