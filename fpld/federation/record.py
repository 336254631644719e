"""The record of a round: one typed class for a line of `trace.jsonl`, and what it is put together from.

The federation makes a `RoundRecord` when it closes a round, and every reader (report, page, planner, export, front
door) gets the same class back. The JSON keys are the fields, in their order. No result depends on a record: it is what
a person reads.

`Traffic` counts the bytes of a round's messages by node and kind, in both directions. Down: `weights` (the student's,
packed), `prior` (notes on its prediction, or blocks of it), `tables` (of a codec that learns), `labels` (combined
logits, where they are broadcast), `files` (probe set, tokenizer, base model: once). Up, the payload of a frame:
`labels`, on written contexts too, `text` (what a node wrote, with its notes on rounding) or `updates`; and `answers`
(held-out losses). Both: `overhead` (what `fpld` adds: headers, orders, checksums) and `transport` (what the engine's
own records add to a message; connections are not in it). `text` and `updates` are missing where nobody sent any; in
folders of earlier versions `labels` counts both.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter

from fpld.units import show_count
from fpld.validation import printable, shortened_list

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fpld.protocol import Task
    from fpld.protocol.messages import Broadcast
    from fpld.types import Ints

DOWNLINK_KINDS = ("weights", "prior", "tables", "labels", "files", "overhead", "transport")
UPLINK_KINDS = ("labels", "text", "updates", "answers", "overhead", "transport")
_SENT_IF_ALLOWED = ("text", "updates")
MEANS = ("heldout_loss", "heldout_bits_per_byte", "heldout_sites")
"""The fields of a record that `with_means` fills in; later rounds may change them."""

_NAMED_NODES = 5  # nodes that one line names
_MAX_SAMPLE_CHARACTERS = 4000
_READING = ConfigDict(extra="ignore", allow_inf_nan=False)


@dataclass(frozen=True, order=True, slots=True)
class Incident:
    """A frame or an answer that was refused, or a node that gave no frame: whose, what it was, and why.

    A frame is `refused`. A node without one was `absent` when the round began, `busy` with an earlier round, its work
    `failed`, it was too `late`, or the connection was `lost`.

    >>> str(Incident("north", "late", "no answer within 9 s"))
    'north: late: no answer within 9 s'
    """

    node: str
    state: str
    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable(self.reason))  # it may be a node's own text

    def __str__(self) -> str:
        return f"{self.node}: {self.state}: {self.reason}"


class Heldout(NamedTuple):
    """A student's loss in nats per token on each node's held-out text (None: no answer), and bytes per token.

    `refused` are the answers that could not be used.
    """

    losses: Sequence[float | None]
    bytes_per_token: float | None
    refused: Sequence[Incident] = ()


def _incident(value: Any) -> Any:
    """Take the one text that folders of earlier versions have as the reason, and no node as the node ""."""
    if isinstance(value, str):
        return {"node": "", "state": "", "reason": value}
    return {"node": "", "state": "", **value} if isinstance(value, dict) else value


ReadIncident = Annotated[Incident, BeforeValidator(_incident)]
SampleCharacters = Annotated[str, Field(max_length=_MAX_SAMPLE_CHARACTERS)]


@dataclass(frozen=True, slots=True)
class SampleText:
    """A few public words, and how the student of a round continues them."""

    prompt: SampleCharacters
    text: SampleCharacters


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A closed round: a line of `trace.jsonl`.

    Lists have an entry for each node of the federation, in the order of their numbers; `nodes` names those whose
    frames were combined. Bits are per coordinate. A field that nobody measured is None. Fields with a default may be
    missing in folders of earlier versions. `written` is how many contexts each node wrote itself, if nodes do. `asked`
    names the nodes that had a task, if not all had.
    """

    __pydantic_config__ = _READING

    round: int
    nodes: list[str]
    bits_allotted: list[float]
    bits_sent: list[float]
    payload_bytes: int
    overhead_bytes: int
    node_bytes: list[int] = field(default_factory=list)
    weights: list[float] | list[list[float]] | None = None
    trust: list[float] | None = None
    curves: list[list[float]] | None = None
    noise: list[float | None] = field(default_factory=list)
    kl: float | None = None
    gain: float | None = None
    bandwidth_upper: float | None = None
    bandwidth_lower: float | None = None
    conditions: dict[str, bool] | None = None
    refused: list[ReadIncident] = field(default_factory=list)
    absent: list[ReadIncident] = field(default_factory=list)
    heldout_by_node: list[float | None] = field(default_factory=list)
    heldout_bytes_per_token: float | None = None
    downlink: dict[str, int] = field(default_factory=dict)
    uplink: dict[str, int] = field(default_factory=dict)
    node_downlink_bytes: list[int] = field(default_factory=list)
    downlink_bytes: int = 0
    student_bytes: int = 0
    continuations: list[SampleText] = field(default_factory=list)
    seconds: dict[str, float | list[float | None]] = field(default_factory=dict)
    heldout_loss: float | None = None
    heldout_bits_per_byte: float | None = None
    heldout_sites: list[str] | None = None
    written: list[int] | None = None
    asked: list[str] | None = None

    @classmethod
    def from_json(cls, value: str | bytes | Mapping[str, Any]) -> RoundRecord:
        """Read a line of the trace, or the object that it holds.

        Raises
        ------
        ValueError
            Naming the key, if the value is not a record.
        """
        reader = _reader()
        return reader.validate_json(value) if isinstance(value, str | bytes) else reader.validate_python(value)

    def to_json(self) -> dict[str, Any]:
        """Return the object that a line of the trace holds."""
        line = dataclasses.asdict(self)
        for name in ("written", "asked"):
            if line[name] is None:
                del line[name]  # as in folders of earlier versions
        return line

    @property
    def sent(self) -> int:
        """Return all bytes that nodes sent in the round."""
        return self.payload_bytes + self.overhead_bytes

    @property
    def node_weights(self) -> list[float] | None:
        """Return a weight for each node, if weights are what was estimated (and not curves, of two numbers each)."""
        return [weight for weight in self.weights or [] if isinstance(weight, float)] or None

    @property
    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase."""
        return {name: value for name, value in self.seconds.items() if isinstance(value, float)}

    @property
    def answers(self) -> list[float | None]:
        """Return the seconds after which each node answered; empty if not recorded."""
        return self._node_seconds("nodes")

    @property
    def work(self) -> list[float | None]:
        """Return the seconds for which each node was at work, without its wait for a worker; empty if not recorded."""
        return self._node_seconds("work")

    def _node_seconds(self, name: str) -> list[float | None]:
        values = self.seconds.get(name)
        return values if isinstance(values, list) and any(value is not None for value in values) else []


@cache
def _reader() -> TypeAdapter[RoundRecord]:
    return TypeAdapter(RoundRecord)


def common_sites(losses: Sequence[Sequence[float | None]]) -> list[int]:
    """Return the sites that evaluated every round that anybody evaluated, from the losses by round and site.

    >>> common_sites([[3.0, 1.0], [2.0, None]])
    [0]
    """
    evaluated = [by_site for by_site in losses if any(loss is not None for loss in by_site)]
    if not evaluated:
        return []
    return [site for site in range(len(evaluated[0])) if all(by_site[site] is not None for by_site in evaluated)]


def with_means(trace: Sequence[RoundRecord], names: Sequence[str]) -> list[RoundRecord]:
    """Return the records of a trace with the mean loss over the sites that all rounds have, and these sites' names.

    A site that misses a round leaves the mean of all: rounds would else differ by who answered. Where no site is left,
    or nobody evaluated a round, the mean is None. Where rounds ask a part of the nodes, each has the mean over the
    sites that evaluated it: they are a sample.
    """
    if any(record.asked is not None for record in trace):
        by_round = [[site for site, loss in enumerate(r.heldout_by_node) if loss is not None] for r in trace]
    else:
        by_round = [common_sites([record.heldout_by_node for record in trace])] * len(trace)
    return [
        _with_mean(record, sites, [names[site] for site in sites])
        for record, sites in zip(trace, by_round, strict=True)
    ]


def _with_mean(record: RoundRecord, sites: Sequence[int], names: list[str]) -> RoundRecord:
    losses = [loss for site in sites if (loss := record.heldout_by_node[site]) is not None]
    mean = float(np.mean(losses)) if losses else None
    size = record.heldout_bytes_per_token
    bits = None if mean is None or size is None else mean / float(np.log(2)) / size
    return dataclasses.replace(record, heldout_loss=mean, heldout_bits_per_byte=bits, heldout_sites=names)


def describe_absences(trace: Sequence[RoundRecord]) -> str:
    """Return which nodes taught nothing in how many rounds, and why, those with most first; "" if there are none.

    >>> record = RoundRecord(1, [], [], [], 0, 0, absent=[Incident("south", "late", "no answer within 9 s")])
    >>> describe_absences([record])
    'south in 1 of 1 round (late: no answer within 9 s)'
    """
    absences: dict[str, list[Incident]] = {}
    for record in trace:
        for incident in (*record.absent, *record.refused):
            if incident.node and incident.node not in record.nodes:
                absences.setdefault(incident.node, []).append(incident)
    ordered = sorted(absences.items(), key=lambda item: (-len(item[1]), item[0]))
    texts = []
    for node, incidents in ordered:
        last = incidents[-1]
        rounds = show_count(len(trace), "round")
        texts.append(f"{node} in {len(incidents)} of {rounds} ({last.state}: {last.reason})")
    return shortened_list(texts, _NAMED_NODES)


def best_round(losses: Sequence[Sequence[float | None]]) -> int:
    """Return the index of the round with the lowest mean held-out loss over `common_sites`; the last of ties.

    Where there is no such site, it is the last round.

    >>> best_round([[3.0, None], [3.5, 1.0]])
    0
    """
    sites = common_sites(losses)
    if not sites:
        return len(losses) - 1
    chosen = [[by_site[site] for site in sites] for by_site in losses]
    means = [math.inf if None in values else float(np.mean(np.array(values, float))) for values in chosen]
    return len(means) - 1 - int(np.argmin(means[::-1]))


class Traffic:
    """Count bytes of a round's messages."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self.clear()

    def clear(self) -> None:
        """Begin a round."""
        self._down = np.zeros((self._nodes, len(DOWNLINK_KINDS)), np.int64)
        self._up = np.zeros((self._nodes, len(UPLINK_KINDS)), np.int64)

    def add(self, node: int, sizes: Mapping[str, int], *, up: bool = False) -> None:
        """Count a message."""
        counts, kinds = (self._up, UPLINK_KINDS) if up else (self._down, DOWNLINK_KINDS)
        for kind, size in sizes.items():
            counts[node, kinds.index(kind)] += size

    def added_to(self, record: RoundRecord) -> RoundRecord:
        """Return a record with all that was counted added to what it says."""
        before = record.node_downlink_bytes or [0] * self._nodes
        nodes = [old + new for old, new in zip(before, self._down.sum(axis=1).tolist(), strict=True)]
        up = _sums(record.uplink, UPLINK_KINDS, self._up)
        return dataclasses.replace(
            record,
            downlink=_sums(record.downlink, DOWNLINK_KINDS, self._down),
            uplink={kind: size for kind, size in up.items() if size or kind not in _SENT_IF_ALLOWED},
            node_downlink_bytes=nodes,
            downlink_bytes=sum(nodes),
        )


