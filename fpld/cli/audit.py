"""`fpld audit`: what an aggregator could tell about a node's text, by trying."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fpld.cli.arguments import Command
from fpld.storage.run_folder import CONFIG

if TYPE_CHECKING:
    import argparse

    from fpld.cli.output import Output
    from fpld.config import Config

_EPILOG = """\
RUN is a configuration, a preset, or the folder of a local run, whose configuration is taken. It is run again in a new
folder, with canaries in the text of one node, each in or out by a fair coin. Two kinds: `probe` canaries continue a
public probe sequence with a random token, `text` canaries are windows of the node's held-out text. Three attacks use
what the aggregator sees: the node's labels at the canaries' contexts, a surrogate distilled from what this node alone
has sent, and the student. With [written] there is a fourth: the text that the node's model wrote, sent and before
the node's check. A second table, copies.json, has the shares of copies. In the first table, epsilon_lower is the lower
bound that the attack shows with 95 % confidence (Steinke et al. 2023). The accountant's guarantee is epsilon_upper; see
docs/privacy.md.
Examples:

  fpld audit audit --out runs/audit
  fpld audit audit --epsilon 3 --seed 1 --out runs/audit-3
  fpld audit runs/demo --node 1790-1849 --canaries 500
"""


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a TOML file, a preset, or the folder of a local run")
    parser.add_argument("--node", metavar="NAME", help="the node that is attacked (default: the first)")
    parser.add_argument("--canaries", type=int, default=240, metavar="N", help="canaries of each kind (default: 240)")
    parser.add_argument("--copies", type=int, default=1, metavar="N", help="how often each is in the text (default: 1)")
    parser.add_argument("--epsilon", type=float, metavar="E", help="in place of privacy.epsilon")
    parser.add_argument("--unit", choices=("window", "document"), help="in place of privacy.unit, with --epsilon")
    parser.add_argument("--seed", type=int, help="seed of every draw, in place of run.seed")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("runs/audit"), help="default: runs/audit")


def _run(arguments: argparse.Namespace, output: Output) -> int:
    """Audit, and print the table."""
    from fpld import config as configuration
    from fpld.audit.run import AuditPlan, run_audit
    from fpld.federation.preflight import refuse
    from fpld.validation import integer

    file = Path(arguments.run) / CONFIG
    source = str(file) if file.exists() else arguments.run
    config, text = configuration.read_config(source, seed=arguments.seed)
    if arguments.epsilon is not None:
        config = _promising(config, arguments.epsilon, arguments.unit)
        text += f"\n# --epsilon {arguments.epsilon}\n"
    names = [node.name for node in config.nodes]
    plan = AuditPlan(
        _index(names, arguments.node),
        integer("--canaries", arguments.canaries, least=16, most=100_000),
        integer("--copies", arguments.copies, least=1, most=1000),
    )
    with output.status():
        refuse(config, source, local=True)
        result = run_audit(config, text, arguments.out, plan)
    title = f"What the aggregator can tell of {names[plan.node]} ({arguments.out})"
    output.result("audit", result.attacks, title=title)
    output.table(result.copies, title="Shares that stand in written text: as sent, and before the node's check")
    return 0


def _index(names: list[str], name: str | None) -> int:
    from fpld.errors import InputError

    if name is not None and name not in names:
        raise InputError(f"--node must be one of {', '.join(names)}, got {name!r}")
    return 0 if name is None else names.index(name)


def _promising(config: Config, epsilon: float, unit: str | None) -> Config:
    """Return the configuration with another promise, about windows if it had none and no unit is asked for."""
    from fpld.config import PrivacySection
    from fpld.errors import InputError

    if not 0 < epsilon < float("inf"):
        raise InputError(f"--epsilon must be greater than 0, got {epsilon:g}")
    terms = config.privacy or PrivacySection(epsilon=epsilon, unit="window")
    changes = {"epsilon": epsilon} | ({} if unit is None else {"unit": unit})
    return config.model_copy(update={"privacy": terms.model_copy(update=changes)})


COMMAND = Command(_EPILOG, _configure, _run)
