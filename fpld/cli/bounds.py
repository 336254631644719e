"""`fpld bounds`: every bound of the paper for given numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import _check
from fpld.cli.arguments import numbers
from fpld.errors import InputError
from fpld.paper import theory

if TYPE_CHECKING:
    import argparse

    from fpld.cli.output import Output

HELP = "every bound of the paper, for given numbers"
EPILOG = """\
--bits and --clip take one number for all nodes, or one for each. The paper leaves the constants c1 and c2
open: they are arguments, and the data and probe terms are worth what they are worth. Example:

  fpld bounds --nodes 4 --vocab 256 --bits 4 --clip 1 --samples 30000 --contexts 10000 --rounds 4
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--nodes", type=int, default=4, metavar="K", help="number of nodes (default: 4)")
    parser.add_argument("--vocab", type=int, default=256, metavar="V", help="vocabulary size (default: 256)")
    parser.add_argument("--bits", type=numbers, default=[4.0], metavar="b", help="bits per coordinate (default: 4)")
    parser.add_argument("--clip", type=numbers, default=[1.0], metavar="L", help="clip level (default: 1)")
    parser.add_argument("--samples", type=float, default=30_000, metavar="n", help="samples a node (default: 30000)")
    parser.add_argument("--contexts", type=float, default=10_000, metavar="m", help="probe contexts (default: 10000)")
    parser.add_argument("--rounds", type=int, default=1, metavar="T", help="rounds of refinement (default: 1)")
    parser.add_argument("--warmup", type=int, default=1, metavar="T0", help="warm-up rounds (default: 1)")
    parser.add_argument("--delta", type=float, default=0.05, help="probability that a bound may fail (default: 0.05)")
    parser.add_argument("--peak", type=float, metavar="P", help="largest probability of a token (default: 1/V)")
    parser.add_argument(
        "--dimension", type=float, default=1.0, metavar="d", help="parameters of the family (default: 1)"
    )
    parser.add_argument("--coverage", type=float, default=1.0, metavar="rho", help="Radon-Nikodym ratio (default: 1)")
    parser.add_argument("--c1", type=float, default=0.5, help="constant of the data term (default: 0.5)")
    parser.add_argument("--c2", type=float, default=1.0, help="constant of the probe term (default: 1)")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Print one row for each quantity."""
    output.result("bounds", rows(arguments), title="The paper's bounds (KL in nats, bits per coordinate)")
    return 0


def rows(a: argparse.Namespace) -> list[dict[str, Any]]:
    """Evaluate every statement."""
    bits, clips = _each("bits", a.bits, a.nodes), _each("clip", a.clip, a.nodes)
    largest, b0 = float(clips.max()), float(bits.mean())
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
    weights, total = clips**2, float(bits.sum()) * a.vocab
    adaptive = theory.adaptive_bound(
        weights / 3 * (1 + 4.0**-b0), clips, b0, contexts=a.contexts, rounds=a.warmup, delta=a.delta
    )
    theorem = "Theorem 1" if np.unique(bits).size == np.unique(clips).size == 1 else "Theorem 4"
    se, se_prime = upper.small_error, lower.small_error
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
    _check.integer("--nodes", nodes, least=1)
    if len(values) not in (1, nodes):
        raise InputError(f"--{name} must be one number or one for each of {nodes} nodes, got {len(values)}")
    return np.broadcast_to(np.asarray(values, np.float64), (nodes,)).copy()
