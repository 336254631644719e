"""The aggregator's side of a run, whatever the engine: open a round, close it, distil, checkpoint.

An engine carries the tasks of an open round to the nodes and their frames back: `Federation.advance` is a round with
the two calls of an engine in it. An engine with a loop of its own, as Flower's, makes the same steps: `open`,
`deliver` for each frame, `close`, `finish`.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from fpld import students
from fpld.codecs import ArrayPrior
from fpld.errors import InputError, QuorumError
from fpld.federation import jobs
from fpld.federation.prepare import base_file, student_options
from fpld.federation.progress import Progress
from fpld.protocol import Aggregator, Budget, Settings
from fpld.protocol.wire import OVERHEAD
from fpld.registry import codecs
from fpld.seeds import derive_key, derive_seed
from fpld.storage.folder import RunFolder
from fpld.types import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Executor

    from fpld.config import Config
    from fpld.federation.prepare import Public
    from fpld.protocol import Combined, Receipt, Task
    from fpld.storage.folder import Arrays

CHECKPOINT = "checkpoint.safetensors"
_STUDENT = "student/"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a federation: the student's weights, and one line of trace for each round."""

    student: Arrays
    trace: list[dict[str, Any]]

    @property
    def uplink_bytes(self) -> int:
        """Return all bytes that nodes sent: payload, headers and checksums."""
        return sum(line["payload_bytes"] + line["overhead_bytes"] for line in self.trace)


class Heldout(NamedTuple):
    """A student's loss in nats per token on each node's held-out text (None: no answer), and bytes per token."""

    losses: Sequence[float | None]
    bytes_per_token: float | None


class Engine(Protocol):
    """What moves bytes between the aggregator and its nodes."""

    def collect(self, tasks: Mapping[int, Task], deliver: Callable[[int, bytes], Receipt]) -> list[str]:
        """Let the nodes do their tasks, deliver each frame as it comes; return who did not answer, and why."""

    def evaluate(self, student: Arrays) -> Heldout:
        """Evaluate the student on the nodes' held-out texts."""


def settings(config: Config, prepared: Public, mac_keys: Mapping[int, bytes]) -> Settings:
    """Turn a configuration into the aggregator's settings; bits per probe context from here on."""
    vocab, contexts = prepared.vocab, prepared.probe.contexts
    clips = [node.clip for node in config.nodes]
    probe = bytes.fromhex(prepared.probe.digest)
    codec = codecs.get(config.codec.name)
    key = derive_key(config.run.seed)
    floors, caps = [], []
    for index, node in enumerate(config.nodes):
        plan = Plan(
            run_key=key, round=0, node=index, probe=probe, contexts=contexts, vocab=vocab, bits=1.0, clip=node.clip
        )
        cap = node.bits * vocab if node.bits is not None else (node.uplink or 0.0) * config.budget.deadline / contexts
        least = codec.least_bits(plan)
        if cap < least:
            raise InputError(
                f"node {node.name!r} may send {cap / vocab:.3g} bits per coordinate a round, the codec "
                f"{config.codec.name!r} needs {least / vocab:.3g}: raise its bits or uplink, or use fewer contexts"
            )
        floors.append(least)
        caps.append(cap)
    weights = None
    if any(node.weight is not None or node.clip is not None for node in config.nodes):
        weights = np.array(
            [node.weight if node.weight is not None else (node.clip or 1.0) ** 2 for node in config.nodes]
        )
    budget = Budget(
        caps=np.array(caps),
        floors=np.array(floors),
        vocab=vocab,
        total=None if config.budget.total is None else config.budget.total * vocab,
        allocator=config.budget.allocator,
        weights=weights,
        estimator=config.budget.estimator,
        warmup=config.budget.warmup,
        forget=config.budget.forget,
    )
    budget.bits(1, None)  # an infeasible total is an error now, not after the first round's training
    return Settings(
        names=[node.name for node in config.nodes],
        run_key=key,
        probe=probe,
        contexts=contexts,
        vocab=vocab,
        rounds=config.run.rounds,
        budget=budget,
        clips=clips,
        codec=config.codec.name,
        rule=config.combine.rule,
        against=config.codec.against,
        stratified=config.codec.dither == "stratified",
        quorum=config.run.quorum or len(config.nodes),
        mac_keys=mac_keys,
    )


