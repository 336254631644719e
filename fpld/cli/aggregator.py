"""`fpld aggregator`: run a federation whose nodes are on other machines."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fpld.errors import InputError

if TYPE_CHECKING:
    import argparse

    from fpld.cli.output import Output

log = logging.getLogger(__name__)

HELP = "run a federation whose nodes are on other machines, over Flower"
EPILOG = """\
CONFIG is a file as for `fpld run`, with a section [flower]: where to listen, the folder of certificates (`fpld certs`),
and the folder of the nodes' public keys (NAME.pub, from `fpld init-node` at each site). The nodes' texts stay with
them: the aggregator needs only the public text. It ends when the rounds are done. Examples:

  fpld aggregator consortium.toml --out runs/one
  fpld aggregator consortium.toml --out runs/one --resume      after a stop or a crash
  fpld aggregator status runs/one                              how it stands, in a row for monitoring
  fpld aggregator demo --simulate --out runs/simulated         all nodes on this machine, in Flower's simulation
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "config", nargs="+", metavar="[status] CONFIG", help="the configuration: a TOML file; status: a run's folder"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run's folder (default: run.out)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in DIR")
    parser.add_argument(
        "--simulate", action="store_true", help="all nodes on this machine in Flower's simulation (fpld[simulation])"
    )
    parser.add_argument("--seed", type=int, help="seed of every draw, in place of run.seed")
    parser.add_argument(
        "--insecure", action="store_true", help="no TLS, no node authentication: for a trial on one machine"
    )


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Run, and print the table."""
    from fpld import config as configuration
    from fpld.cli.signals import stop_on_signals
    from fpld.engines.flower.aggregator import Start, aggregate
    from fpld.federation.check import refuse
    from fpld.report.standing import standing

    *asked, arguments.config = arguments.config
    if asked not in ([], ["status"]):
        raise InputError(f"aggregator takes one CONFIG, or status and a run's folder, got {' '.join(asked)} besides")
    if asked:
        folder = Path(arguments.config)
        if not (folder / "config.toml").exists():
            raise InputError(f"{folder} holds no run: give the folder that --out named")
        output.result("aggregator", [standing(folder)], title=f"The run in {folder}")
        return 0
    config, _ = configuration.load(arguments.config, seed=arguments.seed)
    out = arguments.out if arguments.out is not None else Path(config.run.out)
    if (out / "config.toml").exists() and not arguments.resume:
        raise InputError(f"{out} holds a run already: choose another --out, or continue it with --resume")
    if arguments.resume and not (out / "config.toml").exists():
        raise InputError(f"{out} holds no run to resume: leave --resume out to start one")
    started = time.monotonic()
    with stop_on_signals("stopped; --resume goes on from the last closed round"), output.status():
        if not arguments.resume:
            refuse(config, arguments.config, local=arguments.simulate)
        if arguments.simulate:
            from fpld.engines.flower.simulation import simulate

            log.info("%d nodes in Flower's simulation runtime", len(config.nodes))
            rows = simulate(config, arguments.config, out, seed=arguments.seed)
        else:
            file = Path(arguments.config).resolve()
            rows = aggregate(Start(config, file, out, arguments.seed, arguments.insecure))
    output.result("aggregator", rows, title=f"Held-out text of all nodes, and what was sent ({out})")
    output.note(f"student, trace and checkpoints: {out}; {time.monotonic() - started:.0f} s")
    return 0
