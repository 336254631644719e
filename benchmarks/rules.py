"""Which rule should be the default? Held-out loss of what each rule combines, and of the student distilled from it.

    python -m benchmarks.rules [--json] [--corpora sotu,pubmed,wikipedia,pubmed-alike] [--seeds 0,1]

Each rule has a federation of its own, with float32 logits, so that no codec takes part; all start from one base and
draw the same minibatches, and in the first round they share the nodes too. After it only some go on. A row has
the loss in nats per token on the held-out text of all nodes, as `fpld run` reports it: `heldout_loss` of the base, of a
node by itself or of what a rule combines (the ensemble), `student_loss` of the student that is distilled from that.

Rules get log-probabilities, which is what the default codec decodes to: median and trimmed depend on it.
`precision` is left out: without quantization all variances are zero, and it is the mean.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import config as configuration
from fpld.cli.arguments import words
from fpld.cli.output import Output
from fpld.config import NodeSection
from fpld.errors import FpldError, InputError
from fpld.federation.prepare import prepare
from fpld.node.spec import base_file
from fpld.node.training import set_threads
from fpld.numerics import log_softmax, log_sum_exp
from fpld.registry import rules as registry
from fpld.rules import combine
from fpld.seeds import derive_seed
from fpld.storage.run_folder import HELDOUT, RunFolder, text_file
from fpld.students import load
from fpld.students.heldout import heldout_losses
from fpld.types import Array, Decoded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fpld.cli.output import Row
    from fpld.config import Config
    from fpld.students import Student

log = logging.getLogger("fpld.benchmarks.rules")

ROUNDS = 2
SEEDS = (0, 1)
FINALISTS = ("mean", "mixture")
_ROWS = 1024  # contexts at a time: the nodes' logits of a block stay small
TOPICS = ("People", "Biology and health sciences", "Physical sciences", "Arts", "Technology")


def presidents() -> Config:
    """Return the demonstration, an era at each node, with labels on public text alone: rules combine nothing else."""
    return _public(configuration.read_config("demo")[0])


def hospitals() -> Config:
    """Return the hospitals, a specialty at each node, with labels on public text alone."""
    return _public(configuration.read_config("hospitals")[0])


def _public(config: Config) -> Config:
    """Return a configuration whose nodes label as many contexts, none of which they write."""
    probe = config.probe.model_copy(update={"contexts": config.probe.contexts + config.written_contexts})
    return config.model_copy(update={"probe": probe, "written": None})


def wikipedia() -> Config:
    """Return the demonstration's model on lead sections of Wikipedia: a topic at each node, another one public."""
    return change(
        presidents(),
        data={"corpus": "wikipedia"},
        probe={"source": "Geography"},
        nodes=[NodeSection(name=topic, bits=1.0) for topic in TOPICS],
    )


def alike() -> Config:
    """Return the hospitals with abstracts of all specialties dealt at random: nodes that do not differ."""
    parts = [NodeSection(name=f"part {number}", bits=1.0) for number in range(1, 6)]
    return change(hospitals(), data={"split": "iid"}, nodes=parts)


CORPORA: dict[str, Callable[[], Config]] = {
    "sotu": presidents,
    "pubmed": hospitals,
    "wikipedia": wikipedia,
    "pubmed-alike": alike,
}


def change(config: Config, **sections: Any) -> Config:
    """Return the configuration with some keys of some tables changed; what is no table of keys is replaced."""
    return config.model_copy(
        update={
            name: getattr(config, name).model_copy(update=keys) if isinstance(keys, dict) else keys
            for name, keys in sections.items()
        }
    )


def study(config: Config, names: Sequence[str], finalists: Sequence[str]) -> list[Row]:
    """Run a federation for each rule, after the first round for the finalists only; return all rows."""
    set_threads(config.student.kind)
    with tempfile.TemporaryDirectory() as folder:
        store = RunFolder(Path(folder))
        sequences = prepare(config, store).probe.sequences
        base = load(store.path / base_file(config, None))
        texts = [store.read_arrays(text_file(index))[0]["tokens"] for index in range(len(config.nodes))]
        held = store.read_arrays(HELDOUT)[0]
    heldout = [held[str(index)] for index in range(len(texts))]

    def loss(student: Student) -> float:
        return float(np.mean(heldout_losses(student, heldout, config.probe.length)))

    rows = [_row(0, "base", loss(base))]
    groups = [(base, list(names))]  # a student, and the rules whose federations have it: all, until they part
    for round in range(1, config.run.rounds + 1):
        pupils = []
        for student, sharing in groups:
            log.info("round %d: %s", round, ", ".join(sharing))
            nodes = train(config, student, texts, round)
            if round == 1:
                rows += [_row(1, f"node: {n.name}", loss(m)) for n, m in zip(config.nodes, nodes, strict=True)]
            ensembles = ensemble_losses(nodes, sharing, heldout, config.probe.length)
            for name, target in targets(nodes, sharing, sequences).items():
                pupils.append((student.copy(), [name]))
                pupils[-1][0].distill(
                    sequences,
                    target,
                    steps=config.distill.steps,
                    seed=derive_seed(config.run.seed, "distill", round),
                    rate=config.distill.rate_in(round, config.run.rounds),
                )
                rows.append(_row(round, name, ensembles[name], loss(pupils[-1][0])))
        groups = [(pupil, own) for pupil, own in pupils if own[0] in finalists]
    return rows


