"""Write the logits of real nodes and their prior as a scene for `fpld bench codecs --logits`.

    python benchmarks/real_logits.py RUN OUT.safetensors [--base] [--sequences 16]

RUN is the folder of a finished run. Each node fine-tunes the student of its last round (with --base: the base model, as
in the first round) on its own text for one more round; the prior is the model that they started from.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from fpld import config as configuration
from fpld import students
from fpld.arrays import write_arrays
from fpld.data import ProbeSet
from fpld.federation.prepare import base_file
from fpld.federation.store import RunFolder
from fpld.federation.training import one_thread
from fpld.seeds import derive_seed


def main() -> None:
    """Read the arguments, train, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", action="store_true", help="start from the base model: the first round")
    parser.add_argument("--sequences", type=int, default=16, help="probe sequences to keep (default: 16)")
    a = parser.parse_args()
    store = RunFolder(a.run)
    config = configuration.parse((a.run / "config.toml").read_text(), "config.toml")
    one_thread(config.student["kind"])
    start = students.load(a.run / (base_file(config, None) if a.base else "student.safetensors"))
    sequences = ProbeSet.load(a.run / "probe.json").sequences[: a.sequences]
    logits = []
    for index in range(len(config.nodes)):
        model = start.copy()
        tokens = store.read_arrays(f"text/{index}.safetensors")[0]["tokens"]
        seed = derive_seed(config.run.seed, "real logits", index)
        model.finetune(tokens, steps=config.local.steps, seed=seed, rate=config.local.rate)
        logits.append(model.logits(sequences))
    write_arrays(a.out, {"logits": np.stack(logits), "prior": start.logits(sequences)}, {})


if __name__ == "__main__":
    main()
