"""Students at equal bytes: what sampled labels, the predictive codec and the paper's channel teach for the same uplink.

    python -m benchmarks.labels runs/rivals/seed-* --out out --jobs 2

takes finished runs of one round (`fpld run rivals --seeds 0,1,2`): their base model, public text, and the nodes' models
as they were trained. For every codec and budget, nodes send real payloads on as many contexts as suit the codec, all
with equal bits; they are combined by `mixture`, a student is distilled, and evaluated on the held-out text. Contexts,
draws and minibatches go by each run's seed. Writes labels.csv, labels.png and labels.svg; rows that are in the table
are kept, so that a study that was stopped goes on, and `--megabytes 10` adds a budget.
`python -m docs.kept_results equal-bytes out` keeps the rows for docs/results.md.

Contexts for a budget: sampled labels by the model of `fpld.planner.contexts`; the predictive codec at 0.27 and the
uniform one at 1.5 bits per coordinate, which in trials taught more than more contexts in fewer bits. A budget that is
less than 2000 contexts for a codec is left out.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld import config as configuration
from fpld.codecs.prior import ArrayPrior, in_eighths
from fpld.data import ProbeSet
from fpld.node.spec import base_file
from fpld.node.training import open_student
from fpld.planner.contexts import DEMONSTRATION, best_contexts, fit_loss
from fpld.protocol.combine import NullObserver, Replies
from fpld.protocol.fast_paths import combine_replies
from fpld.registry import codecs
from fpld.report.draw import save_figure
from fpld.rules import MIXTURE
from fpld.seeds import derive_key, derive_seed
from fpld.storage.arrays import read_arrays
from fpld.storage.files import write_csv
from fpld.storage.run_folder import HELDOUT, OWN_MODEL, PROBE, PUBLIC
from fpld.students import read_state
from fpld.students.heldout import heldout_losses
from fpld.types import Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure

    from fpld.target import Target

    Row = dict[str, Any]
    Name = tuple[Any, ...]

MEGABYTES = (0.5, 2.0, 10.0)
BITS = {"predictive": 0.27, "uniform": 1.5}  # per coordinate
STEPS = 600
RATE = 1.5e-3
LEAST_CONTEXTS = 2000
NODES = 5
VOCAB = 1024

NAME = ("run", "codec", "megabytes")  # the columns that name a row
KINDS: dict[str, Callable[[str], Any]] = {
    "run": str,
    "codec": str,
    "megabytes": float,
    "seed": int,
    "uplink_bytes": int,
    "contexts": int,
    "context_bits": float,
    "heldout_loss": float,
}


class Case(NamedTuple):
    """A student to be distilled: from which run, by which codec, for how many megabytes of all nodes."""

    run: Path
    codec: str
    megabytes: float

    @property
    def name(self) -> Name:
        """Return what its row begins with."""
        return self.run.resolve().name, self.codec, self.megabytes


def contexts_for(codec: str, size: float, nodes: int, vocab: int, most: int) -> int:
    """Return how many contexts suit a codec that may send `size` bytes from all nodes."""
    total = 8 * size / nodes
    if codec in BITS:
        return min(int(total / (BITS[codec] * vocab)), most)
    return best_contexts(fit_loss(DEMONSTRATION), total, most_contexts=most).contexts


def measure(case: Case) -> Row:
    """Distil and evaluate a student."""
    config, _ = configuration.read_config(case.run / "config.toml")
    seed = config.run.seed
    length = config.probe.length
    nodes = len(config.nodes)
    base = case.run / base_file(config, None)
    public = read_arrays(case.run / PUBLIC)[0]["tokens"]
    windows = public[: len(public) // length * length].reshape(-1, length)
    vocab = ProbeSet.load(case.run / PROBE).vocab
    wanted = contexts_for(case.codec, 1e6 * case.megabytes, nodes, vocab, windows.size) // length
    chosen = np.random.default_rng(derive_seed(seed, "labels")).permutation(len(windows))[:wanted]
    sequences = windows[np.sort(chosen)]
    target, sent = labels(case, base, sequences, nodes, seed)
    student = open_student(base)
    student.distill(sequences, target, steps=STEPS, rate=RATE, seed=derive_seed(seed, "distill", 1))
    texts, _ = read_arrays(case.run / HELDOUT)
    loss = float(np.mean(heldout_losses(student, [texts[str(node)] for node in range(nodes)], length)))
    return {
        **dict(zip(NAME, case.name, strict=True)),
        "seed": seed,
        "uplink_bytes": sent,
        "contexts": sequences.size,
        "context_bits": 8 * sent / nodes / sequences.size,
        "heldout_loss": loss,
    }


def labels(case: Case, base: Path, sequences: np.ndarray[Any, Any], nodes: int, seed: int) -> tuple[Target, int]:
    """Return what the nodes' payloads are combined to, and their bytes."""
    codec = codecs.get(case.codec)
    reference = open_student(base)
    prior = ArrayPrior(np.concatenate([in_eighths(block) for block in reference.logit_blocks(sequences)]))
    payloads = []
    plans = []
    for node in range(nodes):
        plan = Plan(
            run_key=derive_key(seed),
            round=1,
            node=node,
            probe=bytes(32),
            contexts=sequences.size,
            vocab=reference.vocab,
            bits=8e6 * case.megabytes / nodes / sequences.size,
            slot=node,
            slots=nodes,
            prior=prior if codec.traits.prior else None,
        )
        model = open_student(base, read_state(case.run / f"fpld/nodes/{node}/{OWN_MODEL}"))
        payloads.append(codec.encode(model.logit_blocks(sequences), plan))
        plans.append(plan)
    return combine_replies(Replies(codec, MIXTURE, payloads, plans), NullObserver()).target, sum(map(len, payloads))


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw means over the seeds with standard errors."""
    axes = figure.subplots()
    for name in dict.fromkeys(row["codec"] for row in rows):
        own = [row for row in rows if row["codec"] == name]
        sizes = sorted({row["megabytes"] for row in own})
        found = [[row["heldout_loss"] for row in own if row["megabytes"] == size] for size in sizes]
        errors = [np.std(losses, ddof=1) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0 for losses in found]
        axes.errorbar(sizes, [float(np.mean(losses)) for losses in found], errors, fmt="o-", capsize=3, label=name)
    axes.set_xscale("log")
    axes.set_xlabel("uplink of all nodes (MB)")
    axes.set_ylabel("held-out loss of the student (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def read(path: Path) -> dict[Name, Row]:
    """Return the rows of a table by their names; none if there is no table."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = [{key: KINDS[key](value) for key, value in row.items() if key in KINDS} for row in csv.DictReader(file)]
    if any(set(row) != set(KINDS) for row in rows):
        raise SystemExit(f"{path} has other columns than {', '.join(KINDS)}: move it away, or choose another --out")
    return {tuple(row[key] for key in NAME): row for row in rows}


