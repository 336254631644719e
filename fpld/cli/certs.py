"""`fpld certs`: certificates for a trial, and the file that nodes join with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from fpld.errors import InputError

if TYPE_CHECKING:
    import argparse

    from fpld.cli.output import Output

HELP = "make the aggregator's certificates and key, and the file that nodes join with"
EPILOG = """\
Makes what is not in DIR yet: ca.pem, server.pem and server.key (for a trial; put your own there first if you have
them), the aggregator's key, and federation.toml, which goes to the nodes and holds nothing secret. Example:

  fpld certs --address aggregator.example.org:8000
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--address", required=True, metavar="HOST:PORT", help="where nodes find the aggregator")
    parser.add_argument("--out", type=Path, default=Path("certs"), metavar="DIR", help="the folder (default: certs)")
    parser.add_argument("--days", type=int, default=90, help="how long certificates hold (default: 90)")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Make certificates and the file to join with; print where they are."""
    from fpld.engines.flower.certs import make_certificates

    if not re.fullmatch(r"[A-Za-z0-9.\-]+:[0-9]{1,5}", arguments.address):
        raise InputError(f"--address must be HOST:PORT, got {arguments.address!r}")
    if not 1 <= arguments.days <= 3650:
        raise InputError(f"--days must be from 1 to 3650, got {arguments.days}")
    host = arguments.address.rsplit(":", 1)[0]
    hosts = list(dict.fromkeys([host, "localhost", "127.0.0.1"]))  # the aggregator's own programs connect by loopback
    made = make_certificates(arguments.out, arguments.address, hosts, days=arguments.days)
    output.result("certs", [{"made": str(arguments.out / name)} for name in made])
    output.note(f"give {arguments.out / 'federation.toml'} to the nodes; keep the *.key files to yourself")
    return 0
