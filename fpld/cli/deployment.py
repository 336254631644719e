"""`fpld certs`, `init-node`, `node` and `aggregator`: a federation whose nodes are on other machines, over Flower.

The aggregator makes certificates and an invitation (`certs`), each site makes its keys and its file with that
(`init-node`) and joins (`node`), and the aggregator runs the rounds.
"""

from __future__ import annotations

import json
import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpld.cli.arguments import Command, Stopped, stop_on_signals
from fpld.cli.output import last_line, table_title
from fpld.errors import InputError
from fpld.storage.run_folder import CONFIG
from fpld.units import show_count, show_time

if TYPE_CHECKING:
    import argparse

    from fpld.cli.output import Output

log = logging.getLogger(__name__)

_CERTS_EPILOG = """\
Makes what DIR lacks: certificates (ca.pem, server.pem, server.key), the aggregator's key, and federation.toml. If you
have certificates of your own, put them there first. federation.toml goes to the nodes and holds nothing secret.
Example:

  fpld certs --address aggregator.example.org:8000
"""

_INIT_NODE_EPILOG = """\
federation.toml comes from the aggregator (`fpld certs` makes it); NAME.pub goes back to it, into its folder of keys.
Nothing in either is secret. Example:

  fpld init-node north --join federation.toml --data texts
  fpld node north/node.toml
"""

_NODE_EPILOG = """\
NODE.toml is the file that `fpld init-node` made. The node runs until it is stopped (Ctrl-C or SIGTERM). It reconnects
by itself after a crash or a lost connection. A systemd unit is in deploy/, see docs/deploy.md. Examples:

  fpld node north/node.toml
  fpld node status north/node.toml      its state, last round and contact, what it has sent, its last error
  fpld node clear north/node.toml       remove the tokens of its text, of all runs; models and the ledger stay
"""

_AGGREGATOR_EPILOG = """\
CONFIG is a file as for `fpld run`, with a section [flower]. That names the address to listen at, the folder of
certificates (`fpld certs`), and the folder of the nodes' public keys (NAME.pub, from `fpld init-node`). The nodes'
texts stay with them: the aggregator needs only the public text. It ends when the rounds are done. Examples:

  fpld aggregator consortium.toml --out runs/one
  fpld aggregator consortium.toml --out runs/one --resume      after a stop or a crash
  fpld aggregator status runs/one                              its state, in a row for monitoring
  fpld aggregator demo --simulate --out runs/simulated         all nodes on this machine, in Flower's simulation
"""


def _configure_certs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", required=True, metavar="HOST:PORT", help="where nodes find the aggregator")
    parser.add_argument("--out", type=Path, default=Path("certs"), metavar="DIR", help="the folder (default: certs)")
    parser.add_argument("--days", type=int, default=90, help="how long certificates are valid (default: 90)")


def _certs(arguments: argparse.Namespace, output: Output) -> int:
    """Make certificates and the file to join with; print where they are."""
    from fpld.engines.flower.credentials import make_certificates

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


def _configure_init_node(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the node's name, as in the aggregator's configuration")
    parser.add_argument("--join", type=Path, required=True, metavar="FILE", help="the aggregator's federation.toml")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", metavar="PATH", help="the private text: a file or a folder")
    source.add_argument("--corpus", help="a corpus of `fpld data` in place of text of one's own, for a trial")
    parser.add_argument("--field", default="text", help="with --data: the field with the text, in files of records")
    parser.add_argument("--label", help="with --corpus: only the documents with this label")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the node's folder (default: NAME)")


def _init_node(arguments: argparse.Namespace, output: Output) -> int:
    """Make keys and the node's file; print what to do next."""
    from fpld.data import hold_out, read_documents
    from fpld.engines.flower.site.config import HELDOUT_FRACTION, Invitation, init_node

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}", arguments.name):
        raise InputError(f"NAME must be letters, digits, blanks, dots, dashes, 64 at most, got {arguments.name!r}")
    if arguments.data is not None:
        if not Path(arguments.data).exists():
            raise InputError(f"--data: {arguments.data} does not exist: give a text file or a folder")
        # What cannot be read, or is too short to hold some of it out, is said here and not in the first round.
        hold_out(read_documents(arguments.data, field=arguments.field), fraction=HELDOUT_FRACTION, seed=0)
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


def _configure_node(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "node",
        nargs="+",
        metavar="[status|clear] NODE.toml",
        help="the node's file; status: its state; clear: remove the tokens of its text",
    )
    parser.add_argument("--health", action="store_true", help="with status: exit with 1 unless the node is connected")
    parser.add_argument(
        "--insecure", action="store_true", help="no TLS, no node authentication: for a trial on one machine"
    )


