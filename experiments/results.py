"""Make docs/results.md: run every study, keep what is done under out/results/, and write the tables.

    python experiments/results.py                          everything (an hour of one core; most of it is training)
    python experiments/results.py --only adaptive sizes    these parts again; the others from what is kept

A part that was interrupted goes on where it stopped. A changed preset is a new study: its old results are not used.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import config as configuration
from fpld.codecs import decode
from fpld.engines.local.baselines import float32_variant
from fpld.engines.local.engine import LocalEngine
from fpld.engines.local.run import run
from fpld.engines.pool import Inline
from fpld.federation.claim import versions
from fpld.federation.federation import Federation
from fpld.federation.log import listen
from fpld.federation.prepare import prepare
from fpld.federation.work import work
from fpld.numerics import kl
from fpld.protocol.wire import OVERHEAD, unseal
from fpld.registry import codecs, rules
from fpld.report.tables import gap_closed
from fpld.rules import combine
from fpld.storage.files import write_atomic
from fpld.storage.folder import RunFolder
from fpld.types import Decoded, Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fpld.config import Config
    from fpld.federation.engine import Absence
    from fpld.federation.prepare import Prepared
    from fpld.protocol import Receipt, Task

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "out" / "results"
PAGE = ROOT / "docs" / "results.md"
STUDY_SEEDS = range(5)
RUN_SEEDS = {"heterogeneous-models": (1,)}
Rows = list[dict[str, Any]]


# ---- what is kept, and what is said about the machine


def kept(name: str, key: Any, compute: Callable[[], Any]) -> Any:
    """Return what was computed for this key before, or compute and keep it."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:12]
    file = KEPT / f"{name}-{digest}.json"
    if not file.exists():
        write_atomic(file, (json.dumps(compute(), indent=1) + "\n").encode())
    return json.loads(file.read_text())


def say(text: str) -> None:
    """Report progress, with the time."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


def seeded(config: Config, seed: int) -> Config:
    """Return the configuration with another seed."""
    return change(config, run={"seed": seed})


def change(config: Config, **sections: dict[str, Any]) -> Config:
    """Return the configuration with some keys of some sections changed."""
    parts = {name: getattr(config, name).model_copy(update=keys) for name, keys in sections.items()}
    return config.model_copy(update=parts)


def number(values: Sequence[float], digits: int) -> str:
    """Write a mean, and its standard error where there is one."""
    mean = f"{np.mean(values):.{digits}f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {np.std(values, ddof=1) / np.sqrt(len(values)):.{digits}f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shell(*commands: str) -> str:
    """Show commands as they are typed."""
    return "```sh\n" + "\n".join(commands) + "\n```"


class Said(logging.Handler):
    """Say what a run logs, with a name before it."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.INFO)
        self._name = name

    def emit(self, record: logging.LogRecord) -> None:
        """Say a line."""
        say(f"{self._name}: {record.getMessage()}")


# ---- whole runs of presets: the table that `fpld run` prints, over seeds


def whole_run(name: str, seed: int, workers: int) -> Rows:
    """Run a preset as `fpld run NAME --seed SEED` does, or go on with it; return the table's rows."""
    rows: Rows = json.loads((run_folder(name, seed, workers) / "result.json").read_text())
    return rows


def run_folder(name: str, seed: int, workers: int) -> Path:
    """Return the folder of a finished run of a preset."""
    config, text = configuration.load(name)
    text = f"# --seed {seed}\n{text}"
    config = change(config, run={"seed": seed}, engine={"workers": workers})
    folder = KEPT / "runs" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    if not (folder / "result.json").exists():
        resume = (folder / "config.toml").exists()
        with listen(Said(f"{name}, seed {seed}")):
            run(config, text, folder, resume=resume)
    return folder


