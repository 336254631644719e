"""Run the studies of allocation and refinement, and keep what they found under out/results/.

    python experiments/results.py                           both (most of an hour of one core)
    python experiments/results.py --only adaptive           this one
    python -m docs.kept_results adaptive out/results    then keep it for docs/results.md

A study that was interrupted goes on where it stopped. A changed preset is a new study: its old results are not used.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import config as configuration
from fpld.baselines.reference import float32_variant
from fpld.codecs import decode
from fpld.engines.local import LocalEngine
from fpld.engines.pool import Inline
from fpld.federation.callbacks import Callback
from fpld.federation.prepare import prepare
from fpld.federation.rounds import Federation
from fpld.node.round import answer_task
from fpld.numerics import kl
from fpld.protocol.wire import decode_frame
from fpld.registry import codecs, rules
from fpld.rules import combine
from fpld.storage.files import write_atomic
from fpld.storage.run_folder import RunFolder
from fpld.types import Decoded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fpld.config import Config
    from fpld.engines.base import CollectedReplies
    from fpld.federation.prepare import Prepared
    from fpld.protocol import Combined, Receipt, Task

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "out" / "results"
STUDY_SEEDS = range(5)
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


# ---- studies: one federation after another in this process, with the nodes' exact logits beside what they send


class ExactEngine(LocalEngine):
    """The local engine, which also keeps the nodes' exact logits: each node does its task twice, once in float32."""

    def __init__(self, federation: Federation, bytes_per_token: float) -> None:
        super().__init__(federation, bytes_per_token)
        self.exact: list[np.ndarray[Any, Any]] = []

    def collect(self, tasks: Mapping[int, Task], deliver: Callable[[int, bytes], Receipt]) -> CollectedReplies:
        """Collect the exact logits, then the frames."""
        self.exact = [self._exact(node, task) for node, task in sorted(tasks.items())]
        return super().collect(tasks, deliver)

    def _exact(self, node: int, task: Task) -> np.ndarray[Any, Any]:
        """Return the logits that a node is about to code: training is the same for the same task and folder."""
        paths = self.paths(node)
        copy = replace(paths, folder=paths.folder.parents[1] / "exact" / str(node))
        shutil.rmtree(copy.folder, ignore_errors=True)
        if paths.folder.exists():
            shutil.copytree(paths.folder, copy.folder)
        plan = replace(task.plan, bits=32.0 * task.plan.vocab, clip=None, prior=None)
        exact = replace(task, plan=plan, codec="float32", against="nothing")
        frame = answer_task(self.specs[node], copy, exact)
        codec = codecs.get("float32")
        return decode(codec, decode_frame(frame, plan, codec.code), plan).values


class LastTarget(Callback):
    """Keep the target that the last round was combined into."""

    def combined(self, combined: Combined) -> None:
        """Take the target of a round."""
        self.target = combined.target


