"""What a federation is: its setup, which does not change, and its state between two rounds.

`Setup` has the configuration, the folders, the budget, the settings of the protocol and the identity. A federation
survives a crash, since the checkpoint is the state.

The checkpoint before it is kept, and used if the newest is damaged. The trace stands beside it, one record a round. It
is written first: a record whose round has no checkpoint is of a round that never ended, and is dropped when the run
goes on. The checkpoint holds a digest of the records up to its round. Where nodes evaluate a round's student only with
their next task, the round's record is not whole yet: the checkpoint itself holds it, until their losses are there.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld import students
from fpld.budget.limits import Uplinks, senders
from fpld.budget.policy import Budget, usual_allocator
from fpld.codecs.prior import FINE_GRID, coarse_grid
from fpld.codecs.updates import update_bytes
from fpld.config import parse_config
from fpld.config.paths import absolute_paths
from fpld.data import load_tokenizer
from fpld.data.label_space import TokenStrings, space_digest
from fpld.data.places import PlaceProbe, round_probe
from fpld.errors import BudgetError, InputError
from fpld.federation.record import MEANS, RoundRecord
from fpld.node.labels import ProbeFiles
from fpld.node.spec import base_file, tokenizer_number
from fpld.protocol.aggregator import AggregatorState, Settings, blank_state
from fpld.protocol.updates import UPDATES, count_weights, payload_bits, update_limits
from fpld.protocol.wire import OVERHEAD_BYTES
from fpld.protocol.written import least_bits
from fpld.seeds import derive_key, derive_seed
from fpld.storage.arrays import load_checkpoint, read_arrays, write_checkpoint
from fpld.storage.files import canonical_json, parse_json, read_utf8
from fpld.storage.run_folder import CHECKPOINT, CONFIG, PROBE, PUBLIC, TOKENIZER, TRACE, RunFolder, numbered
from fpld.types import MAX_BITS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Executor

    from fpld.codecs.prior import PriorGrid
    from fpld.config import Config
    from fpld.config.sections import RunSection
    from fpld.data import ProbeSet
    from fpld.federation.prepare import Public
    from fpld.types import Arrays, Floats32

# Keys of the checkpoint: prefix of the student's arrays, the target, the digest of the trace, and a record that waits
# for its held-out losses.
_STUDENT = "student/"
_TARGET = "target"
_TRACE_DIGEST = "trace"
_PENDING = "pending"
_FORMER_LIMIT = 4_000_000  # bytes: what data.limit and probe.limit were where they were not given


@dataclass(frozen=True, eq=False, slots=True)
class Setup:
    """What does not change in a federation, which has a folder `store` of its own in that of the run.

    `pool` does the aggregator's own heavy work.
    """

    config: Config
    run: RunFolder
    store: RunFolder
    settings: Settings
    pool: Executor

    @property
    def base(self) -> Path:
        """Return the file of the student before the first round."""
        return self.run.path / base_file(self.config, None)

    @property
    def method(self) -> str:
        """Return the federation's name in the run."""
        return self.store.path.name

    @property
    def identity(self) -> str:
        """Name the federation by all that it comes from: its key, its configuration, its probe set."""
        # Tables that a configuration does not have are left out: runs of earlier versions, without them, go on.
        config = self._named_config()
        absent = {name for name in ("written", "send", "labels") if getattr(config, name) is None}
        tables = config.model_dump(mode="json", exclude=absent)
        del tables["run"]["track"]  # no result depends on trackers
        # Likewise a key without a value stands for the default that it had in these.
        for name in ("data", "probe"):
            tables[name]["limit"] = tables[name]["limit"] or _FORMER_LIMIT
        for table in (tables, *tables["nodes"]):
            if table["student"] is not None:
                table["student"]["device"] = table["student"]["device"] or "cpu"
        parts = {
            "name": self.method,
            "config": tables,
            "probe": self.settings.probe.hex(),
        }
        return hashlib.blake2b(
            canonical_json(parts), key=self.settings.run_key, digest_size=32, person=b"fpld federation"
        ).hexdigest()

    def _named_config(self) -> Config:
        """Return the configuration that names the run: that of an earlier version has its paths as they were kept."""
        if self.run.has(CONFIG):
            kept = read_utf8(self.run.path / CONFIG)
            if absolute_paths(kept, Path.cwd()) != kept:
                return parse_config(kept, CONFIG)
        return self.config

    def asked(self, round: int) -> list[int]:
        """Return the numbers of the nodes that a round asks, in order."""
        return asked_nodes(self.config.run, len(self.settings.names), round)

    @property
    def grid(self) -> PriorGrid:
        """Return the grid of the prior: coarse where nodes write text and send notes on its rounding."""
        return coarse_grid(self.settings.vocab) if self.settings.written else FINE_GRID

    @property
    def strings(self) -> ProbeFiles | None:
        """Return the files by which a worker sees the student over strings; None with labels over tokens."""
        return ProbeFiles(self.run.path / PROBE, self.run.path / TOKENIZER) if self.config.over_strings else None

    def probe(self, round: int) -> ProbeSet | PlaceProbe:
        """Return the probe set of a round."""
        public = self.run.path / PUBLIC if self.config.probe.fresh else None
        return round_probe(self.run.path / PROBE, public, self.config.run.seed, round)