def run_table(name: str, seeds: Sequence[int], workers: int) -> str:
    """Return the table of a preset over seeds, with the share of the gap that each method closes."""
    runs = [whole_run(name, seed, workers) for seed in seeds]
    body = []
    for methods in zip(*runs, strict=True):
        method = methods[0]["method"]
        closed = [gap_closed([*(r for r in rows if r["method"] != "fpld"), {**own, "method": "fpld"}])
                  for rows, own in zip(runs, methods, strict=True)]  # fmt: skip
        shown = "" if method == "base" or method.startswith("alone") or None in closed else _percent(closed)
        body.append(
            [
                f"**{method}**" if method == "fpld" else method,
                number([row["heldout_loss"] for row in methods], 3),
                number([row["bits_per_byte"] for row in methods], 3),
                f"{np.mean([row['uplink_bytes'] for row in methods]) / 1e6:,.1f}",
                shown,
            ]
        )
    head = ["method", "held-out nats per token", "bits per byte", "uplink, MB", "gap closed"]
    return table(head, body)


def _percent(shares: Sequence[Any]) -> str:
    return number([100 * share for share in shares], 0) + " %"


def run_commands(name: str, seeds: Sequence[int]) -> str:
    """Return the commands that print the runs of a table."""
    return shell(*(f"fpld run {name} --seed {seed} --out runs/{name}-{seed}" for seed in seeds))


# ---- studies: one federation after another in this process, with the nodes' exact logits beside what they send


class ExactEngine(LocalEngine):
    """The local engine, which also keeps the nodes' exact logits: each node does its task twice, once in float32."""

    def __init__(self, federation: Federation, bytes_per_token: float) -> None:
        super().__init__(federation, bytes_per_token)
        self.exact: list[np.ndarray[Any, Any]] = []

    def collect(self, tasks: Mapping[int, Task], deliver: Callable[[int, bytes], Receipt]) -> list[Absence]:
        """Collect the exact logits, then the frames."""
        self.exact = [self._exact(node, task) for node, task in sorted(tasks.items())]
        return super().collect(tasks, deliver)

    def _exact(self, node: int, task: Task) -> np.ndarray[Any, Any]:
        """Return the logits that a node is about to code: training is the same for the same task and folder."""
        place = self.place(node)
        copy = replace(place, folder=place.folder.parents[1] / "exact" / str(node))
        shutil.rmtree(copy.folder, ignore_errors=True)
        if place.folder.exists():
            shutil.copytree(place.folder, copy.folder)
        plan = replace(task.plan, bits=32.0 * task.plan.vocab, clip=None, prior=None)
        asked = replace(task, plan=plan, codec="float32", against="nothing").to_bytes()
        frame = work(self.parts[node], copy, asked)
        codec = codecs.get("float32")
        return decode(codec, unseal(frame, plan, codec.code), plan).values


def study(config: Config, prepared: Prepared, store: RunFolder, name: str) -> Rows:
    """Run a federation, and measure each round the KL from what exact logits of the same models would give."""
    rows = []
    federation = Federation(config, store, prepared, name, pool=Inline())
    engine = ExactEngine(federation, prepared.bytes_per_token)
    while not federation.done:
        combined = federation.close(engine.collect(federation.open(), federation.deliver))
        line = federation.finish(engine.evaluate(federation.student))
        none = np.zeros((1, 1), np.float32)
        exact = combine(rules.get(config.combine.rule), [Decoded(logits, none, none) for logits in engine.exact])
        rows.append(
            {
                "round": line["round"],
                "kl": float(kl(exact, combined.target.array - exact).mean()),
                "heldout_loss": line["heldout_loss"],
                "bits": line["bits_allotted"],
                "payload_bytes": line["payload_bytes"],
            }
        )
    return rows


def studies(name: str, variants: dict[str, Config]) -> dict[str, list[Rows]]:
    """Return the rows of every variant for every seed; variants of a seed share texts, probe set and base model."""
    found: dict[str, list[Rows]] = {variant: [] for variant in variants}
    for seed in STUDY_SEEDS:
        for variant, config in variants.items():
            ready = seeded(config, seed)

            def compute(ready: Config = ready, seed: int = seed, variant: str = variant) -> Rows:
                say(f"{name}, seed {seed}: {variant}")
                texts = hashlib.sha256(configuration.load(name)[1].encode()).hexdigest()[:8]
                store = RunFolder(KEPT / "studies" / f"{name}-{texts}-{seed}")
                # A part of a federation that was broken off lacks the exact logits of its earlier rounds.
                folder = f"{variant.replace(' ', '-')}-{time.time_ns()}"
                return study(ready, prepare(ready, store), store, folder)

            found[variant].append(kept(name, [ready.model_dump(), seed], compute))
    return found


