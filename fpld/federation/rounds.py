"""The aggregator's side of a run: open a round, let the nodes work, combine, distil, evaluate, checkpoint."""

from __future__ import annotations

import json
import time
from concurrent.futures import as_completed
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import students
from fpld.errors import InputError, QuorumError
from fpld.federation import jobs
from fpld.federation.prepare import base_file, student_options
from fpld.federation.progress import Progress
from fpld.federation.site import Site
from fpld.federation.store import RunFolder
from fpld.protocol import Aggregator, Budget, Settings
from fpld.registry import codecs
from fpld.seeds import derive_key, derive_seed
from fpld.types import Plan
from fpld.wire import OVERHEAD

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor, Future

    from fpld.config import Config
    from fpld.federation.prepare import Prepared
    from fpld.federation.store import Arrays
    from fpld.protocol import Task

CHECKPOINT = "checkpoint.safetensors"
_STUDENT = "student/"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a federation: the student's weights, and one line of trace for each round."""

    student: Arrays
    trace: list[dict[str, Any]]

    @property
    def uplink_bytes(self) -> int:
        """Give all bytes that nodes sent: payload, headers and checksums."""
        return sum(line["payload_bytes"] + line["overhead_bytes"] for line in self.trace)


def settings(config: Config, prepared: Prepared) -> Settings:
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
    )


