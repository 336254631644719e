"""`fpld reproduce`, `fpld allocate`, `fpld bounds`: the paper's figures, Theorem 5, and every bound."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import validation
from fpld.budget.allocators import round_bits
from fpld.cli.arguments import Command, numbers, one_or_each
from fpld.errors import InputError
from fpld.paper import theory
from fpld.paper.reproduce import REPRODUCTIONS
from fpld.registry import allocators
from fpld.report.draw import save_figure
from fpld.storage.files import write_csv

if TYPE_CHECKING:
    import argparse

    from fpld.cli.output import Output, Row
    from fpld.paper.reproduce import Reproduction

_ALLOCATE_EPILOG = """\
Bits are per probe context. A node of weight w at B bits and vocabulary V adds w * 2^(-2B/V) to the loss. A natural
weight is the square of its clip level. Example:

  fpld allocate --weights 1,1,16,16 --total 2048 --vocab 256 --caps 2048,2048,600,2048
"""

_BOUNDS_EPILOG = """\
--bits and --clip take one number for all nodes, or one for each. The paper gives no values for the constants c1 and
c2. They are options here, and the data and probe terms are known only up to them. Example:

  fpld bounds --nodes 4 --vocab 256 --bits 4 --clip 1 --samples 30000 --contexts 10000 --rounds 4
