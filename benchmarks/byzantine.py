"""Two of eight nodes are malicious: the held-out loss of the student, for each attack and each rule.

    python -m benchmarks.byzantine --out out [--seed 0] [--attacks flip,bias] [--rules mixture,guarded] [--targets]

Presidents' messages are dealt to eight nodes, which differ (Dirichlet over eras); each trains a small transformer from
one base, once for all cells. Per cell two nodes attack; all send real payloads, `samples` for `mixture` and
`guarded`, float32 for the others (the best that a dense codec could do); a rule combines them, and a student is
distilled. `without` leaves the two nodes out: what a rule that knew them would give. Rows go to attacks.csv as they
come, and those that are there already are not computed again.

`--targets` distils no students: it says how far a rule's target is from the mixture of eight honest nodes, as KL in
nats per context, on fewer contexts and with float32 labels for all rules. It takes a tenth of the time.
"""

from __future__ import annotations

import argparse
import csv
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.attacks import ATTACKS, Attack, View
from benchmarks.rules import change, presidents, train
from fpld.cli.arguments import words
from fpld.codecs.prior import ArrayPrior, in_eighths
from fpld.config import NodeSection
from fpld.federation.prepare import prepare
from fpld.node.spec import base_file
from fpld.node.training import one_thread
from fpld.numerics import log_softmax, softmax
from fpld.protocol.combine import Combined, Replies
from fpld.protocol.fast_paths import combine_replies
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
    from fpld.protocol.combine import LogitSample
    from fpld.students import Student
    from fpld.types import Array

    Row = dict[str, Any]

NODES = 8
MALICIOUS = 2
BITS = 32.0  # per context, of sampled labels
SPARSE = {"mixture": "samples", "guarded": "samples"}  # all others: float32
CONTEXTS = {"samples": 16384, "float32": 8192}
TARGETS = 1024  # contexts, where no student is distilled
STEPS = 200
RATE = 2e-3
RULES = ("mixture", "guarded", "mean", "trimmed", "median", "geometric")
STUDENT = {"kind": "transformer", "layers": 1, "width": 64, "heads": 4, "length": 32, "batch": 8}