def study(config: Config, prepared: Prepared, store: RunFolder, name: str) -> Rows:
    """Run a federation, and measure each round the KL from what exact logits of the same models would give."""
    rows = []
    last = LastTarget()
    federation = Federation(config, store, prepared, name, pool=Inline(), callbacks=[last])
    engine = ExactEngine(federation, prepared.bytes_per_token)
    while not federation.done:
        record = federation.advance(engine)
        none = np.zeros((1, 1), np.float32)
        exact = combine(rules.get(config.combine.rule), [Decoded(logits, none, none) for logits in engine.exact])
        rows.append(
            {
                "round": record.round,
                "kl": float(kl(exact, last.target.array - exact).mean()),
                "heldout_loss": record.heldout_loss,
                "bits": record.bits_allotted,
                "payload_bytes": record.payload_bytes,
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
                texts = hashlib.sha256(configuration.read_config(name)[1].encode()).hexdigest()[:8]
                store = RunFolder(KEPT / "studies" / f"{name}-{texts}-{seed}")
                # A part of a federation that was broken off lacks the exact logits of its earlier rounds.
                folder = f"{variant.replace(' ', '-')}-{time.time_ns()}"
                return study(ready, prepare(ready, store), store, folder)

            found[variant].append(kept(name, [ready.model_dump(), seed], compute))
    return found


def adaptive_variants() -> dict[str, Config]:
    """Return the ways to share out the same total."""
    preset, _ = configuration.read_config("adaptive")
    free = [node.model_copy(update={"clip": None}) for node in preset.nodes]
    uniform = change(preset, budget={"allocator": "uniform", "estimator": "none"})
    return {
        "uniform": uniform,
        "adaptive, second moment (Algorithm 2)": change(preset, budget={"estimator": "second-moment"}),
        "adaptive, distortion": change(preset, budget={"estimator": "distortion"}),
        "optimal, weights known": change(preset, budget={"estimator": "none"}),
        "uniform, no clip: a range for each context": uniform.model_copy(update={"nodes": free}),
    }


def refinement_variants() -> dict[str, Config]:
    """Return vanilla and refinement in the two regimes, and what exact logits would give."""
    preset, _ = configuration.read_config("refinement")
    found = {}
    for regime, rates in (("learning", (2.0, 0.2)), ("settled", (0.2, 0.02))):
        config = change(preset, local={"rate": rates[0], "last_rate": rates[1]})
        found[f"{regime}: vanilla"] = change(config, codec={"against": "nothing"})
        found[f"{regime}: refinement"] = config
        found[f"{regime}: float32"] = float32_variant(config)
    return found


# ---- what is kept of each


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return a mean and its standard error under their names."""
    error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return {name: float(np.mean(values)), f"{name}_se": float(error)}


def adaptive() -> Rows:
    """Return the ways to share out one total: bits, bandwidth loss, gain over equal bits, the student's loss.

    `kl_1e3` is the KL from the combination of the same models' exact logits to what was combined after the wire, mean
    over the probe set, in the last round, in thousandths of a nat.
    """
    found = studies("adaptive", adaptive_variants())
    plain = [rows[-1] for rows in found["uniform"]]
    table = []
    for variant, seeds in found.items():
        last = [rows[-1] for rows in seeds]
        pairs = list(zip(plain, last, strict=True))
        row: dict[str, Any] = {
            "allocation": variant,
            "bits": [float(b) for b in np.mean([each["bits"] for each in last], axis=0)],
        }
        row |= spread("kl_1e3", [1000 * each["kl"] for each in last])
        row |= spread("gain", [reference["kl"] / each["kl"] for reference, each in pairs])
        row |= spread("heldout_loss", [each["heldout_loss"] for each in last])
        table.append(row | spread("behind", [b["heldout_loss"] - a["heldout_loss"] for a, b in pairs]))
    return table


def refinement() -> Rows:
    """Return refinement, vanilla and exact logits in both regimes: bandwidth loss by round, the student's loss."""
    found = studies("refinement", refinement_variants())
    table = []
    for variant, seeds in found.items():
        models, scheme = variant.split(": ")
        exact = [rows[-1]["heldout_loss"] for rows in found[f"{models}: float32"]]
        by_round = [spread("kl", [1000 * rows[t]["kl"] for rows in seeds]) for t in range(len(seeds[0]))]
        loss = [rows[-1]["heldout_loss"] for rows in seeds]
        row: dict[str, Any] = {"models": models, "scheme": scheme, "bits": float(seeds[0][0]["bits"][0])}
        row["kl_1e3"] = [0.0 if scheme == "float32" else each["kl"] for each in by_round]
        row["kl_1e3_se"] = [None if scheme == "float32" else each["kl_se"] for each in by_round]
        row |= spread("heldout_loss", loss)
        table.append(row | spread("behind", [a - b for a, b in zip(loss, exact, strict=True)]))
    return table


STUDIES: dict[str, Callable[[], Rows]] = {"adaptive": adaptive, "refinement": refinement}


def main() -> None:
    """Make the studies that are asked for, and write what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=STUDIES, default=list(STUDIES), metavar="NAME")
    for name in parser.parse_args().only:
        command = f"python experiments/results.py --only {name}"
        found = {"command": command, "seeds": list(STUDY_SEEDS), "rows": STUDIES[name]()}
        write_atomic(KEPT / f"{name}.json", (json.dumps(found, indent=1) + "\n").encode())
        say(f"wrote {(KEPT / name).relative_to(ROOT)}.json: python -m docs.kept_results {name} out/results")


if __name__ == "__main__":
    main()