def write(rows: dict[Name, Row], path: Path) -> None:
    """Write the table, whole or not at all: by budget, codec and run."""
    ordered = sorted(rows.values(), key=lambda row: (row["megabytes"], row["codec"], row["run"]))
    new = path.with_suffix(".new")
    write_csv(new, ordered)
    new.replace(path)


def main(arguments: list[str] | None = None) -> None:
    """Measure all cases; rows that the table has already are kept."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs of one round")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for table and figure (default: out)")
    parser.add_argument("--megabytes", type=float, nargs="+", default=MEGABYTES, help="budgets of all nodes together")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side (default: 1)")
    given = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    given.out.mkdir(parents=True, exist_ok=True)
    table = given.out / "labels.csv"
    rows = read(table)
    cases = [
        case
        for size in given.megabytes
        for run in given.runs
        for codec in ("samples", *BITS)
        if 8e6 * size / NODES / (BITS.get(codec, 0.0) * VOCAB + 1) >= LEAST_CONTEXTS
        if (case := Case(run, codec, size)).name not in rows
    ]
    with ProcessPoolExecutor(given.jobs) as pool:
        for done in as_completed([pool.submit(measure, case) for case in cases]):
            row = done.result()
            rows[tuple(row[key] for key in NAME)] = row
            print(row, flush=True)
            write(rows, table)
    save_figure(partial(draw, list(rows.values())), given.out / "labels", (7.0, 4.2))


if __name__ == "__main__":
    main()