def _node(arguments: argparse.Namespace, output: Output) -> int:
    """Run until told to stop."""
    from fpld.engines.flower.launch.connection import HEALTHY_STATES
    from fpld.engines.flower.launch.node import run_node, site_status
    from fpld.engines.flower.site.config import check_site
    from fpld.engines.flower.site.folder import clear_site

    *words, path = arguments.node
    if words not in ([], ["status"], ["clear"]):
        raise InputError(f"node takes a file, or status or clear before it, got {' '.join(arguments.node)}")
    if words == ["clear"]:
        cleared = clear_site(Path(path))
        output.result("node", [cleared._asdict()], title="Removed tokens of the text")
        return 0
    if words:
        row = site_status(Path(path))
        output.result("node", [row], title=f"The node of {path}", shown=[_with_times(row)])
        return int(arguments.health and row["state"] not in HEALTHY_STATES)
    arguments.node = Path(path)
    problems = [f"{finding.key}: {finding.says}" for finding in check_site(arguments.node) if finding.wrong]
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


def _configure_aggregator(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", nargs="+", metavar="[status] CONFIG", help="the configuration: a TOML file; status: a run's folder"
    )
    parser.add_argument(
        "--health", action="store_true", help="with status: exit with 1 unless the run is under way or done"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run's folder (default: run.out)")
    parser.add_argument("--resume", action="store_true", help="continue the run in DIR")
    parser.add_argument(
        "--simulate", action="store_true", help="all nodes on this machine in Flower's simulation (fpld[simulation])"
    )
    parser.add_argument("--seed", type=int, help="seed of every draw, in place of run.seed")
    parser.add_argument(
        "--insecure", action="store_true", help="no TLS, no node authentication: for a trial on one machine"
    )


def _with_times(row: dict[str, Any]) -> dict[str, Any]:
    """Return a status for a person: what JSON has as seconds since the last contact is a local time."""
    contact = row["last_contact"]
    return row | {"last_contact": None if contact is None else show_time(time.time() - contact)}


def _aggregator(arguments: argparse.Namespace, output: Output) -> int:
    """Run, and print the table."""
    from fpld import config as configuration
    from fpld.engines.flower.launch.aggregator import AggregatorOptions, run_aggregator
    from fpld.federation.preflight import refuse
    from fpld.report.monitoring import public_digests, run_status_row
    from fpld.report.run import read_trace

    *words, arguments.config = arguments.config
    if words not in ([], ["status"]):
        raise InputError(f"aggregator takes one CONFIG, or status and a run's folder, got {' '.join(words)} besides")
    if words:
        folder = Path(arguments.config)
        if not (folder / CONFIG).exists():
            raise InputError(f"{folder} holds no run: give the folder that --out named")
        row = {**run_status_row(folder), **public_digests(folder)}
        output.result("aggregator", [row], title=f"The run in {folder}", shown=[_with_times(row)])
        return int(arguments.health and row["state"] not in ("preparing", "running", "done"))
    config, _ = configuration.read_config(arguments.config, seed=arguments.seed)
    out = arguments.out if arguments.out is not None else Path(config.run.out)
    if (out / CONFIG).exists() and not arguments.resume:
        raise InputError(f"{out} holds a run already: choose another --out, or continue it with --resume")
    if arguments.resume and not (out / CONFIG).exists():
        raise InputError(f"{out} holds no run to resume: leave --resume out to start one")
    started = time.monotonic()
    with stop_on_signals("stopped; --resume continues from the last closed round"), output.status():
        if not arguments.resume:
            refuse(config, arguments.config, local=arguments.simulate)
        if arguments.simulate:
            from fpld.engines.flower.simulation import simulate_federation

            log.info("%s in Flower's simulation runtime", show_count(len(config.nodes), "node"))
            rows = simulate_federation(config, arguments.config, out, seed=arguments.seed)
        else:
            file = Path(arguments.config).resolve()
            rows = run_aggregator(AggregatorOptions(config, file, out, arguments.seed, arguments.insecure))
    trace = read_trace(out)
    output.result("aggregator", rows, title=table_title(trace, out))
    output.note(last_line(trace, out, time.monotonic() - started))
    return 0


CERTS = Command(_CERTS_EPILOG, _configure_certs, _certs)
INIT_NODE = Command(_INIT_NODE_EPILOG, _configure_init_node, _init_node)
NODE = Command(_NODE_EPILOG, _configure_node, _node)
AGGREGATOR = Command(_AGGREGATOR_EPILOG, _configure_aggregator, _aggregator)
