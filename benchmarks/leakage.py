"""What bits do to leakage: an audited node's labels at several budgets and codecs, and what they tell of its canaries.

    fpld audit audit --copies 8 --out runs/audit
    python -m benchmarks.leakage runs/audit --out out

The node's model is that of the audit, trained without privacy; only what is sent of it differs.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld import config as configuration
from fpld.audit.attacks import ObservedReply, distill_surrogate, label_scores, model_scores, node_target
from fpld.audit.run import AUDIT_PLAN_FILE, DEFAULT_DELTA, AuditPlan, attack_row, draw_canaries
from fpld.codecs.prior import ArrayPrior, in_eighths
from fpld.data import ProbeSet
from fpld.node.spec import base_file
from fpld.node.training import open_student
from fpld.registry import codecs
from fpld.report.draw import save_figure
from fpld.rules import MIXTURE
from fpld.seeds import derive_key, derive_seed
from fpld.storage.files import write_csv
from fpld.storage.run_folder import OWN_MODEL, PROBE, RunFolder
from fpld.students import read_state
from fpld.types import Plan as Coding

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fpld.audit.attacks import Canaries
    from fpld.config import Config

    Row = dict[str, Any]

# Bits per context; those of dense codecs are bits per coordinate times V = 1024.
CASES = [
    ("float32", 32 * 1024.0),
    ("uniform", 8 * 1024.0),
    ("uniform", 4 * 1024.0),
    ("uniform", 2 * 1024.0),
    ("predictive", 1024.0),
    ("predictive", 256.0),
    ("predictive", 64.0),
    ("samples", 96.0),
    ("samples", 44.0),
    ("samples", 24.0),
    ("samples", 12.0),
]


class Node(NamedTuple):
    """An audited node: its configuration, its folder, its canaries, the probe set."""

    config: Config
    run: RunFolder
    plan: AuditPlan
    probe: ProbeSet
    sets: list[Canaries]


def open_node(folder: Path) -> Node:
    """Return the node that an audit has left behind."""
    config, _ = configuration.read_config(folder / "config.toml")
    run = RunFolder(folder)
    probe = ProbeSet.load(folder / PROBE)
    plan = AuditPlan(**run.read_json(AUDIT_PLAN_FILE))
    return Node(config, run, plan, probe, draw_canaries(run, probe, plan, config.run.seed))


def measure(node: Node, codec: str, bits: float) -> list[Row]:
    """Send the node's labels by a codec within a budget, and attack them."""
    config = node.config
    base = node.run.path / base_file(node.config, None)
    before = open_student(base)
    sent = _sent(node, codec, bits)
    options = {"steps": config.distill.steps, "rate": config.distill.rate, "seed": derive_seed(0, codec, round(bits))}
    state = distill_surrogate(base, before.state(), node.probe.sequences, node_target(sent, MIXTURE), options, None)
    alone = open_student(base, state)
    rows = []
    for canaries in node.sets:
        scores = {"surrogate": model_scores(alone, before, canaries)}
        if canaries.contexts is not None:
            scores["labels"] = label_scores(sent, canaries, before, node.probe.sequences)
        known = {"codec": codec, "context_bits": 8 * len(sent.payload) / node.probe.contexts}
        rows += [known | attack_row(canaries, name, found, DEFAULT_DELTA, None, 0) for name, found in scores.items()]
    return rows


def _sent(node: Node, codec: str, bits: float) -> ObservedReply:
    base = node.run.path / base_file(node.config, None)
    coding = codecs.get(codec)
    sequences = node.probe.sequences
    prior = None
    if coding.traits.prior:
        blocks = open_student(base).logit_blocks(sequences)
        prior = ArrayPrior(np.concatenate([in_eighths(block) for block in blocks]))
    plan = Coding(
        run_key=derive_key(0), round=1, node=0, probe=bytes(32), contexts=node.probe.contexts, vocab=node.probe.vocab,
        bits=bits, prior=prior,
    )  # fmt: skip
    model = open_student(base, read_state(node.run.path / f"fpld/nodes/{node.plan.node}/{OWN_MODEL}"))
    return ObservedReply(coding, coding.encode(model.logit_blocks(sequences), plan), plan)


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw the AUC of each attack against the bits that were sent."""
    panels = [("probe", "labels"), ("probe", "surrogate"), ("text", "surrogate")]
    for axes, (kind, attack) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        own = [row for row in rows if (row["canaries"], row["attack"]) == (kind, attack)]
        for name in dict.fromkeys(row["codec"] for row in own):
            some = [row for row in own if row["codec"] == name]
            errors = [[row["auc"] - row["auc_low"] for row in some], [row["auc_high"] - row["auc"] for row in some]]
            bits = [row["context_bits"] for row in some]
            axes.errorbar(bits, [row["auc"] for row in some], errors, fmt="o-", capsize=3, label=name)
        axes.axhline(0.5, color="grey", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xlabel("bits per context")
        axes.set_title(f"{kind} canaries, by {attack}", fontsize=10)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("AUC of the attack (95 %)")
    figure.axes[0].legend(frameon=False)


def main() -> None:
    """Measure all cases of an audited run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("run", type=Path, help="folder of an audit: fpld audit ... --out RUN")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for table and figure (default: out)")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    node = open_node(arguments.run)
    rows = list[Any]()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for codec, bits in CASES:
        rows += measure(node, codec, bits)
        print(*rows[-len(node.sets) - 1 :], sep="\n", flush=True)
        write_csv(arguments.out / "leakage.csv", rows)
    save_figure(partial(draw, rows), arguments.out / "leakage", (11.0, 3.8))


if __name__ == "__main__":
    main()
