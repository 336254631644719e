"""What sharing an update's bits over tensors is worth: KL from a node's exact model to the rebuilt one.

    fpld run demo --out runs/demo
    python -m benchmarks.update_bits runs/demo

The base and the text of the first node are the run's; the node's model is trained as in the run. Its update is coded
with one over a tensor's mean square as the weight of its error (`equal`), and with the curvature of its model on public
sequences, as nodes do. The divergence is the mean over the contexts of other public sequences, in nats, with the
standard error over rotations. The row of 0 bits is the base.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.cli.output import Output
from fpld.codecs.updates import decode_update, encode_update
from fpld.config import read_config
from fpld.federation import workers
from fpld.node.spec import base_file
from fpld.node.training import open_student
from fpld.numerics import log_softmax
from fpld.protocol.updates import CURVATURE_SEQUENCES
from fpld.storage.arrays import read_arrays
from fpld.storage.run_folder import PUBLIC, text_file

if TYPE_CHECKING:
    from fpld.students import Student
    from fpld.types import Floats, Tokens

BITS = (1.5, 2.0, 2.5, 3.0, 4.0)
SEEDS = 3
SEQUENCES = 256  # on which models are compared


def divergence(exact: Floats, student: Student, sequences: Tokens) -> float:
    """Return the mean KL divergence of a model's predictions from exact ones [m, V], in nats."""
    found = log_softmax(student.logits(sequences).reshape(exact.shape))
    return float((np.exp(exact) * (exact - found)).sum(axis=1).mean())


def measure(run: Path) -> list[dict[str, Any]]:
    """Return a row for each number of bits and way of sharing them."""
    config, _ = read_config(run / "config.toml")
    base = run / base_file(config, None)
    length = config.probe.length
    tokens = read_arrays(run / PUBLIC)[0]["tokens"]
    windows = tokens[: len(tokens) // length * length].reshape(-1, length)
    drawn = np.random.default_rng(0).permutation(windows)[: CURVATURE_SEQUENCES + SEQUENCES]
    compared = drawn[CURVATURE_SEQUENCES:]
    start = open_student(base)
    trained = open_student(
        base, workers.finetune(base, None, [run / text_file(0)], config.local.steps, config.run.seed, config.local.rate)
    )
    exact = log_softmax(trained.logits(compared).reshape(compared.size, -1))
    update = {name: array - start.state()[name] for name, array in trained.state().items()}
    curvature = trained.curvature(drawn[:CURVATURE_SEQUENCES])
    rows: list[dict[str, Any]] = [
        {"bits": 0.0, "shared": "", "bytes": 0, "kl": divergence(exact, start, compared), "se": 0.0}
    ]
    for bits in BITS:
        for shared, weights in (("equal", None), ("curvature", curvature)):
            found = []
            for seed in range(SEEDS):
                data = encode_update(update, bits=bits, seed=seed, weights=weights)
                received = decode_update(data, update, seed=seed)
                rebuilt = {name: array + received[name] for name, array in start.state().items()}
                found.append(divergence(exact, open_student(base, rebuilt), compared))
            error = float(np.std(found, ddof=1)) / SEEDS**0.5
            rows.append({"bits": bits, "shared": shared, "bytes": len(data), "kl": float(np.mean(found)), "se": error})
    return rows


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    out = Output(json=options.json)
    out.result("update_bits", measure(options.run), title="What sharing bits over tensors is worth")


if __name__ == "__main__":
    main()
