"""`fpld node`: take part in a federation from this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpld.errors import InputError

if TYPE_CHECKING:
    import argparse

    from fpld.cli.output import Output

HELP = "take part in a federation from this machine"
EPILOG = """\
NODE.toml is the file that `fpld init-node` made. The node stays until it is told to stop (Ctrl-C or SIGTERM), and
comes back by itself after a crash or a lost connection; docs/deploy.md has a systemd unit. Example:

  fpld node north/node.toml
  fpld node status north/node.toml      whether it runs, its last round and contact, what it has sent, its last trouble
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("node", nargs="+", metavar="[status] NODE.toml", help="the node's file; status: how it stands")
    parser.add_argument(
        "--insecure", action="store_true", help="no TLS, no node authentication: for a trial on one machine"
    )


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Run until told to stop."""
    from fpld.cli.signals import Stopped, stop_on_signals
    from fpld.engines.flower.home import check_home
    from fpld.engines.flower.site_status import site_status
    from fpld.engines.flower.supernode import run_node

    *asked, path = arguments.node
    if asked not in ([], ["status"]):
        raise InputError(f"node takes one file, or status and a file, got {' '.join(arguments.node)}")
    if asked:
        output.result("node", [site_status(Path(path))], title=f"The site of {path}")
        return 0
    arguments.node = Path(path)
    problems = [f"{found.key}: {found.says}" for found in check_home(arguments.node) if found.wrong]
    if problems:
        raise InputError(f"{arguments.node}: " + "; ".join(problems))
    starts: list[dict[str, Any]] = []
    try:
        with stop_on_signals("stopped"), output.status():
            run_node(arguments.node, insecure=arguments.insecure, started=starts.append)
    except Stopped as stopped:
        output.result("node", starts, title="Connections")
        return 0 if stopped.code == 143 else stopped.code
    return 0
