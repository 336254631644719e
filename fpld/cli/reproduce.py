"""`fpld reproduce`: the paper's figures and theorems, with numbers next to the paper's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fpld.errors import InputError
from fpld.paper.reproduce import REPRODUCTIONS
from fpld.report.figures import save_figure
from fpld.storage.files import write_csv

if TYPE_CHECKING:
    import argparse

    from fpld.cli.output import Output, Row
    from fpld.paper.reproduce import Reproduction

HELP = "the paper's figures and theorems, with our numbers next to the paper's"
EPILOG = """\
Writes NAME.csv, NAME.png and NAME.svg into the output folder. The exit code is 1 if a claim of the paper does
not hold in our numbers. All at the paper's sizes: K = 4, V = 256, n = 30000, 30 and 100 seeds.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("what", choices=[*REPRODUCTIONS, "all"], help="which one, or all of them")
    parser.add_argument(
        "--out", type=Path, default=Path("out"), metavar="DIR", help="folder for figures (default: out)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of every draw (default: 0)")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Simulate, print, draw; say whether every claim holds."""
    if not 0 <= arguments.seed < 2**32:
        raise InputError(f"--seed must be from 0 to {2**32 - 1}, got {arguments.seed}")
    chosen = list(REPRODUCTIONS) if arguments.what == "all" else [arguments.what]
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        results = [_one(REPRODUCTIONS[name], arguments.seed, arguments.out, output) for name in chosen]
    except OSError as error:
        raise InputError(f"--out: cannot write to {arguments.out}: {error.strerror or error}") from None
    if output.json:
        mark = len(chosen) > 1
        rows = [
            {"figure": name, **row} if mark else row
            for name, (found, _) in zip(chosen, results, strict=True)
            for row in found
        ]
        output.result(f"reproduce {arguments.what}", rows)
    missed = sum(count for _, count in results)
    output.note(f"figures and tables: {arguments.out}/ ({', '.join(f'{name}.png .svg .csv' for name in chosen)})")
    output.note("every claim holds" if not missed else f"{missed} claims do not hold")
    return 1 if missed else 0


def _one(reproduction: Reproduction, seed: int, out: Path, output: Output) -> tuple[list[Row], int]:
    with output.progress(reproduction.title, reproduction.steps) as tick:
        rows = reproduction.simulate(seed, tick)
    write_csv(out / f"{reproduction.name}.csv", rows)
    save_figure(partial(reproduction.draw, rows), out / reproduction.name, reproduction.size)
    claims = reproduction.claims(rows)
    output.table(rows, title=f"{reproduction.title} ({reproduction.name}.csv)")
    output.table(
        [
            {"claim": c.statement, "paper": c.paper, "measured": c.measured, "holds": "yes" if c.holds else "NO"}
            for c in claims
        ]
    )
    return rows, sum(not claim.holds for claim in claims)