def configuration(seed: int) -> Config:
    """Return the federation: eight nodes that differ, a small transformer, short training."""
    return change(
        presidents(),
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
    """What an attack makes of all nodes' labels: their log-probabilities, and the shares of the bits they have."""

    logits: list[Array]
    bits: list[float]
    attack: Attack | None


@dataclass(frozen=True, eq=False)
class Federation:
    """The trained nodes' log-probabilities on the probe set, and what a student needs."""

    seed: int
    base: Student
    sequences: Array
    heldout: list[Array]
    logits: list[Array]
    prior: ArrayPrior
    kept: dict[tuple[float, ...], bytes] = field(default_factory=dict)

    @classmethod
    def make(cls, folder: Path, seed: int, contexts: int) -> Federation:
        """Prepare and train; what is in the folder already is not made again."""
        config = configuration(seed)
        store = RunFolder(folder)
        one_thread(config.student.kind)
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
        prior = ArrayPrior(in_eighths(base.logits(sequences)))
        return cls(seed, base, sequences, [held[str(node)] for node in range(NODES)], logits, prior)

    def labels(self, name: str) -> Labels:
        """Return what nodes say when the last ones attack; `none`: nobody does; `without`: they say nothing."""
        if name not in ATTACKS:
            honest = self.logits if name == "none" else self.logits[:-MALICIOUS]
            return Labels(honest, [BITS] * len(honest), None)
        attack = ATTACKS[name]
        honest = self.logits[:-MALICIOUS]
        others = np.mean([softmax(each, np.float32) for each in honest], axis=0)
        found = [
            attack.logits(View(own, others, np.random.default_rng(derive_seed(self.seed, name, number))))
            for number, own in enumerate(self.logits[-MALICIOUS:])
        ]
        left = (NODES - attack.budget * MALICIOUS) / len(honest)
        bits = [BITS * left] * len(honest) + [BITS * attack.budget] * MALICIOUS
        return Labels([*honest, *(log_softmax(each).astype(np.float32) for each in found)], bits, attack)

    def combined(self, labels: Labels, rule: str, name: str) -> Combined:
        """Code the nodes' labels by the codec of this name, and combine the payloads."""
        codec = codecs.get(name)
        contexts = min(CONTEXTS[name], self.sequences.size)
        vocab = self.base.vocab
        prior = ArrayPrior(self.prior.array[:contexts]) if codec.traits.prior else None
        plans = []
        payloads = []
        for node, (logits, bits) in enumerate(zip(labels.logits, labels.bits, strict=True)):
            plan = Plan(
                run_key=derive_key(self.seed),
                round=1,
                node=node,
                probe=bytes(32),
                contexts=contexts,
                vocab=vocab,
                bits=bits if codec.traits.sparse else 64.0 * vocab,
                slot=node,
                slots=len(labels.logits),
                prior=prior,
            )
            payload = self._payload(codec, plan, logits, honest=node < NODES - MALICIOUS or labels.attack is None)
            if labels.attack is not None and node >= NODES - MALICIOUS and codec.traits.sparse:
                payload = labels.attack.payload(payload)
            payloads.append(payload)
            plans.append(plan)
        chosen = with_trim(rules.get(rule), trim=MALICIOUS if rule == "trimmed" else None)
        return combine_replies(Replies(codec, chosen, payloads, plans), Silent(), threads=1)

    def _payload(self, codec: Codec, plan: Plan, logits: Array, *, honest: bool) -> bytes:
        """Code a node's labels; what honest nodes send is the same in many cells."""
        key = codec.code, plan.node, plan.bits, plan.slots
        if not honest:
            return codec.encode([logits[: plan.contexts]], plan)
        if key not in self.kept:
            self.kept[key] = codec.encode([logits[: plan.contexts]], plan)
        return self.kept[key]

    def divergence(self, combined: Combined) -> float:
        """Return how far a target is from the mixture of all nodes, had they been honest: KL in nats per context."""
        truth = np.mean([softmax(each) for each in self.logits], axis=0)
        return float((truth * (np.log(truth) - log_softmax(combined.target.array))).sum(axis=1).mean())

    def loss(self, combined: Combined) -> float:
        """Distil a student; return its loss on the held-out text of all nodes, in nats per token."""
        length = self.sequences.shape[1]
        student = self.base.copy()
        student.distill(
            self.sequences[: combined.target.contexts // length],
            combined.target,
            steps=STEPS,
            rate=RATE,
            seed=derive_seed(self.seed, "distill", 1),
        )
        return float(np.mean(heldout_losses(student, self.heldout, length)))


def measure(federation: Federation, attack: str, rule: str, *, targets: bool) -> Row:
    """Return a cell of the table."""
    codec = "float32" if targets else SPARSE.get(rule, "float32")
    combined = federation.combined(federation.labels(attack), rule, codec)
    trust = "" if combined.trust is None else " ".join(f"{value:.3g}" for value in combined.trust)
    found = federation.divergence(combined) if targets else federation.loss(combined)
    return {"seed": federation.seed, "attack": attack, "rule": rule, "nats": found, "trust": trust}


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
    parser.add_argument("--targets", action="store_true", help="no students: how far each rule's target is off")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    contexts = TARGETS if given.targets else max(CONTEXTS.values())
    federation = Federation.make(given.out / f"seed-{given.seed}", given.seed, contexts)
    table = given.out / ("targets.csv" if given.targets else "attacks.csv")
    rows: list[Row] = list(csv.DictReader(table.open())) if table.exists() else []
    done = {(int(row["seed"]), row["attack"], row["rule"]) for row in rows}
    for rule in given.rules:
        for attack in given.attacks:
            if (given.seed, attack, rule) not in done:
                rows.append(measure(federation, attack, rule, targets=given.targets))
                print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
                write_csv(table, rows)
    print(markdown([row | {"seed": int(row["seed"])} for row in rows]))


if __name__ == "__main__":
    main()