def adaptive_variants() -> dict[str, Config]:
    """Return the ways to share out the same total."""
    preset, _ = configuration.load("adaptive")
    free = [node.model_copy(update={"clip": None}) for node in preset.nodes]
    uniform = change(preset, budget={"allocator": "uniform", "estimator": "none"})
    return {
        "uniform": uniform,
        "adaptive, second moment (Algorithm 2)": change(preset, budget={"estimator": "second-moment"}),
        "adaptive, distortion": change(preset, budget={"estimator": "distortion"}),
        "optimal, weights known": change(preset, budget={"estimator": "none"}),
        "uniform, no clip: a range for each context": uniform.model_copy(update={"nodes": free}),
    }


REGIMES = {
    "learning": "rate from 2.0 to 0.2 over the rounds, as in the preset",
    "settled": "rate from 0.2 to 0.02: local models move little",
}


def refinement_variants() -> dict[str, Config]:
    """Return vanilla and refinement in the two regimes, and what exact logits would give."""
    preset, _ = configuration.load("refinement")
    found = {}
    for regime, rates in (("learning", (2.0, 0.2)), ("settled", (0.2, 0.02))):
        config = change(preset, local={"rate": rates[0], "last_rate": rates[1]})
        found[f"{regime}: vanilla"] = change(config, codec={"against": "nothing"})
        found[f"{regime}: refinement"] = config
        found[f"{regime}: float32"] = float32_variant(config)
    return found


# ---- the parts of the page


def one_seed(seeds: Sequence[int]) -> str:
    """Say that a single seed has no error bar."""
    return "One seed: no error bar." if len(seeds) == 1 else f"{len(seeds)} seeds."


def part_heterogeneous(workers: int) -> str:
    """Nodes with different models."""
    seeds = RUN_SEEDS["heterogeneous-models"]
    runs = [
        {row["method"]: row["heldout_loss"] for row in whole_run("heterogeneous-models", s, workers)} for s in seeds
    ]
    best = np.mean([min(v for k, v in found.items() if k.startswith("alone")) for found in runs])
    fpld, exact = (float(np.mean([found[m] for found in runs])) for m in ("fpld", "float32 logits"))
    verdict = (
        "It is better than every node alone."
        if fpld < best
        else "So the bits cost next to nothing, and yet this falls short: the student is behind the best node alone. Likely reasons, not "
        "tested: weak models weigh as much as good ones in the combination, and only logits on 8192 contexts carry what was learnt."
    )
    return f"""## Nodes with models of their own

An n-gram model and transformers of three sizes, on four eras; only logits travel, and each node distils its own model from the
combined logits. The student and the pooled model are the middle transformer. An earlier setting (600 base steps, 300 distillation
steps, a deeper model at the last node) was run with seed 0 and fell short as well: student 3.901, best node alone 3.850. It was changed after
that was seen, so another seed is reported.

{run_table("heterogeneous-models", seeds, workers)}

{run_commands("heterogeneous-models", seeds)}

The student has {fpld:.3f} nats, the best node alone {best:.3f}, the student of float32 logits {exact:.3f}. {verdict} A node alone has its own kind of model, so
the lines *alone* compare models as well as texts. {one_seed(seeds)}"""