class Federation:
    """One federation in a folder of the run; `advance` does a round and checkpoints it."""

    def __init__(self, config: Config, run: RunFolder, prepared: Prepared, name: str) -> None:
        self.config, self.run, self.prepared, self.name = config, run, prepared, name
        self.store = RunFolder(run.path / name)
        self.aggregator = Aggregator(settings(config, prepared))
        names = self.aggregator.settings.names
        self.progress = Progress(self.store, names, config.run.rounds, config.run.deadline)
        self.trace: list[dict[str, Any]] = []
        self.student: Arrays = students.read_state(run.path / base_file(config, None))
        self.target: np.ndarray[Any, Any] | None = None
        self._busy: set[int] = set()
        self._folders = [self.store.path / "nodes" / str(index) for index in range(len(config.nodes))]
        for index, folder in enumerate(self._folders):
            _site(config, index).save(folder)
        if self.store.has(CHECKPOINT):
            self._restore()

    @property
    def done(self) -> bool:
        """Say whether all rounds are closed."""
        return self.aggregator.round >= self.config.run.rounds

    def advance(self, pool: Executor, report: Callable[[str], None]) -> dict[str, Any]:
        """Do one round and give its line of the trace."""
        clock = Clock()
        weights = self.config.combine.broadcast == "weights"
        prior = self._prior(pool)
        if weights:
            tasks = self.aggregator.open("weights", self.student, prior)
        elif self.target is None:
            tasks = self.aggregator.open("none", {}, prior)
        else:
            tasks = self.aggregator.open("logits", {"logits": self.target}, prior)
        round = self.aggregator.round
        self.progress.open(round, [bits / self.prepared.vocab for bits in self.aggregator.bits])
        report(f"round {round}: local training at {len(tasks)} nodes")
        absent = self._collect(pool, tasks, report)
        try:
            self.aggregator.close()
        except QuorumError as error:
            raise QuorumError("; ".join([str(error), *absent])) from None
        clock.lap("local")
        self.progress.phase("combining")
        report(f"round {round}: decoding and combining")
        combined = self.aggregator.combine()
        clock.lap("combine")
        self.progress.phase("distilling")
        report(f"round {round}: distilling the student")
        self.student, divergence = pool.submit(jobs.distill, *self._distillation(combined.target)).result()
        self.target = None if weights else combined.target  # m * V numbers: kept only to be sent
        clock.lap("distill")
        self.progress.phase("evaluating")
        losses = pool.submit(jobs.evaluate, *evaluation(self.config, self.run, self.student)).result()
        clock.lap("evaluate")
        line = self._line(combined, divergence, losses, clock.laps) | {"absent": absent}
        self.aggregator.distilled()
        self.trace.append(line)
        self._checkpoint()
        self.progress.phase("closed")
        return line

    def _prior(self, pool: Executor) -> np.ndarray[Any, np.dtype[np.int16]] | None:
        """Give the last student's prediction of the probe set, if the codec codes against one."""
        if not getattr(codecs.get(self.config.codec.name), "uses_prior", False):
            return None
        base, kind = str(self.run.path / base_file(self.config, None)), self.config.student["kind"]
        prior: np.ndarray[Any, np.dtype[np.int16]] = pool.submit(
            jobs.predict, base, kind, self.student, str(self.run.path / "probe.json")
        ).result()
        return prior

    def _collect(self, pool: Executor, tasks: dict[int, Task], report: Callable[[str], None]) -> list[str]:
        """Let the nodes work until all have answered or the deadline; give who did not answer, and why."""
        round, names = self.aggregator.round, self.aggregator.settings.names
        absent, futures = [], {}
        for node, task in tasks.items():
            if node in self._busy:  # a node does one thing at a time
                absent.append(f"{names[node]}: still busy with an earlier round")
                self.progress.missing(absent[-1])
            else:
                futures[pool.submit(jobs.node_round, str(self._folders[node]), task.to_bytes())] = node
        try:
            for future in as_completed(futures, timeout=self.config.run.deadline):
                node = futures[future]
                try:
                    frame = future.result()
                    receipt = self.aggregator.frame(node, frame)
                except Exception as error:  # whatever stops a node, the others go on
                    absent.append(f"{names[node]}: failed: {error}")
                    self.progress.missing(absent[-1])
                    report(f"round {round}: {absent[-1]}")
                    continue
                self.progress.answered(node, receipt.verdict, receipt.reason, len(frame))
                left = len(self.aggregator.missing)
                report(f"round {round}: {names[node]} {receipt.verdict}; {left} nodes to come")
        except TimeoutError:
            for future, node in futures.items():
                if not future.done():
                    absent.append(f"{names[node]}: late: no answer within {self.config.run.deadline:g} s")
                    self.progress.missing(absent[-1])
                    report(f"round {round}: {absent[-1]}")
                    self._busy.add(node)
                    future.add_done_callback(partial(self._late, node))
        return sorted(absent)

    def _late(self, node: int, future: Future[bytes]) -> None:
        """Take a frame that came after the deadline: it is refused and recorded, and the node is free again."""
        if not future.cancelled() and future.exception() is None:
            self.aggregator.frame(node, future.result())
        self._busy.discard(node)

    def outcome(self) -> Outcome:
        """Give the result so far."""
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

    def _line(self, combined: Any, divergence: float, losses: list[float], laps: dict[str, float]) -> dict[str, Any]:
        vocab, contexts = self.prepared.vocab, self.prepared.probe.contexts
        sent = self.aggregator.sent
        weights = self.aggregator.weights
        refused = [r for r in self.aggregator.receipts if r.round == self.aggregator.round and r.verdict == "refused"]
        loss = float(np.mean(losses))
        return {
            "round": self.aggregator.round,
            "nodes": [self.config.nodes[node].name for node in combined.nodes],
            "bits_allotted": [bits / vocab for bits in self.aggregator.bits],
            "bits_sent": [8 * sent.get(node, 0) / (contexts * vocab) for node in range(len(self.config.nodes))],
            "payload_bytes": sum(sent.values()),
            "overhead_bytes": OVERHEAD * len(sent),
            "node_bytes": [sent[node] + OVERHEAD if node in sent else 0 for node in range(len(self.config.nodes))],
            "weights": None if weights is None else weights.tolist(),
            "noise": [
                float(self.aggregator.noise[node]) if node in sent else None for node in range(len(self.config.nodes))
            ],
            "kl": divergence,
            "heldout_loss": loss,
            "heldout_by_node": losses,
            "heldout_bits_per_byte": loss / np.log(2) / self.prepared.bytes_per_token,
            "bandwidth_upper": combined.upper,
            "bandwidth_lower": combined.lower,
            "refused": [f"{self.config.nodes[r.node].name}: {r.reason}" for r in refused],
            "seconds": {**laps, "nodes": self.progress.seconds},
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
    """Give the arguments of an evaluation job."""
    kind = student_options(config, index)["kind"]
    base = str(run.path / base_file(config, index))
    return base, kind, state, str(run.path / "heldout.safetensors"), config.probe.length


def _site(config: Config, index: int) -> Site:
    return Site(
        name=config.nodes[index].name,
        index=index,
        seed=config.run.seed,
        rounds=config.run.rounds,
        text=f"../../../text/{index}.safetensors",
        base=f"../../../{base_file(config, index)}",
        probe="../../../probe.json",
        kind=student_options(config, index)["kind"],
        local=config.local.model_dump(),
        distill=config.distill.model_dump(),
    )


def float32_variant(config: Config) -> Config:
    """Give the same federation with raw float32 logits: what FedMD and FedDF average."""
    nodes = [node.model_copy(update={"bits": 32.0, "uplink": None, "clip": None}) for node in config.nodes]
    return config.model_copy(
        update={
            "nodes": nodes,
            "codec": config.codec.model_copy(update={"name": "float32", "against": "nothing"}),
            "budget": config.budget.model_copy(update={"total": None}),
        }
    )
