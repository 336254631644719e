"""The command line: `fpld COMMAND`. Each module here ends with the records of its commands."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from fpld import __version__
from fpld.cli import audit, bench, dashboard, data, deployment, models, plan, report, run, theory
from fpld.cli.arguments import Stopped
from fpld.cli.output import Output
from fpld.errors import FpldError
from fpld.validation import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {
    command.name: command
    for command in (
        run.COMMAND,
        run.CHECK,
        deployment.AGGREGATOR,
        deployment.NODE,
        deployment.INIT_NODE,
        deployment.CERTS,
        plan.COMMAND,
        report.COMMAND,
        dashboard.COMMAND,
        models.GENERATE,
        models.EVALUATE,
        audit.COMMAND,
        models.EXPORT,
        data.COMMAND,
        theory.REPRODUCE,
        theory.ALLOCATE,
        theory.BOUNDS,
        bench.COMMAND,
    )
}


def parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    top = argparse.ArgumentParser(
        prog="fpld",
        description="Federated Probe-Logit Distillation: one language model from text that may not leave its sites.",
    )
    top.add_argument("--version", action="version", version=f"fpld {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", help="what to do")
    for command in COMMANDS.values():
        sub = commands.add_parser(
            command.name,
            help=command.help,
            description=command.help[0].upper() + command.help[1:] + ".",
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.configure(sub)
        sub.add_argument("--json", action="store_true", help="print one JSON object on standard output, nothing else")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; bad input is one line on standard error and exit code 2."""
    arguments = parser().parse_args(argv)
    try:
        return COMMANDS[arguments.command].run(arguments, Output(arguments.json))
    except FpldError as error:
        sys.stderr.write(f"fpld {arguments.command}: error: {error}\n")
        return 2
    except OSError as error:  # a name that no file can have, a disk that is gone
        what = f"{printable(error.filename, 100)}: " if error.filename else ""
        sys.stderr.write(f"fpld {arguments.command}: error: {what}{error.strerror or error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except Stopped as stopped:
        sys.stderr.write(f"{stopped}\n")
        return stopped.code
