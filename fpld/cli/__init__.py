"""The command line: `fpld COMMAND`. Each command is a module with HELP, EPILOG, `configure` and `run`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from fpld import __version__
from fpld._check import printable
from fpld.cli import (
    aggregator,
    allocate,
    audit,
    bench,
    bounds,
    certs,
    check,
    dashboard,
    data,
    evaluate,
    export,
    generate,
    init_node,
    node,
    plan,
    report,
    reproduce,
    run,
)
from fpld.cli.output import Output
from fpld.cli.signals import Stopped
from fpld.errors import FpldError

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {
    "run": run,
    "check": check,
    "aggregator": aggregator,
    "node": node,
    "init-node": init_node,
    "certs": certs,
    "plan": plan,
    "report": report,
    "dashboard": dashboard,
    "generate": generate,
    "evaluate": evaluate,
    "audit": audit,
    "export": export,
    "data": data,
    "reproduce": reproduce,
    "allocate": allocate,
    "bounds": bounds,
    "bench": bench,
}


def parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    top = argparse.ArgumentParser(
        prog="fpld",
        description="Federated Probe-Logit Distillation: one language model from text that may not leave its sites.",
    )
    top.add_argument("--version", action="version", version=f"fpld {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", help="what to do")
    for name, module in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP[0].upper() + module.HELP[1:] + ".",
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.configure(sub)
        sub.add_argument("--json", action="store_true", help="print one JSON object on standard output, nothing else")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; bad input is one line on standard error and exit code 2."""
    arguments = parser().parse_args(argv)
    try:
        code: int = COMMANDS[arguments.command].run(arguments, Output(arguments.json))
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
    return code
