"""The command line: `fpld COMMAND`.

`COMMANDS` lists all commands. Each module here ends with the records of its commands, and is imported only when one of
them is asked for.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from fpld import __version__
from fpld.cli.arguments import Stopped
from fpld.cli.output import Output
from fpld.errors import FpldError, exhausted_resource
from fpld.validation import printable, visible

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from fpld.cli.arguments import Command


_MAX_ERROR = 20_000  # characters: a configuration may have a hundred problems


class CommandEntry(NamedTuple):
    """A command in the list of all: its help in one line, and where its record is, as `module:attribute`."""

    help: str
    record: str

    def load(self) -> Command:
        """Return the record of the command, and import its module on first use."""
        module, _, attribute = self.record.partition(":")
        command: Command = getattr(import_module(module), attribute)
        return command


COMMANDS = {
    "run": CommandEntry(
        "train one model from the text of many nodes, on this machine; without CONFIG, the demonstration",
        "fpld.cli.run:COMMAND",
    ),
    "check": CommandEntry(
        "list everything that is wrong with a configuration or a node's file; nothing is trained",
        "fpld.cli.run:CHECK",
    ),
    "aggregator": CommandEntry(
        "run a federation whose nodes are on other machines, over Flower", "fpld.cli.deployment:AGGREGATOR"
    ),
    "node": CommandEntry("take part in a federation from this machine", "fpld.cli.deployment:NODE"),
    "init-node": CommandEntry(
        "make the keys and the file of a node, to join a federation", "fpld.cli.deployment:INIT_NODE"
    ),
    "certs": CommandEntry(
        "make the aggregator's certificates and key, and the file with which nodes join", "fpld.cli.deployment:CERTS"
    ),
    "plan": CommandEntry(
        "from links and a deadline: bits for each node, time, bytes, and the lower and upper bound of the loss",
        "fpld.cli.plan:COMMAND",
    ),
    "report": CommandEntry("write a page and figures of a run, or of several side by side", "fpld.cli.report:COMMAND"),
    "dashboard": CommandEntry(
        "serve a live page of the runs in a folder, and the planner with sliders", "fpld.cli.dashboard:COMMAND"
    ),
    "generate": CommandEntry("generate text with a run's student", "fpld.cli.models:GENERATE"),
    "evaluate": CommandEntry(
        "the loss of a run's student on a text; at a node, beside the node's own models", "fpld.cli.models:EVALUATE"
    ),
    "audit": CommandEntry(
        "attack a federation as its aggregator could: find canaries of a node's text in its labels and in the student",
        "fpld.cli.audit:COMMAND",
    ),
    "export": CommandEntry(
        "write a run's student for transformers or llama.cpp, or its trace as CSV, Parquet or TensorBoard files",
        "fpld.cli.models:EXPORT",
    ),
    "data": CommandEntry(
        "list texts and models that have a name, or fetch them into the cache", "fpld.cli.data:COMMAND"
    ),
    "reproduce": CommandEntry(
        "reproduce the paper's figures and theorems, with our numbers next to the paper's", "fpld.cli.theory:REPRODUCE"
    ),
    "allocate": CommandEntry("share a total of bits out to nodes by weight (Theorem 5)", "fpld.cli.theory:ALLOCATE"),
    "bounds": CommandEntry("compute every bound of the paper, for given numbers", "fpld.cli.theory:BOUNDS"),
    "warm": CommandEntry("compile all kernels in advance, once per machine", "fpld.cli.warm:COMMAND"),
    "bench": CommandEntry("compare codecs, and measure their speed and that of training", "fpld.cli.bench:COMMAND"),
}


def parser(commands: Container[str] = COMMANDS) -> argparse.ArgumentParser:
    """Build the parser; those of the commands that are not in `commands` have no arguments, and are not imported."""
    top = argparse.ArgumentParser(
        prog="fpld",
        description="Federated Probe-Logit Distillation: one language model from text that may not leave its owners.",
    )
    top.add_argument("--version", action="version", version=f"fpld {__version__}")
    subparsers = top.add_subparsers(dest="command", required=True, metavar="COMMAND", help="what to do")
    for name, entry in COMMANDS.items():
        sub = subparsers.add_parser(
            name,
            help=entry.help,
            description=entry.help[0].upper() + entry.help[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in commands:
            command = entry.load()
            sub.epilog = command.epilog
            command.configure(sub)
            sub.add_argument(
                "--json", action="store_true", help="print one JSON object on standard output, nothing else"
            )
    return top


def _cut(message: str) -> str:
    """Return an error of any length as a terminal can show it."""
    return message if len(message) <= _MAX_ERROR else f"{message[:_MAX_ERROR]}..."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; bad input is one line on standard error and exit code 2."""
    # A command is named before its arguments, and among the words before it are no values of options: there are none.
    words = sys.argv[1:] if argv is None else argv
    arguments = parser([word for word in words if not word.startswith("-")][:1]).parse_args(words)
    try:
        return COMMANDS[arguments.command].load().run(arguments, Output(arguments.json))
    except FpldError as error:
        sys.stderr.write(f"fpld {arguments.command}: error: {_cut(visible(error))}\n")
        return 2
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        resource = exhausted_resource(error)
        if resource is not None:
            sys.stderr.write(f"fpld {arguments.command}: error: {resource.what}: {resource.remedy}\n")
            return 2
        if not isinstance(error, OSError):
            raise
        # A name that no file can have, a disk that is gone.
        what = f"{printable(error.filename, 100)}: " if error.filename else ""
        sys.stderr.write(f"fpld {arguments.command}: error: {what}{error.strerror or error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except Stopped as stopped:
        sys.stderr.write(f"{stopped}\n")
        return stopped.code