def part_adaptive(_: int) -> str:
    """Allocation at equal total bits."""
    found = studies("adaptive", adaptive_variants())
    base = [rows[-1]["kl"] for rows in found["uniform"]]
    body = []
    for variant, seeds in found.items():
        last = [rows[-1] for rows in seeds]
        gain = [reference / row["kl"] for reference, row in zip(base, last, strict=True)]
        loss = [row["heldout_loss"] for row in last]
        body.append(
            [
                variant,
                ", ".join(f"{bits:.2f}" for bits in np.mean([row["bits"] for row in last], axis=0)),
                number([1000 * row["kl"] for row in last], 2),
                number(gain, 2),
                number(loss, 4),
                number(_less(loss, [rows[-1]["heldout_loss"] for rows in found["uniform"]]), 4),
            ]
        )
    total = configuration.load("adaptive")[0].budget.total
    head = ["allocation", "bits per coordinate", "KL, 1e-3 nats", "gain over uniform", "held-out nats", "to uniform"]
    return f"""## Adaptive allocation at equal total bits

Four nodes with n-gram models and clips 12, 12, 48, 48; every allocation shares out the same {total:g} bits per coordinate a round, for three
rounds (adaptive: the first one uniform). KL is from the combination of the same models' exact logits to what was combined after the wire,
mean over the probe set, in the last round: the bandwidth loss. Held-out loss is the student's; *to uniform* is paired by seed.
Seeds {STUDY_SEEDS.start} to {STUDY_SEEDS.stop - 1}, mean ± standard error; clips and total were chosen by the range of
logits on the probe set and a trial with seed 100.

{table(head, body)}

{shell("python experiments/results.py --only adaptive", "fpld run adaptive   # one of these federations, with baselines")}

Allocation by the codec's own distortion has half the bandwidth loss of a uniform one, as Theorem 5 says for clips 1 : 4, and is within a few
per cent of the allocation that knows the clips (which needs no uniform first round, and so is ahead in held-out loss). The paper's
second-moment estimator gains little here: all nodes have logits of one size, and only the dither's noise tells it about the clips
([reading 6](paper.md#where-the-text-needs-a-reading)). On held-out loss the order is the same and the differences are small, a hundredth of a nat.
The last row puts all this in its place: without one clip for all contexts, each context stating its own range, even a uniform
allocation beats every allocation with clips by far. Use clips only where a fixed range is wanted."""


def _less(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(values, reference, strict=True)]


def part_refinement(_: int) -> str:
    """Refinement against vanilla at equal bits."""
    found = studies("refinement", refinement_variants())
    rounds = len(next(iter(found.values()))[0])
    body = []
    for variant, seeds in found.items():
        loss = [rows[-1]["heldout_loss"] for rows in seeds]
        exact = [rows[-1]["heldout_loss"] for rows in found[f"{variant.partition(':')[0]}: float32"]]
        cells = [number([1000 * rows[t]["kl"] for rows in seeds], 2) for t in range(rounds)]
        if variant.endswith("float32"):
            cells = ["0"] * rounds
        body.append([variant, f"{seeds[0][0]['bits'][0]:g}", *cells, number(loss, 4), number(_less(loss, exact), 4)])
    head = ["models: scheme", "bits a round", *(f"KL {t + 1}" for t in range(rounds)), "held-out nats", "to float32"]
    factors = [
        float(np.mean([rows[t]["kl"] / rows[t + 1]["kl"] for rows in seeds]))
        for variant, seeds in found.items()
        if variant.endswith("refinement")
        for t in range(rounds - 1)
    ]
    gain = {
        regime: np.mean(
            [
                vanilla[-1]["kl"] / refined[-1]["kl"]
                for vanilla, refined in zip(found[f"{regime}: vanilla"], found[f"{regime}: refinement"], strict=True)
            ]
        )
        for regime in REGIMES
    }
    regimes = "; ".join(f"*{name}*: {text}" for name, text in REGIMES.items())
    return f"""## Refinement against vanilla at equal bits

Four nodes with n-gram models send 2 bits per coordinate in each of {rounds} rounds; refinement codes the difference to the node's own last
reconstruction, vanilla codes the logits anew. Columns *KL t*: bandwidth loss in round t, 1e-3 nats, as above. Two regimes: {regimes}.
Seeds {STUDY_SEEDS.start} to {STUDY_SEEDS.stop - 1}, mean ± standard error; *to float32* is paired by seed. The rates were
chosen on a trial with seed 100.

{table(head, body)}

{shell("python experiments/results.py --only refinement", "fpld run refinement   # one of these federations, with baselines")}

After {rounds} rounds refinement has {gain["learning"]:.0f} times less bandwidth loss than vanilla while the models learn, {gain["settled"]:.0f} times when they are
settled. Vanilla does not improve: each round's noise is new and as large. The theorem's factor of 16 a round is for models that
stand still; here it is {min(factors):.1f} to {max(factors):.1f}, because between two rounds a model takes local steps and starts from a new student, and the range that
must be coded is that movement plus the last error. Two bits with N = 4 symbols are also worth less than the paper's: the step shrinks
by 3, not by 4. The price is memory: both ends keep a reconstruction [m, V] for each node."""


