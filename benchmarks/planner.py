"""Collect what kept runs teach the planner about held-out loss, and check its forecasts on texts that are left out.

    python -m benchmarks.planner             print the check: each run beside what the other texts forecast
    python -m benchmarks.planner --write     write fpld/planner/gains.json and the table of docs/planning.md too

Losses and bytes are those of docs/results/. What a run sent and how long it was distilled stands here, in `SOURCES`, as
it was at the commit of the result: presets have changed since.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fpld.codecs.updates import affordable_bits
from fpld.planner.expected import GAINS, KeptGain, TextCheck, check_texts, equal_noise_bits
from fpld.protocol.wire import OVERHEAD_BYTES
from fpld.storage.files import write_atomic

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
FILE = ROOT / "fpld/planner" / GAINS
PAGE = ROOT / "docs/planning.md"
FIRST = "<!-- expected -->"
LAST = "<!-- end -->"
WEIGHTS = 1_082_304  # of the demonstration's model
SENT = {"labels": "labels", "own": "labels, models differ", "text": "text and labels", "updates": "updates"}

INSIDE = {True: "yes", False: "**no**", None: "-"}


@dataclass(frozen=True, slots=True)
class Source:
    """A row of a kept result, and the settings of its run.

    Parameters
    ----------
    bits
        Of a context, at each node; None: from the bytes that were sent, equal at all nodes.
    steps
        Of distillation; None of a pretrained model.
    usual
        Whether model, base and local training are those of the preset `rivals`.
    """

    result: str
    text: str
    sends: str = "labels"
    method: str = "fpld"
    nodes: int = 5
    contexts: int = 92_160
    bits: tuple[float, ...] | None = (24.0, 24.0, 44.0, 44.0, 44.0)
    steps: int | None = 2000
    usual: bool = True


LINKED = (46.27, 46.27, 37.49, 24.99, 24.99)
"""Bits of the preset `hospitals`, by its links and its total: `fpld plan hospitals`."""
SOURCES = (
    Source("rivals", "presidents"),
    Source("wikipedia-labels", "Wikipedia"),
    Source("hospitals-labels", "abstracts", bits=LINKED),
    Source("huggingface", "Wikipedia", nodes=4, contexts=16_384, bits=(120.0,) * 4, steps=None, usual=False),
    Source(
        "heterogeneous-models",
        "presidents",
        "own",
        nodes=4,
        contexts=46_080,
        bits=(40.0,) * 4,
        steps=600,
        usual=False,
    ),
    Source("policies", "presidents", "text", steps=4000),
    Source("wikipedia", "Wikipedia", "text", steps=4000),
    Source("hospitals", "abstracts", "text", bits=LINKED, steps=4000),
    Source("hospitals", "abstracts", "updates", "updates, 3 bits", bits=None, steps=4000),
    Source("policies", "presidents", "updates", "updates, 3 bits", bits=None, steps=4000),
    Source("wikipedia", "Wikipedia", "updates", "updates, 3 bits", bits=None, steps=4000),
)
EQUAL_BYTES_STEPS = 600  # of `python -m benchmarks.labels`


def collect() -> list[KeptGain]:
    """Return all kept runs that the planner learns from; a result that is not kept is left out."""
    kept = [source for source in SOURCES if (RESULTS / f"{source.result}.json").exists()]
    return [*(_gain(source) for source in kept), *_equal_bytes()]


def _gain(source: Source) -> KeptGain:
    rows = _rows(source.result)
    base = rows["base"]["heldout_loss"]
    gap = base - rows["ensemble"]["heldout_loss"]
    if source.bits is not None:
        bits = equal_noise_bits(np.array(source.bits))
    else:
        payload = rows[source.method]["uplink_bytes"] // source.nodes - OVERHEAD_BYTES
        # What entropy coding saves is under 1 %.
        bits = round(affordable_bits(WEIGHTS, round(1.01 * payload), 8.0))
    share = (base - rows[source.method]["heldout_loss"]) / gap
    sizes = (source.nodes, source.contexts, round(bits, 2), source.steps)
    return KeptGain(source.result, source.text, source.sends, *sizes, round(gap, 4), round(share, 4), source.usual)


def _equal_bytes() -> list[KeptGain]:
    """Return students of the nodes of `rivals` at other budgets, which began with its base model."""
    rivals = _rows("rivals")
    base = rivals["base"]["heldout_loss"]
    gap = base - rivals["ensemble"]["heldout_loss"]
    gains = []
    for row in json.loads((RESULTS / "equal-bytes.json").read_text())["rows"]:
        if row["codec"] == "samples":
            bits = 8e6 * row["megabytes"] / 5 / row["contexts"]
            share = (base - row["heldout_loss"]) / gap
            sizes = (5, row["contexts"], round(bits, 2), EQUAL_BYTES_STEPS)
            name = f"equal-bytes {row['megabytes']:g} MB"
            gains.append(KeptGain(name, "presidents", "labels", *sizes, round(gap, 4), round(share, 4), usual=True))
    return gains


def _rows(result: str) -> dict[str, dict[str, float]]:
    return {row["method"]: row for row in json.loads((RESULTS / f"{result}.json").read_text())["rows"]}


def dump(rows: list[KeptGain]) -> str:
    """Return runs as the JSON that the package has, a line for each."""
    lines = (json.dumps(row._asdict()) for row in rows)
    return "[\n" + ",\n".join(lines) + "\n]\n"


def table(rows: list[KeptGain]) -> str:
    """Return the table of docs/planning.md: each run, and what runs on other texts forecast for it."""
    lines = [
        "| kept run | text | sends | share | by other texts | inside | gain, nats | by other texts |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for check in check_texts(rows):
        run = check.run
        expected = check.expected
        span = "one text" if check.inside is None else f"{expected.low:.2f} to {expected.high:.2f}"
        share = f"{run.share:.2f} | {expected.value:.2f} ({span})"
        cells = f"`{run.result}` | {run.text} | {SENT[run.sends]} | {share} | {INSIDE[check.inside]}"
        lines.append(f"| {cells} | {run.share * run.gap:.3f} | {_forecast_nats(check)} |")
    return "\n".join(lines)


def _forecast_nats(check: TextCheck) -> str:
    return "" if check.gap is None else f"{check.expected.value * check.gap.value:.3f}"


def main() -> None:
    """Print the check; write the file and the page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write gains.json and the table of docs/planning.md")
    rows = collect()
    print(table(rows))
    if parser.parse_args().write:
        head, first, rest = PAGE.read_text("utf-8").partition(FIRST)
        _, last, tail = rest.partition(LAST)
        if not (first and last):
            parser.error(f"{PAGE} must have {FIRST} and {LAST}")
        write_atomic(FILE, dump(rows).encode())
        write_atomic(PAGE, f"{head}{FIRST}\n{table(rows)}\n{LAST}{tail}".encode())


if __name__ == "__main__":
    main()
