"""`fpld init-node`: make a node's keys and its file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from fpld.errors import InputError

if TYPE_CHECKING:
    import argparse

    from fpld.cli.output import Output

HELP = "make the keys and the file of a node, to join a federation"
EPILOG = """\
federation.toml comes from the aggregator (`fpld certs` makes it); NAME.pub goes back to it, into its folder of keys.
Nothing in either is secret. Example:

  fpld init-node north --join federation.toml --data texts
  fpld node north/node.toml
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", metavar="NAME", help="the node's name, as in the aggregator's configuration")
    parser.add_argument("--join", type=Path, required=True, metavar="FILE", help="the aggregator's federation.toml")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", metavar="PATH", help="the private text: a file or a folder")
    source.add_argument("--corpus", help="a corpus of `fpld data` in place of text of one's own, for a trial")
    parser.add_argument("--field", default="text", help="with --data: the field with the text, in files of records")
    parser.add_argument("--label", help="with --corpus: only the documents with this label")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the node's folder (default: NAME)")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Make keys and the node's file; print what to do next."""
    from fpld.data import hold_out, read_documents
    from fpld.engines.flower.home import HELD_OUT, Invitation, init_node

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}", arguments.name):
        raise InputError(f"NAME must be letters, digits, blanks, dots, dashes, 64 at most, got {arguments.name!r}")
    if arguments.data is not None:
        if not Path(arguments.data).exists():
            raise InputError(f"--data: {arguments.data} does not exist: give a text file or a folder")
        # What cannot be read, or is too short to hold some of it out, is said here and not in the first round.
        hold_out(read_documents(arguments.data, field=arguments.field), fraction=HELD_OUT, seed=0)
        source = f"data = {json.dumps(str(Path(arguments.data).resolve()))}\nfield = {json.dumps(arguments.field)}"
    else:
        source = f"corpus = {json.dumps(arguments.corpus)}"
        source += f"\nlabel = {json.dumps(arguments.label)}" if arguments.label is not None else ""
    folder = arguments.out if arguments.out is not None else Path(arguments.name)
    public = init_node(folder, arguments.name, Invitation.read(arguments.join), source)
    rows = [{"name": arguments.name, "file": str(folder / "node.toml"), "public_keys": str(public)}]
    output.result("init-node", rows)
    output.note(f"send {public} to the aggregator; then: fpld node {folder / 'node.toml'}")
    return 0