def label_spaces(config: Config, run: RunFolder, public: Public) -> list[bytes]:
    """Return the digest of the maps of each node and the student, as its plans have it; none over tokens."""
    if not isinstance(public.probe, PlaceProbe):
        return []
    maps = []
    for number, tokens in enumerate(public.vocabularies):
        path = run.path / numbered(TOKENIZER, number)
        maps.append(public.probe.read(TokenStrings(load_tokenizer(path, vocab=tokens))).space)
    return [space_digest(maps[tokenizer_number(config, node)], maps[0]) for node in range(len(config.nodes))]


def asked_nodes(run: RunSection, nodes: int, round: int) -> list[int]:
    """Return which of so many nodes a round asks, in order: the part `[run] fraction`, drawn by the run's seed.

    Each node has a number of 63 bits for each round; those with the least ones are asked.

    >>> from fpld.config.sections import RunSection
    >>> [asked_nodes(RunSection(fraction=0.3), 10, round) for round in (1, 2)]
    [[5, 6, 8], [1, 4, 7]]
    """
    if run.fraction is None:
        return list(range(nodes))
    drawn = sorted(range(nodes), key=lambda node: (derive_seed(run.seed, "asked", round, node), node))
    return sorted(drawn[: run.asked(nodes)])


def protocol_settings(
    config: Config,
    public: Public,
    mac_keys: Mapping[int, bytes],
    run_key: bytes | None,
    weights: int = 0,
    spaces: Sequence[bytes] = (),
) -> Settings:
    """Turn a configuration into the aggregator's settings; bits per probe context from here on.

    Without a key of its own, a run has one that follows from the seed: the same configuration gives the same bits.
    Where nodes send updates, a context is one of the `weights` of their models, and not of the probe set. `spaces` are
    those of `label_spaces`.
    """
    vocab = public.vocab
    contexts = public.probe.contexts
    if config.update_bits is None:
        budget = configured_budget(config, contexts=contexts + config.written_contexts, vocab=vocab)
    else:
        labelled = contexts + config.contexts_by_model  # as many as a node would label
        budget = update_budget(config, weights=weights, contexts=labelled, vocab=vocab)
    return Settings(
        names=[node.name for node in config.nodes],
        run_key=derive_key(config.run.seed) if run_key is None else run_key,
        probe=bytes.fromhex(public.probe.digest),
        contexts=contexts if config.update_bits is None else weights,
        vocab=vocab,
        rounds=config.run.rounds,
        budget=budget,
        clips=[node.clip for node in config.nodes],
        codec=config.codec.name if config.update_bits is None else UPDATES,
        rule=config.combine.rule,
        trim=config.combine.trim,
        against=config.codec.against,
        stratified=config.codec.dither == "stratified",
        quorum=config.run.quorum or config.run.asked(len(config.nodes)),
        mac_keys=mac_keys,
        written=config.written_contexts,
        spaces=spaces,
    )


def configured_budget(config: Config, *, contexts: int, vocab: int) -> Budget:
    """Return the budget of a run, in bits per probe context; one that is infeasible is an error before any training."""
    nodes = senders(config.nodes, vocab)
    text = least_bits(config.written_contexts)
    codec = config.codec.name
    limits = Uplinks(nodes, contexts, vocab, config.budget.deadline, codec, OVERHEAD_BYTES, text).feasible()
    budget = Budget(
        caps=np.minimum(limits.caps, MAX_BITS * vocab),
        floors=limits.floors,
        vocab=vocab,
        total=config.budget.bits(vocab),
        allocator=config.budget.allocator,
        weights=np.array([node.allocation_weight for node in nodes]),
        estimator=config.budget.estimator,
        warmup=config.budget.warmup,
        forget=config.budget.forget,
        usual=usual_allocator(config.codec.name),
    )
    budget.bits(1)
    return budget


def update_budget(config: Config, *, weights: int, contexts: int, vocab: int) -> Budget:
    """Return the budget of a run whose nodes send updates of so many weights, in bits per weight.

    A node's limit is one in bytes, whatever it sends: bits for each of the probe set's `contexts`, or what its link
    carries. Within it a node gets the configured bits per weight, or its share of a total: a weight's error falls as
    4^-bits, so Theorem 5 shares the total out as for dense labels, of one coordinate each.
    """
    asked = config.update_bits or 1.0
    nodes = senders(config.nodes, vocab)
    uplinks = Uplinks(nodes, contexts, vocab, config.budget.deadline, None, OVERHEAD_BYTES)
    limits = update_limits(uplinks, weights, asked)
    caps = limits.caps
    least = payload_bits(weights, 1)
    for index, (node, cap) in enumerate(zip(config.nodes, caps.tolist(), strict=True)):
        if cap < least:
            limit = next(name for name in ("bits", "context_bits", "uplink") if getattr(node, name) is not None)
            raise BudgetError(
                f"nodes[{index}].{limit}: {node.name!r} may send {weights * cap / 8:.0f} bytes a round, an update of "
                f"{weights} weights takes at least {update_bytes(weights, 1)}"
            )
    labels_total = config.budget.bits(vocab)
    total = None
    if labels_total is not None:
        total = min(labels_total * contexts / weights, float(caps.sum()))
        if total < least * len(caps):
            key = "total" if config.budget.context_total is None else "context_total"
            raise BudgetError(
                f"budget.{key}: all nodes together may send {math.floor(total * weights / 8)} bytes a round, updates "
                f"of {weights} weights take at least {update_bytes(weights, 1)} for each of {len(caps)} nodes"
            )
    return Budget(
        caps=caps,
        floors=limits.floors,
        vocab=1,
        total=total,
        allocator=config.budget.allocator,
        weights=np.array([node.allocation_weight for node in nodes]),
    )