def _sums(before: Mapping[str, int], kinds: Sequence[str], counts: Ints) -> dict[str, int]:
    """Return the bytes of all nodes by kind, added to those that were counted before."""
    sums = zip(kinds, counts.sum(axis=0).tolist(), strict=True)
    return {kind: before.get(kind, 0) + size for kind, size in sums}


def array_kinds(arrays: Mapping[str, int], broadcast: Broadcast) -> dict[str, int]:
    """Return the bytes of a task's arrays, given by their names, by kind."""
    sizes = dict.fromkeys(DOWNLINK_KINDS, 0)
    for name, size in arrays.items():
        sizes[_array_kind(name, broadcast)] += size
    return sizes


def task_kinds(task: Task, size: int) -> dict[str, int]:
    """Return the bytes of a task by kind; `size` are those that it takes in all."""
    sizes = array_kinds({name: array.nbytes for name, array in task.all_arrays().items()}, task.broadcast)
    sizes["overhead"] = size - sum(sizes.values())
    return sizes


def _array_kind(name: str, broadcast: Broadcast) -> str:
    if name.startswith(("plan.prior", "notes.", "sent.")):
        return "prior"
    if name == "plan.learnt":
        return "tables"
    return "labels" if broadcast == "logits" else "weights"


def round_row(record: RoundRecord, sent: int) -> dict[str, Any]:
    """Return the numbers of a round as one flat row; `sent` are the bytes of all rounds up to it."""
    return {
        "round": record.round,
        "answered": len(record.nodes),
        "heldout_loss": record.heldout_loss,
        "kl": record.kl,
        "gain": record.gain,
        "bandwidth_lower": record.bandwidth_lower,
        "bandwidth_upper": record.bandwidth_upper,
        "round_bytes": record.sent,
        "all_bytes": sent,
        "downlink_bytes": record.downlink_bytes,
        **{f"down_{kind}": record.downlink.get(kind) or None for kind in DOWNLINK_KINDS},
        **{f"up_{kind}": record.uplink.get(kind) or None for kind in UPLINK_KINDS},
        "seconds": round(sum(record.phases.values()), 3),
    }


def node_rounds(record: RoundRecord, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the numbers of a round as one flat row for each node."""
    return [
        {
            "round": record.round,
            "node": name,
            "answered": name in record.nodes,
            "bits_allotted": entry_of(record.bits_allotted, i),
            "bits_sent": entry_of(record.bits_sent, i),
            "bytes": entry_of(record.node_bytes, i),
            "weight": entry_of(record.node_weights, i),
            "heldout_loss": entry_of(record.heldout_by_node, i),
            "seconds": entry_of(record.answers, i),
        }
        for i, name in enumerate(names)
    ]


def entry_of(values: Sequence[Any] | None, index: int) -> Any:
    """Return an entry of a list that may be shorter, or may not be there: then None."""
    return values[index] if values and index < len(values) else None