def train(config: Config, student: Student, texts: Sequence[Array], round: int) -> list[Student]:
    """Return the nodes' models of a round, trained as in a run of the same seed."""
    nodes = [student.copy() for _ in texts]
    for index, (node, tokens) in enumerate(zip(nodes, texts, strict=True)):
        seed = derive_seed(config.run.seed, "local", round, index)
        rate = config.local.rate_in(round, config.run.rounds)
        node.finetune(tokens, steps=config.local.steps, seed=seed, rate=rate)
    return nodes


def combined(nodes: Sequence[Student], names: Sequence[str], sequences: Array) -> Iterator[dict[str, Array]]:
    """Return what each rule makes of the nodes' log-probabilities on the sequences, block by block."""
    for blocks in zip(*(node.logit_blocks(sequences, rows=_ROWS) for node in nodes), strict=True):
        exact = np.zeros((1, 1), np.float32)
        replies = [Decoded(log_softmax(block), exact, exact) for block in blocks]
        yield {name: combine(registry.get(name), replies) for name in names}


def targets(nodes: Sequence[Student], names: Sequence[str], sequences: Array) -> dict[str, Array]:
    """Return what a student learns from on the probe set, for each rule."""
    parts = list(combined(nodes, names, sequences))
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def ensemble_losses(
    nodes: Sequence[Student], names: Sequence[str], heldout: Sequence[Array], length: int
) -> dict[str, float]:
    """Return the loss of the ensemble by each rule: the mean over held-out texts, cut as `Student.loss` cuts them."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for tokens in heldout:
        nats = dict.fromkeys(names, 0.0)
        for sequences, following in _windows(tokens, length):
            start = 0
            for block in combined(nodes, names, sequences):
                rows = np.arange(len(next(iter(block.values()))))
                chosen = following[start + rows]
                start += len(rows)
                for name, values in block.items():
                    nats[name] += float(np.sum(log_sum_exp(values) - values[rows, chosen], dtype=np.float64))
        for name in names:
            found[name].append(nats[name] / (len(tokens) - 1))
    return {name: float(np.mean(losses)) for name, losses in found.items()}


def _windows(tokens: Array, length: int) -> Iterator[tuple[Array, Array]]:
    """Cut a text into windows that see only themselves; the last may be shorter. Return them, and what follows."""
    count = len(tokens) - 1
    whole = count // length * length
    yield tokens[:whole].reshape(-1, length), tokens[1 : whole + 1]
    if whole < count:
        yield tokens[None, whole:count], tokens[whole + 1 :]


def _row(round: int, method: str, heldout: float, student: float | None = None) -> Row:
    return {"round": round, "method": method, "heldout_loss": heldout, "student_loss": student}


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return each rule's ensemble and student by round, means over seeds, and in how many seeds its student is best."""
    found = []
    for corpus, round in dict.fromkeys((row["corpus"], row["round"]) for row in rows):
        here = [
            row for row in rows if (row["corpus"], row["round"]) == (corpus, round) and row["student_loss"] is not None
        ]
        best = [
            min((row for row in here if row["seed"] == seed), key=lambda row: float(row["student_loss"]))["method"]
            for seed in dict.fromkeys(row["seed"] for row in here)
        ]
        for rule in dict.fromkeys(row["method"] for row in here):
            ensemble, student = (
                float(np.mean([row[name] for row in here if row["method"] == rule]))
                for name in ("heldout_loss", "student_loss")
            )
            line = {"corpus": corpus, "round": round, "rule": rule, "ensemble": ensemble, "student": student}
            found.append(line | {"best": f"{best.count(rule)} of {len(best)} seeds"})
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the arguments, run the studies, print the rows."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rules", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ours = [name for name in registry.names() if name != "precision"]
    parser.add_argument("--corpora", type=words, default=list(CORPORA), help=f"of {', '.join(CORPORA)} (default: all)")
    parser.add_argument(
        "--seeds", type=words, default=SEEDS, help=f"with commas between them (default: {','.join(map(str, SEEDS))})"
    )
    parser.add_argument("--rules", type=words, default=ours, help=f"of {', '.join(ours)} (default: all)")
    parser.add_argument(
        "--finalists",
        type=words,
        default=FINALISTS,
        help=f"rules that go on after round 1 (default: {','.join(FINALISTS)})",
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of a federation (default: {ROUNDS})")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    given = parser.parse_args(arguments)
    output = Output(given.json)
    try:
        rows = _rows(given, output)
    except FpldError as error:
        parser.error(str(error))
    output.result("benchmarks rules", rows, title="Held-out loss by rule (nats per token)")
    output.table(summary(rows), title="Means over seeds")
    return 0


def _rows(given: argparse.Namespace, output: Output) -> list[Row]:
    for name in given.corpora:
        if name not in CORPORA:
            raise InputError(f"--corpora must be of {', '.join(CORPORA)}, got {name!r}")
    for name in (*given.rules, *given.finalists):
        registry.get(name)
    if given.rounds < 1:
        raise InputError(f"--rounds must be at least 1, got {given.rounds}")
    seeds = [_seed(text) for text in given.seeds]
    rows: list[Row] = []
    with output.status():
        for corpus in given.corpora:
            for seed in seeds:
                config = change(CORPORA[corpus](), run={"seed": seed, "rounds": given.rounds})
                log.info("%s, seed %d", corpus, seed)
                found = study(config, given.rules, given.finalists)
                rows += [{"corpus": corpus, "seed": seed} | row for row in found]
    return rows


def _seed(text: str | int) -> int:
    if not str(text).isdigit():
        raise InputError(f"--seeds must be whole numbers of at least 0 with commas between them, got {text!r}")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