class Federation:
    """One federation in a folder of the run; `advance` does a round and checkpoints it.

    `pool` does the aggregator's own heavy work; `mac_keys` are the keys that frames of node i must be made with.
    """

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        prepared: Public,
        name: str,
        *,
        pool: Executor,
        report: Callable[[str], None],
        mac_keys: Mapping[int, bytes] | None = None,
    ) -> None:
        self.config, self.run, self.prepared, self.name = config, run, prepared, name
        self.pool, self.report = pool, report
        self.store = RunFolder(run.path / name)
        self.aggregator = Aggregator(settings(config, prepared, mac_keys or {}))
        names = self.aggregator.settings.names
        self.progress = Progress(self.store, names, config.run.rounds, config.run.deadline)
        self.trace: list[dict[str, Any]] = []
        self.student: Arrays = students.read_state(run.path / base_file(config, None))
        self.target: np.ndarray[Any, Any] | None = None
        self._clock = Clock()
        self._line: dict[str, Any] = {}
        if self.store.has(CHECKPOINT):
            self._restore()

    @property
    def done(self) -> bool:
        """Return whether all rounds are closed."""
        return self.aggregator.round >= self.config.run.rounds

    @property
    def names(self) -> Sequence[str]:
        """Return the nodes' names, by their numbers."""
        return self.aggregator.settings.names

    def advance(self, engine: Engine) -> dict[str, Any]:
        """Do one round and return its line of the trace."""
        tasks = self.open()
        self.close(engine.collect(tasks, self.deliver))
        return self.finish(engine.evaluate(self.student))

    def open(self) -> dict[int, Task]:
        """Begin the next round: return the task of each node."""
        self._clock = Clock()
        prior = self._prior(self.pool)
        if self.config.combine.broadcast == "weights":
            tasks = self.aggregator.open("weights", self.student, prior)
        elif self.target is None:
            tasks = self.aggregator.open("none", {}, prior)
        else:
            tasks = self.aggregator.open("logits", {"logits": self.target}, prior)
        self.progress.open(self.aggregator.round, [bits / self.prepared.vocab for bits in self.aggregator.bits])
        self._say(f"local training at {len(tasks)} nodes")
        return tasks

    def deliver(self, node: int, data: bytes) -> Receipt:
        """Take a frame that came over a node's channel."""
        receipt = self.aggregator.frame(node, data)
        self.progress.answered(node, receipt.verdict, receipt.reason, len(data))
        why = f" ({receipt.reason})" if receipt.reason else ""
        self._say(f"{self.names[node]} {receipt.verdict}{why}; {len(self.aggregator.missing)} nodes to come")
        return receipt

    def close(self, absent: Sequence[str]) -> Combined:
        """End the collecting, combine and distil; `absent` says who did not answer, and why."""
        for reason in absent:
            self.progress.missing(reason)
            self._say(reason)
        try:
            self.aggregator.close()
        except QuorumError as error:
            raise QuorumError("; ".join([str(error), *absent])) from None
        self._clock.lap("local")
        self.progress.phase("combining")
        self._say("decoding and combining")
        combined = self.aggregator.combine()
        self._clock.lap("combine")
        self.progress.phase("distilling")
        self._say("distilling the student")
        self.student, divergence = self.pool.submit(jobs.distill, *self._distillation(combined.target)).result()
        # m * V numbers: kept only to be sent
        self.target = None if self.config.combine.broadcast == "weights" else combined.target
        self._clock.lap("distill")
        self._line = self._summary(combined, divergence) | {"absent": sorted(absent)}
        self.progress.phase("evaluating")
        return combined

    def finish(self, heldout: Heldout) -> dict[str, Any]:
        """End the round with what the student is worth; checkpoint, and return the round's line of the trace."""
        self._clock.lap("evaluate")
        known = [loss for loss in heldout.losses if loss is not None]
        loss = float(np.mean(known)) if known else None
        size = heldout.bytes_per_token
        line = self._line | {
            "heldout_loss": loss,
            "heldout_by_node": list(heldout.losses),
            "heldout_bits_per_byte": None if loss is None or size is None else loss / np.log(2) / size,
            "seconds": {**self._clock.laps, "nodes": self.progress.seconds},
        }
        self.aggregator.distilled()
        self.trace.append(line)
        self._checkpoint()
        self.progress.phase("closed")
        said = "nobody evaluated the student" if loss is None else f"held-out loss {loss:.4f} nats per token"
        self.report(f"round {line['round']}: {said}")
        return line

    def _say(self, text: str) -> None:
        self.report(f"round {self.aggregator.round}: {text}")

    def _prior(self, pool: Executor) -> ArrayPrior | None:
        """Return the last student's prediction of the probe set, if the codec codes against one."""
        if not codecs.get(self.config.codec.name).traits.prior:
            return None
        base, kind = str(self.run.path / base_file(self.config, None)), self.config.student["kind"]
        predicted = pool.submit(jobs.predict, base, kind, self.student, str(self.run.path / "probe.json")).result()
        return ArrayPrior(predicted)

    def outcome(self) -> Outcome:
        """Return the result so far."""
        return Outcome(self.student, self.trace)

    def _distillation(self, target: np.ndarray[Any, Any]) -> tuple[Any, ...]:
        config, round = self.config, self.aggregator.round
        options = {
            "steps": config.distill.steps,
            "rate": config.distill.rate_in(round, config.run.rounds),
            "seed": derive_seed(config.run.seed, "distill", round),
            "public_weight": config.distill.public_weight,
        }
        public = str(self.run.path / "public.safetensors") if config.distill.public_weight > 0 else None
        base, kind = str(self.run.path / base_file(config, None)), config.student["kind"]
        return base, kind, self.student, str(self.run.path / "probe.json"), target, options, public

    def _summary(self, combined: Combined, divergence: float) -> dict[str, Any]:
        vocab, contexts = self.prepared.vocab, self.prepared.probe.contexts
        sent = self.aggregator.sent
        weights = self.aggregator.weights
        refused = [r for r in self.aggregator.receipts if r.round == self.aggregator.round and r.verdict == "refused"]
        return {
            "round": self.aggregator.round,
            "nodes": [self.names[node] for node in combined.nodes],
            "bits_allotted": [bits / vocab for bits in self.aggregator.bits],
            "bits_sent": [8 * sent.get(node, 0) / (contexts * vocab) for node in range(len(self.names))],
            "payload_bytes": sum(sent.values()),
            "overhead_bytes": OVERHEAD * len(sent),
            "node_bytes": [sent[node] + OVERHEAD if node in sent else 0 for node in range(len(self.config.nodes))],
            "weights": None if weights is None else weights.tolist(),
            "noise": [
                float(self.aggregator.noise[node]) if node in sent else None for node in range(len(self.config.nodes))
            ],
            "kl": divergence,
            "bandwidth_upper": combined.upper,
            "bandwidth_lower": combined.lower,
            "refused": [f"{self.names[r.node]}: {r.reason}" for r in refused],
        }

    def _checkpoint(self) -> None:
        arrays, meta = self.aggregator.state()
        arrays.update({_STUDENT + name: value for name, value in self.student.items()})
        if self.config.combine.broadcast == "logits" and self.target is not None:
            arrays["target"] = self.target
        self.store.write_arrays(CHECKPOINT, arrays, {**meta, "trace": self.trace})
        lines = "".join(json.dumps(line) + "\n" for line in self.trace)
        self.store.write("trace.jsonl", lines.encode())

    def _restore(self) -> None:
        arrays, meta = self.store.read_arrays(CHECKPOINT)
        self.student = {name.removeprefix(_STUDENT): a for name, a in arrays.items() if name.startswith(_STUDENT)}
        self.target = arrays.get("target")
        self.trace = meta["trace"]
        self.aggregator.restore(arrays, meta)


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """Note the time since the last lap."""
        now = time.monotonic()
        self.laps[name] = round(now - self._last, 3)
        self._last = now


def evaluation(config: Config, run: RunFolder, state: Arrays | None, index: int | None = None) -> tuple[Any, ...]:
    """Return the arguments of an evaluation job."""
    kind = student_options(config, index)["kind"]
    base = str(run.path / base_file(config, index))
    return base, kind, state, str(run.path / "heldout.safetensors"), config.probe.length


def float32_variant(config: Config) -> Config:
    """Return the same federation with raw float32 logits: what FedMD and FedDF average."""
    nodes = [node.model_copy(update={"bits": 32.0, "uplink": None, "clip": None}) for node in config.nodes]
    return config.model_copy(
        update={
            "nodes": nodes,
            "codec": config.codec.model_copy(update={"name": "float32", "against": "nothing"}),
            "budget": config.budget.model_copy(update={"total": None}),
        }
    )