"""


def _configure_allocate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", type=numbers, required=True, metavar="W,W,...", help="one weight for each node")
    parser.add_argument("--total", type=float, required=True, metavar="BITS", help="bits per probe context, all nodes")
    parser.add_argument("--vocab", type=int, required=True, metavar="V", help="vocabulary size")
    parser.add_argument("--caps", type=numbers, metavar="B,B,...", help="most bits for each node (or one for all)")
    parser.add_argument("--floors", type=numbers, metavar="B,B,...", help="least bits for each node (or one for all)")
    parser.add_argument(
        "--policy", default="optimal", help=f"one of {', '.join(allocators.names())} (default: optimal)"
    )
    parser.add_argument("--whole", action="store_true", help="round to whole bits, keeping the total")


def _allocate(arguments: argparse.Namespace, output: Output) -> int:
    """Print the bits of each node."""
    nodes = len(arguments.weights)
    caps = one_or_each(arguments.caps, nodes)
    floors = one_or_each(arguments.floors, nodes)
    allocator = allocators.get(arguments.policy)
    bits = allocator(arguments.weights, arguments.total, arguments.vocab, caps, floors)
    shown = round_bits(bits, caps).tolist() if arguments.whole else bits.tolist()
    rows = [
        {"node": node, "weight": weight, "bits": value, "bits_per_coordinate": value / arguments.vocab}
        for node, (weight, value) in enumerate(zip(arguments.weights, shown, strict=True))
    ]
    output.result("allocate", rows, title=f"Bits per probe context ({arguments.policy})")
    loss = theory.objective(shown, arguments.weights, arguments.vocab).total
    output.note(f"sum {sum(shown):g} of {arguments.total:g} bits; weighted quantization term F = {loss:.4g}")
    return 0


def _configure_bounds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=4, metavar="K", help="number of nodes (default: 4)")
    parser.add_argument("--vocab", type=int, default=256, metavar="V", help="vocabulary size (default: 256)")
    parser.add_argument("--bits", type=numbers, default=[4.0], metavar="b", help="bits per coordinate (default: 4)")
    parser.add_argument("--clip", type=numbers, default=[1.0], metavar="L", help="clip level (default: 1)")
    parser.add_argument(
        "--samples", type=float, default=30_000, metavar="n", help="training samples per node (default: 30000)"
    )
    parser.add_argument("--contexts", type=float, default=10_000, metavar="m", help="probe contexts (default: 10000)")
    parser.add_argument("--rounds", type=int, default=1, metavar="T", help="rounds of refinement (default: 1)")
    parser.add_argument("--warmup", type=int, default=1, metavar="T0", help="warm-up rounds (default: 1)")
    parser.add_argument("--delta", type=float, default=0.05, help="probability that a bound may fail (default: 0.05)")
    parser.add_argument("--peak", type=float, metavar="P", help="largest probability of a token (default: 1/V)")
    parser.add_argument(
        "--dimension", type=float, default=1.0, metavar="d", help="parameters of the family (default: 1)"
    )
    parser.add_argument(
        "--coverage",
        type=float,
        default=1.0,
        metavar="rho",
        help="largest ratio of the nodes' density of contexts to the probe set's (default: 1)",
    )
    parser.add_argument("--c1", type=float, default=0.5, help="constant of the data term (default: 0.5)")
    parser.add_argument("--c2", type=float, default=1.0, help="constant of the probe term (default: 1)")


def _bounds(arguments: argparse.Namespace, output: Output) -> int:
    """Print one row for each quantity."""
    output.result("bounds", _bound_rows(arguments), title="The paper's bounds (KL in nats, bits per coordinate)")
    return 0


def _bound_rows(a: argparse.Namespace) -> list[dict[str, Any]]:
    """Evaluate every statement."""
    bits = _each("bits", a.bits, a.nodes)
    clips = _each("clip", a.clip, a.nodes)
    largest = float(clips.max())
    b0 = float(bits.mean())
    if a.peak is not None and not 1 / a.vocab <= a.peak <= 1:
        raise InputError(f"--peak must be from 1/V = {1 / a.vocab:g} to 1, got {a.peak:g}")
    # Lemma 7 gives 1 - max p <= c_p; the flattest distribution has c_p = 1 - 1/V.
    c_p = 1 - (1 / a.vocab if a.peak is None else a.peak)
    terms = {
        "samples": a.samples,
        "contexts": a.contexts,
        "dimension": a.dimension,
        "coverage": a.coverage,
        "delta": a.delta,
        "c_1": a.c1,
        "c_2": a.c2,
    }
    upper = theory.heterogeneous_upper(bits, clips, vocab=a.vocab, nodes=a.nodes, **terms)
    lower = theory.matching_lower(bits, clips, vocab=a.vocab, c_p=c_p, nodes=a.nodes)
    refined = theory.refinement_upper(a.nodes, float(bits.min()), largest, a.rounds, vocab=a.vocab)
    weights = clips**2
    total = float(bits.sum()) * a.vocab
    adaptive = theory.adaptive_bound(
        weights / 3 * (1 + 4.0**-b0), clips, b0, contexts=a.contexts, rounds=a.warmup, delta=a.delta
    )
    theorem = "Theorem 1" if np.unique(bits).size == np.unique(clips).size == 1 else "Theorem 4"
    se = upper.small_error
    se_prime = lower.small_error
    table: list[tuple[str, str, float | bool]] = [
        ("Assumption 5", "C_q = L^2/3 (largest clip)", theory.c_q(largest)),
        ("Theorem 1", "c_3 = C_q/2", theory.c_3(largest)),
        ("Theorem 2", "c_lb = c_p L^2/12", theory.c_lb(largest, c_p)),
        ("Lemma 7", "c_p, lower bound of the Hessian's trace", c_p),
        (theorem, "data term", upper.data),
        (theorem, "probe term", upper.probe),
        (theorem, "bandwidth term", upper.bandwidth),
        (theorem, "upper bound", upper.total),
        ("Theorem 2", "lower bound of the bandwidth term", lower.bandwidth),
        ("Theorem 3", f"bandwidth term after {a.rounds} rounds of refinement", refined.bandwidth),
        ("Theorem 3", "its cubic remainder, at most", refined.remainder),
        ("Theorem 3", "bandwidth term of vanilla FPLD, any number of rounds", refined.vanilla),
        ("Theorem 5", "F at these bits, w = L^2", theory.objective(bits * a.vocab, weights, a.vocab).total),
        ("Theorem 5", "least F at the same total", theory.allocation_optimum(weights, total, a.vocab)),
        ("Lemma 9", "R, reach of decoded logits", float(theory.reach(largest, b0))),
        ("Corollary 6", "c_ad, logits that fill their clips", adaptive.c_ad),
        ("Corollary 6", "F(adaptive)/F(best), at most", adaptive.bound),
        ("Corollary 6", "proved at this sample size (eta <= 1/4)", adaptive.valid),
        ("(ND)", "holds", lower.non_degenerate),
        ("(SE)", f"holds: remainder {se.value:.3g} <= {se.limit:.3g}", se.holds),
        ("(SE')", f"holds: remainder {se_prime.value:.3g} <= {se_prime.limit:.3g}", se_prime.holds),
    ]
    return [{"statement": statement, "quantity": what, "value": value} for statement, what, value in table]


def _each(name: str, values: list[float], nodes: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    validation.integer("--nodes", nodes, least=1)
    if len(values) not in (1, nodes):
        raise InputError(f"--{name} must be one number or one for each of {nodes} nodes, got {len(values)}")
    return np.broadcast_to(np.asarray(values, np.float64), (nodes,)).copy()


ALLOCATE = Command(_ALLOCATE_EPILOG, _configure_allocate, _allocate)
BOUNDS = Command(_BOUNDS_EPILOG, _configure_bounds, _bounds)


_REPRODUCE_EPILOG = """\
Writes NAME.csv, NAME.png and NAME.svg into the output folder. The exit code is 1 if a claim of the paper does
not hold in our numbers. All at the paper's sizes: K = 4, V = 256, n = 30000, 30 and 100 seeds.
"""


def _configure_reproduce(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=[*REPRODUCTIONS, "all"], help="which one, or all of them")
    parser.add_argument(
        "--out", type=Path, default=Path("out"), metavar="DIR", help="folder for figures (default: out)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of every draw (default: 0)")


def _run_reproduce(arguments: argparse.Namespace, output: Output) -> int:
    """Simulate, print, draw; say whether every claim holds."""
    if not 0 <= arguments.seed < 2**32:
        raise InputError(f"--seed must be from 0 to {2**32 - 1}, got {arguments.seed}")
    chosen = list(REPRODUCTIONS) if arguments.what == "all" else [arguments.what]
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        results = [_reproduce_one(REPRODUCTIONS[name], arguments.seed, arguments.out, output) for name in chosen]
    except OSError as error:
        raise InputError(f"--out: cannot write to {arguments.out}: {error.strerror or error}") from None
    if output.json:
        mark = len(chosen) > 1
        rows = [
            {"figure": name, **row} if mark else row
            for name, (table, _) in zip(chosen, results, strict=True)
            for row in table
        ]
        output.result(f"reproduce {arguments.what}", rows)
    missed = sum(count for _, count in results)
    output.note(f"figures and tables: {arguments.out}/ ({', '.join(f'{name}.png .svg .csv' for name in chosen)})")
    output.note("every claim holds" if not missed else f"{missed} claims do not hold")
    return 1 if missed else 0


def _reproduce_one(reproduction: Reproduction, seed: int, out: Path, output: Output) -> tuple[list[Row], int]:
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


REPRODUCE = Command(_REPRODUCE_EPILOG, _configure_reproduce, _run_reproduce)
