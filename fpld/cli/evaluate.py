"""`fpld evaluate`: what a run's student is worth on a text; at a node, beside the site's own models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from fpld.cli.output import Output

HELP = "the loss of a run's student on a text; at a node, beside the site's own models"
EPILOG = """\
RUN is the folder of a run, finished or not, or a node's folder. Windows are as long as in the run, so the numbers are
those of its table. student is the last one, best that of the round with the lowest held-out loss, base the model
before the first round. At a node, own is its model of the last round (the student, trained on the node's text), and
alone that of its first (the base, trained on the node's text: no other site had a part in it). A node whose model is
of another kind has adopted too: its own model, after it learnt from the last student. Examples:

  fpld evaluate runs/demo --data my-texts
  fpld evaluate runs/demo                                 the held-out texts of the run
  fpld evaluate north --data texts                        at a node
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, or of a node")
    parser.add_argument("--data", type=Path, metavar="PATH", help="a file or folder (default: what was held out)")
    parser.add_argument("--field", default="text", help="the field with the text, in files of records (default: text)")
    parser.add_argument("--length", type=int, metavar="T", help="tokens in a window (default: those of the run)")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Evaluate, and print the table."""
    from fpld.report.evaluate import evaluate, read_text
    from fpld.report.models import open_models

    models = open_models(arguments.run)
    texts = read_text(models, arguments.data, arguments.field)
    rows = evaluate(models, texts, arguments.length or models.length)
    what = arguments.data if arguments.data is not None else "held-out text"
    output.result("evaluate", rows, title=f"{what}: {rows[0]['tokens']:,} tokens, {rows[0]['bytes']:,} bytes")
    return 0