@dataclass(frozen=True, eq=False, slots=True)
class State:
    """What the next round needs: the student, the aggregator's state, and what is broadcast besides.

    `target` are the combined logits of the last round, m * V numbers: kept only if they are broadcast.
    """

    student: Arrays
    aggregator: AggregatorState
    target: Floats32 | None = None

    @property
    def round(self) -> int:
        """Return how many rounds have ended."""
        return self.aggregator.round


class Recalled(NamedTuple):
    """What a checkpoint holds: a state, the records of its rounds, and the last one if it waits for its losses."""

    state: State
    trace: list[RoundRecord]
    pending: RoundRecord | None


def student_weights(config: Config, run: RunFolder) -> int:
    """Return how many weights the student of a run has that is prepared."""
    return count_weights(students.read_state(run.path / base_file(config, None)))


def initial_state(setup: Setup) -> State:
    """Return the state before the first round."""
    return State(students.read_state(setup.base), blank_state(setup.settings))


def commit(store: RunFolder, state: State, trace: Sequence[RoundRecord], *, run: str, pending: bool = False) -> None:
    """Write the trace up to the state's round, then the state of this run: with it the round has ended.

    `pending`: nobody has evaluated the student of the last record yet.
    """
    lines = [record.to_json() for record in trace]
    _write_trace(store, lines)
    meta = {**state.aggregator.meta, _TRACE_DIGEST: _digest(lines[:-1] if pending else lines)}
    if pending:
        meta[_PENDING] = lines[-1]
    arrays = {**state.aggregator.arrays, **{_STUDENT + name: value for name, value in state.student.items()}}
    if state.target is not None:
        arrays[_TARGET] = state.target
    write_checkpoint(store.path / CHECKPOINT, arrays, meta, run=run)


def recall(store: RunFolder, *, run: str | None) -> Recalled | None:
    """Return the last sound state that was committed in this run (None: whichever), if there is one.

    Where a record is pending the trace ends before it.
    """
    kept = load_checkpoint(store.path / CHECKPOINT, run=run)
    if kept is None:
        return None
    arrays, meta = kept
    digest = meta.pop(_TRACE_DIGEST, None)
    pending = meta.pop(_PENDING, None)
    student = {name.removeprefix(_STUDENT): arrays.pop(name) for name in list(arrays) if name.startswith(_STUDENT)}
    target = arrays.pop(_TARGET, None)
    state = State(student, AggregatorState(arrays, meta), target)
    lines = _read_trace(store, state.round - (pending is not None))
    if digest not in (None, _digest(lines)):
        raise InputError(f"{store.path / TRACE} is damaged: it is not the trace of {CHECKPOINT}; start the run again")
    if pending is not None:
        _write_trace(store, [*lines, pending])
    try:
        trace = [RoundRecord.from_json(line) for line in lines]
        return Recalled(state, trace, None if pending is None else RoundRecord.from_json(pending))
    except ValueError as error:
        raise InputError(f"{store.path / TRACE} is damaged ({error}): start the run again") from None


def read_student(path: Path) -> Arrays:
    """Return the student's weights of a checkpoint."""
    arrays, _ = read_arrays(path)
    return {name.removeprefix(_STUDENT): value for name, value in arrays.items() if name.startswith(_STUDENT)}


def _write_trace(store: RunFolder, lines: Sequence[Mapping[str, Any]]) -> None:
    store.write(TRACE, "".join(json.dumps(line) + "\n" for line in lines).encode())


def _read_trace(store: RunFolder, rounds: int) -> list[dict[str, Any]]:
    """Return the lines of the rounds that have ended; lines of others are dropped from the file too."""
    path = store.path / TRACE
    try:
        lines = [parse_json(line) for line in read_utf8(path).splitlines()]
        ended = [line for line in lines if line["round"] <= rounds]
        whole = [line["round"] for line in ended] == list(range(1, rounds + 1))
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} is damaged ({error}): start the run again") from None
    if not whole:
        raise InputError(f"{path} must have a line for each of rounds 1 to {rounds}: start the run again")
    if len(ended) < len(lines):
        _write_trace(store, ended)
    return ended


def _digest(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a digest of a trace without its means, which later rounds may change and which follow from the rest."""
    kept = [{name: value for name, value in line.items() if name not in MEANS} for line in lines]
    return hashlib.sha256(canonical_json(kept)).hexdigest()
