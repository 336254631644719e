"""`fpld allocate`: Theorem 5 for given weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fpld.budget.allocators import round_bits
from fpld.cli.arguments import numbers, one_or_each
from fpld.paper.theory import objective
from fpld.registry import allocators

if TYPE_CHECKING:
    import argparse

    from fpld.cli.output import Output

HELP = "share a total of bits out to nodes by weight (Theorem 5)"
EPILOG = """\
Bits are per probe context. A node of weight w at B bits and vocabulary V adds w * 2^(-2B/V) to the loss; a
natural weight is the square of its clip level. Example:

  fpld allocate --weights 1,1,16,16 --total 2048 --vocab 256 --caps 2048,2048,600,2048
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--weights", type=numbers, required=True, metavar="W,W,...", help="one weight for each node")
    parser.add_argument("--total", type=float, required=True, metavar="BITS", help="bits per probe context, all nodes")
    parser.add_argument("--vocab", type=int, required=True, metavar="V", help="vocabulary size")
    parser.add_argument("--caps", type=numbers, metavar="B,B,...", help="most bits for each node (or one for all)")
    parser.add_argument("--floors", type=numbers, metavar="B,B,...", help="least bits for each node (or one for all)")
    parser.add_argument(
        "--policy", default="optimal", help=f"one of {', '.join(allocators.names())} (default: optimal)"
    )
    parser.add_argument("--whole", action="store_true", help="round to whole bits, keeping the total")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Print the bits of each node."""
    nodes = len(arguments.weights)
    caps, floors = one_or_each(arguments.caps, nodes), one_or_each(arguments.floors, nodes)
    allocator = allocators.get(arguments.policy)
    bits = allocator(arguments.weights, arguments.total, arguments.vocab, caps, floors)
    shown = round_bits(bits, caps).tolist() if arguments.whole else bits.tolist()
    rows = [
        {"node": node, "weight": weight, "bits": value, "bits_per_coordinate": value / arguments.vocab}
        for node, (weight, value) in enumerate(zip(arguments.weights, shown, strict=True))
    ]
    output.result("allocate", rows, title=f"Bits per probe context ({arguments.policy})")
    loss = objective(shown, arguments.weights, arguments.vocab).total
    output.note(f"sum {sum(shown):g} of {arguments.total:g} bits; weighted quantization term F = {loss:.4g}")
    return 0
