"""Write docs/performance.md: speed of the codecs and growth of a round, as measured here; the notes go below."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.scaling import BITS, GRID, child

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "performance.md"
NOTES = ROOT / "benchmarks" / "performance-notes.md"
UNIFORM = "1,1.5,2,2.37,3,3.37,4,4.5,5,5.5,6,6.5,7,7.5,8"
PREDICTIVE = "0.02,0.05,0.1,0.25,0.5,1,2"
SAMPLES = "30,100,640"
OTHERS = "4,32"
LABELS = "-m", "benchmarks.labels_memory"
FEWER = "--peers", "benchmarks.peers", "--contexts", "16", "--repeat", "3"


def speed(*arguments: str) -> list[dict[str, Any]]:
    """Run `fpld bench speed`."""
    command = [sys.executable, "-m", "fpld", "bench", "speed", "--json", "--out", "out", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in body])


def labels_memory() -> dict[str, Any]:
    """Measure a large round of sampled labels."""
    done = subprocess.run([sys.executable, *LABELS], check=True, capture_output=True, text=True, cwd=ROOT)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def ratios(rows: list[dict[str, Any]], unit: str = "bits") -> str:
    """Return a line for each codec and budget, a column for each operation."""
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    found = {(row["codec"], row[unit], row["operation"]): row["ratio"] for row in rows}
    pairs = list(dict.fromkeys((row["codec"], row[unit]) for row in rows))
    body = [
        [codec, f"{bits:g}", *(f"{found[codec, bits, o]:.2g}" if (codec, bits, o) in found else "" for o in operations)]
        for codec, bits in pairs
    ]
    return table(["codec", unit.replace("_", " "), *operations], body)


def growth(points: list[dict[str, Any]]) -> str:
    """Return a line for each size of a round."""
    body = [
        [
            f"{p['nodes']}",
            f"{p['contexts']}",
            f"{p['vocab']}",
            f"{1e3 * p['coding_seconds_per_node']:.0f}",
            f"{1e3 * p['checking_seconds'] / p['nodes']:.1f}",
            f"{1e3 * p['combining_seconds'] / p['nodes']:.1f}",
            f"{1e3 * p['processor_seconds'] / p['nodes']:.1f}",
            f"{p['checking_seconds'] + p['combining_seconds']:.2f}",
            f"{p['frames_mb']:.0f}",
            f"{p['peak_mb']:.0f}",
            f"{p['peak_mb'] - p['start_mb'] - p['frames_mb']:.0f}",
        ]
        for p in points
    ]
    head = [
        "K",
        "m",
        "V",
        "coding, ms",
        "checking, ms",
        "combining, ms",
        "processor, ms",
        "all, s",
        "frames, MB",
        "peak, MB",
        "less, MB",
    ]
    return table(head, body)


def main() -> None:
    """Measure and write."""
    names = ("numpy", "numba", "llvmlite")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {_processor()}"
    ran = ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in names)])
    uniform = speed("--codec", "uniform", "--bits", UNIFORM)
    predictive = speed("--codec", "predictive", "--bits", PREDICTIVE, "--repeat", "3")
    samples = speed("--codec", "samples", "--context-bits", SAMPLES, "--repeat", "9")
    others = speed("--bits", OTHERS, *FEWER)
    points = [child(*point, "mean") for part in GRID.values() for point in part]
    mixed = [child(*point, "mixture") for point in GRID["large"]]
    labels = labels_memory()
    text = f"""# Performance

Made by `make bench` ({machine}; {ran}). Ratios are within one run. The machine was shared: from one run to another they moved by up to 30 %.

## Codecs on one thread

Coordinates per second over those of numpy's `acc += x` on float32, which is what an aggregator of raw logits must do at least; V = 32000, m = 512 unless said. Logits are as
peaked as a language model's (`zipf-peaked` of `fpld bench codecs`), the predictive codec's prior is half a nat away. `decode + add` is of eight nodes at
a time, `round` is all that the aggregator does with a frame: checksum, check, spool, decode, combine.

```sh
fpld bench speed --codec uniform --bits {UNIFORM}
```

{ratios(uniform)}

```sh
fpld bench speed --codec predictive --bits {PREDICTIVE} --repeat 3
fpld bench speed --bits {OTHERS} {" ".join(FEWER)}
```

{ratios(predictive)}

{ratios(others)}

Sampled labels have budgets per context; what is added up stays sparse:

```sh
fpld bench speed --codec samples --context-bits {SAMPLES} --repeat 9
```

{ratios(samples, "context_bits")}

`uniform (numpy)` is the reference in NumPy: the same bytes. The peers are readable NumPy, not what their authors could do.

## A round as it grows

Rule `mean` at {BITS:g} bits, a process for each line, all cores. Times but `all` are per node; `processor` is what all cores
spend on checking and combining. `less` is the peak less what the process had at the
start and less the frames; of these at most 268 MB lie in memory, the others in a temporary file, mapped where they are read.

```sh
python benchmarks/scaling.py
```

{growth(points)}

The last line is a round of 64 nodes. With the rule `mixture`:

{growth(mixed)}

## A large round of sampled labels

A round of sampled labels in a fresh process. `beyond` is the peak less what the process held before the first frame and less the frames. With a prior that is computed and rounded block by
block (`--computed`) a round takes minutes longer for each pass over it.

```sh
python {" ".join(LABELS)}   # codes eight frames first
```

{table(list(labels), [[f"{value:.4g}" if isinstance(value, float) else f"{value}" for value in labels.values()]])}

{NOTES.read_text().rstrip()}
"""
    PAGE.write_text(text)
    print(f"wrote {PAGE.relative_to(ROOT)}")


def _processor() -> str:
    """Return the processor's name, where the system says it."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor() or "unknown processor"


if __name__ == "__main__":
    main()
