"""`fpld check`: everything that is wrong with a configuration, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from fpld.cli.output import Output

HELP = "everything that is wrong with a configuration or a node's file, before anything is trained"
EPILOG = """\
Reads the texts, tokenizers and limits that CONFIG names; trains, fetches and writes nothing. With a section [flower]
the nodes' texts are elsewhere, and keys and certificates are looked for. The exit code is 2 if anything is wrong.
`fpld run`, `fpld aggregator` and `fpld node` do the same first. Examples:

  fpld check demo
  fpld check my.toml
  fpld check north/node.toml
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("config", metavar="CONFIG", help="a TOML file, a preset, or a node's file")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Check, and print what was found."""
    from fpld import config as configuration
    from fpld.federation.check import Finding, check
    from fpld.federation.expect import expect

    text, source = configuration.read_text(arguments.config)
    if Path(arguments.config).name == "node.toml":
        from fpld.engines.flower.home import check_home

        findings = check_home(Path(arguments.config))
    else:
        config, problems = configuration.examine(text, source)
        findings = [Finding(*_split(line)) for line in problems]
        if config is not None:
            findings += check(config, local=config.flower is None)
            if config.flower is not None:
                from fpld.engines.flower.aggregator import missing

                findings += [Finding("flower", line) for line in missing(config)]
            if not any(found.wrong for found in findings):
                findings += expect(config)
    wrong = sum(found.wrong for found in findings)
    rows = [{"key": f.key, "state": "wrong" if f.wrong else "known", "says": f.says} for f in findings]
    output.result("check", rows, title=f"{source}: {wrong} problems" if wrong else f"{source}: nothing wrong was found")
    return 2 if wrong else 0


def _split(line: str) -> tuple[str, str]:
    """Return the key that a message begins with, and the rest of it.

    >>> _split("run.quorum must be at most 3, got 4")
    ('run.quorum', 'must be at most 3, got 4')
    """
    key, _, rest = line.partition(" ")
    return key.rstrip(":"), rest
