"""`fpld generate`: text from a run's student."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from fpld.cli.output import Output

HELP = "let a run's student write text"
EPILOG = """\
RUN is the folder of a run, finished or not, or a node's folder. Without a prompt the text begins as a document does.
The same seed gives the same text. Examples:

  fpld generate runs/demo --prompt "The state of the Union"
  fpld generate runs/demo --tokens 200 --temperature 0.7 --seed 3
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, or of a node")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="what the text goes on from")
    parser.add_argument("--tokens", type=int, default=100, help="how many tokens to write (default: 100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token (default: 0.8)")
    parser.add_argument("--top", type=int, default=0, help="draw from so many of the likeliest tokens (default: all)")
    parser.add_argument("--samples", type=int, default=1, help="how many texts (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default: 0)")
    parser.add_argument("--model", default="student", help="student, best or base; at a node own, adopted or alone")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Write the texts."""
    from fpld.report.models import open_models
    from fpld.students.checks import check_count
    from fpld.students.generate import continuation

    check_count("--samples", arguments.samples, 1)
    models = open_models(arguments.run)
    student = models.open(arguments.model)
    rows = []
    for number in range(arguments.samples):
        text = continuation(
            student,
            models.tokenizer,
            arguments.prompt,
            tokens=arguments.tokens,
            seed=arguments.seed + number,
            temperature=arguments.temperature,
            top=arguments.top,
        )
        rows.append({"seed": arguments.seed + number, "prompt": arguments.prompt, "text": text})
    if arguments.json:
        output.result("generate", rows)
    for row in rows:
        output.note(f"{row['prompt']}{row['text']}\n")
    return 0