SCENES = (
    ("a 0.32 M model", 16384, 1024, 3.0, 0.32e6),
    ("a 0.32 M model, wider uplink", 16384, 1024, 6.0, 0.32e6),
    ("a small probe set", 2048, 1024, 4.0, 0.32e6),
    ("a 30 M model over the same BPE", 16384, 1024, 4.0, 30e6),
    ("SmolLM2-135M", 2048, 49152, 2.0, 134.5e6),
    ("SmolLM2-135M, more contexts", 16384, 49152, 2.0, 134.5e6),
    ("a 1.7 B model, the same vocabulary", 16384, 49152, 4.0, 1.7e9),
)


def part_sizes(_: int) -> str:
    """FPLD's frames against FedAvg's weights."""
    codec = codecs.get("uniform")
    body = []
    for name, contexts, vocab, bits, parameters in SCENES:
        plan = Plan(
            run_key=bytes(16), round=1, node=0, probe=bytes(32), contexts=contexts, vocab=vocab, bits=bits * vocab
        )
        frame = codec.payload_bytes(plan) + OVERHEAD  # type: ignore[attr-defined]
        body.append(
            [
                name,
                f"{contexts}",
                f"{vocab}",
                f"{bits:g}",
                f"{frame / 1e6:,.1f}",
                f"{frame / 4e6:,.2f}",
                f"{parameters / 1e6:,.2f}",
                f"{4 * parameters / 1e6:,.1f}",
                f"{frame / (4 * parameters):.2f}",
            ]
        )
    head = [
        "scene",
        "m",
        "V",
        "bits",
        "frame, MB",
        "break-even, M parameters",
        "the model, M",
        "its weights, MB",
        "ratio",
    ]
    return f"""## From which model size logits cost less than weights

One node, one round: a frame of the uniform codec has m V b / 8 bytes and {OVERHEAD} of header and checksum, whatever the model; FedAvg in float32 sends 4
bytes for each parameter. So logits cost less from m V b / 32 parameters on.

{table(head, body)}

{shell("python experiments/results.py --only sizes")}

For a model of 0.32 M parameters the uniform codec costs several times FedAvg's weights; from about 1.6 M parameters (3 bits) or 3.1 M (6 bits) it costs
less. A large vocabulary moves the line: with V = 49152 and 16384 contexts even two bits are a third of the weights of a 135 M model, and only a
small probe set or a codec below one bit per coordinate makes logits cheap. The comparison is with plain float32 weights: 8-bit weights
or low-rank updates would move it by 4 and more in FedAvg's favour; what they cannot do is combine models that differ."""


PARTS: dict[str, Callable[[int], str]] = {
    "heterogeneous-models": part_heterogeneous,
    "adaptive": part_adaptive,
    "refinement": part_refinement,
    "sizes": part_sizes,
}


def page(sections: Sequence[str]) -> str:
    """Put the page together."""
    found = versions()
    ran = ", ".join(f"{name} {found[name]}" for name in ("python", "numpy", "torch") if name in found)
    return "\n\n".join(
        [
            f"""# Studies of the method

Made by `make results` (`python experiments/results.py`) on a machine with {os.cpu_count()} cores, without a GPU: {ran}. The machine was shared, so
seconds are upper bounds. Losses are means over the held-out text of all nodes, in nats per token. Seeds stand beside each table; a
seed draws the held-out documents, the probe set, initial weights, minibatches and dither. A table of a single seed has no error bar, and with two seeds a standard error says little.
The demonstration, the hospitals and Wikipedia, beside their rivals, have a page of their own: [students.md](students.md).
A pretrained SmolLM2-135M at every node has a page of its own: [results-huggingface.md](results-huggingface.md).""",
            *sections,
        ]
    ) + "\n"  # fmt: skip


def main() -> None:
    """Make the parts that are asked for, take the others as they were, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME", help=", ".join(PARTS))
    parser.add_argument("--workers", type=int, default=2, help="processes of a run (default: 2; results do not change)")
    arguments = parser.parse_args()
    sections = []
    for name, make in PARTS.items():
        file = KEPT / f"section-{name}.md"
        if name in arguments.only:
            write_atomic(file, make(arguments.workers).encode())
        if file.exists():
            sections.append(file.read_text())
        else:
            say(f"{name} is not there yet: run without --only, or with it")
    write_atomic(PAGE, page(sections).encode())
    say(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
