"""Reference points for the student: the base, each node alone, all text pooled, float32 logits, and an ensemble.

`alone` and `pooled` bound what the federation can bring from below and above. `float32` shows what quantization costs,
and `ensemble`, the mixture of the nodes' models, what distillation costs. Each row has its measured bytes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fpld.baselines import Baseline
from fpld.baselines.feddf import few_bits
from fpld.config import SendSection
from fpld.federation import workers
from fpld.federation.cost import Work, evaluations, federation_work, relative_size
from fpld.federation.evaluation import federation_row
from fpld.federation.workers import heldout_path
from fpld.node.spec import base_file
from fpld.node.training import privacy_budget
from fpld.progress import ProgressLabel, run_labelled
from fpld.seeds import derive_seed
from fpld.storage.arrays import read_arrays
from fpld.storage.run_folder import PREPARED, text_file
from fpld.students.heldout import mixture_nats, read_heldout, shared_boundaries

if TYPE_CHECKING:
    from fpld.baselines.context import BaselineContext
    from fpld.config import Config
    from fpld.federation.evaluation import Row

log = logging.getLogger(__name__)

_NO_LIMITS = {"bits": 32.0, "context_bits": None, "uplink": None, "clip": None}


def base_row(context: BaselineContext) -> list[Row]:
    """Evaluate the student before the first round."""
    return [context.row("base", context.evaluate(None).result())]


def alone(context: BaselineContext) -> list[Row]:
    """Train each node on its text for as many steps as it makes in the federation, from the same base.

    After a federation of one round the nodes have done just that, and their models are evaluated.
    """
    config = context.config
    nodes = range(len(config.nodes))
    if config.run.rounds == 1:
        evaluated = context.evaluate_nodes()
    else:
        log.info("baseline: each node alone")
        seeds = [derive_seed(config.run.seed, "alone", node) for node in nodes]
        trained = [context.train(node, None, node_steps(config, node), seeds[node], _rate(config)) for node in nodes]
        states = [future.result() for future in trained]
        futures = [context.evaluate(state, node) for node, state in enumerate(states)]
        evaluated = [future.result() for future in futures]
    rows = [context.row(f"alone: {node.name}", nats) for node, nats in zip(config.nodes, evaluated, strict=True)]
    return rows + _alone_longer(context)


def _alone_longer(context: BaselineContext) -> list[Row]:
    """Train nodes with students of their own for as many steps as they make until they have adopted the student."""
    config = context.config
    nodes = adopting_nodes(config)
    steps = {node: node_steps(config, node) + config.distill.steps for node in nodes}
    seeds = {node: derive_seed(config.run.seed, "alone longer", node) for node in nodes}
    trained = {node: context.train(node, None, steps[node], seeds[node], _rate(config)) for node in nodes}
    evaluated = {node: context.evaluate(future.result(), node) for node, future in trained.items()}
    return [context.row(f"alone longer: {config.nodes[node].name}", nats.result()) for node, nats in evaluated.items()]


def node_steps(config: Config, node: int) -> int:
    """Return the local steps that a node makes in all rounds."""
    return config.local.scaled(config.nodes[node].effort).steps * config.run.rounds


def adopting_nodes(config: Config) -> list[int]:
    """Return the nodes with a model of their own, which adopt the federation's at the end."""
    return [index for index, node in enumerate(config.nodes) if node.differs]


def _rate(config: Config) -> float | None:
    return config.baselines.rate or config.local.rate


def _alone_jobs(config: Config) -> int:
    nodes = len(config.nodes)
    longer = 2 * len(adopting_nodes(config))
    if config.run.rounds > 1:
        return 2 * nodes + longer
    # The ensemble needs the same evaluations, and counts them.
    return longer if "ensemble" in config.baselines.methods else nodes + longer


def _alone_work(config: Config) -> Work:
    nodes = range(len(config.nodes)) if config.run.rounds > 1 else range(0)
    alone = sum(relative_size(config, node) * node_steps(config, node) for node in nodes)
    adopting = adopting_nodes(config)
    longer = sum(relative_size(config, node) * (node_steps(config, node) + config.distill.steps) for node in adopting)
    evaluated = evaluations(config, len(config.nodes) + len(adopting))
    return Work(steps=(alone + longer) * config.step_cost) + evaluated


def pooled(context: BaselineContext) -> list[Row]:
    """Train on the text of all nodes for as many steps as one node makes: the bound if text could be shared."""
    return [_pooled_row(context, "pooled", context.config.local_steps)]


def pooled_all(context: BaselineContext) -> list[Row]:
    """Train on the text of all nodes for as many steps as all nodes make together: the bound at the same work."""
    return [_pooled_row(context, "pooled-all", all_steps(context.config))]


def all_steps(config: Config) -> int:
    """Return the local steps of all nodes together."""
    return len(config.nodes) * config.local_steps


def _pooled_row(context: BaselineContext, method: str, steps: int) -> Row:
    log.info("baseline: %s, all text in one place", method)
    config = context.config
    run = context.run
    budget = privacy_budget(config, run.path)
    state = context.pool.submit(
        run_labelled,
        ProgressLabel("baseline", model=method),
        workers.finetune,
        run.path / base_file(config, None),
        None,
        [run.path / text_file(index) for index in range(len(config.nodes))],
        steps,
        derive_seed(config.run.seed, method),
        _rate(config),
        # The promise holds over the steps that are made.
        None if budget is None else budget._replace(steps=steps),
    ).result()
    # Pooling sends the text itself.
    text_bytes = run.read_json(PREPARED)["private_bytes"]
    return context.row(method, context.evaluate(state).result(), text_bytes)


def ensemble(context: BaselineContext) -> list[Row]:
    """Average the probabilities of the nodes' models after their last training: the limit of what labels can teach.

    It cannot be sent, since it takes all models at once. Models with tokenizers of their own are averaged over the
    strings between boundaries that all of them share.
    """
    config = context.config
    files = {heldout_path(config, context.run, index) for index in (None, *range(len(config.nodes)))}
    shared = None
    if len(files) > 1:
        shared = shared_boundaries([read_heldout(read_arrays(file)[0]) for file in files])
    return [context.row("ensemble", mixture_nats(context.evaluate_nodes(), shared))]


def float32(context: BaselineContext) -> list[Row]:
    """Run the same federation with raw float32 logits: what FedMD and FedDF average."""
    federation = context.federate(float32_variant(context.config), "float32")
    return [federation_row("float32 logits", federation)]


def float32_variant(config: Config) -> Config:
    """Return the configuration of the same federation with raw float32 logits."""
    nodes = [node.model_copy(update=_NO_LIMITS) for node in config.nodes]
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"continuations": 0, "track": []}),
            "nodes": nodes,
            "codec": config.codec.model_copy(update={"name": "float32", "against": "nothing"}),
            "budget": config.budget.model_copy(update={"total": None, "context_total": None}),
            "send": None,
            "written": None,
        }
    )


def updates(context: BaselineContext) -> list[Row]:
    """Run the same federation with updates in place of labels: what the student could be if weights may leave."""
    rows = []
    for bits in few_bits(context.config):
        federation = context.federate(updates_variant(context.config, bits), f"updates-{bits:g}")
        rows.append(federation_row(f"updates, {bits:g} bit{'s' * (bits > 1)}", federation))
    return rows


def updates_variant(config: Config, bits: float) -> Config:
    """Return the configuration of the same federation with updates of so many bits per weight from every node."""
    budget = config.budget.model_copy(update={"total": None, "context_total": None, "allocator": None})
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"continuations": 0, "track": []}),
            "nodes": [node.model_copy(update=_NO_LIMITS) for node in config.nodes],
            "budget": budget,
            "send": SendSection(updates=bits),
        }
    )


def _federation_jobs(config: Config) -> int:
    # In each round: every node, the distillation and the evaluation.
    return config.run.rounds * (len(config.nodes) + 2)


def _pooled_work(config: Config, steps: int) -> Work:
    return Work(steps=steps * config.step_cost) + evaluations(config, 1)


def _updates_work(config: Config) -> Work:
    return sum((federation_work(updates_variant(config, bits)).all for bits in few_bits(config)), Work())


ALONE = Baseline(alone, jobs=_alone_jobs, work=_alone_work)
POOLED = Baseline(pooled, jobs=lambda _: 2, work=lambda config: _pooled_work(config, config.local_steps))
POOLED_ALL = Baseline(pooled_all, jobs=lambda _: 2, work=lambda config: _pooled_work(config, all_steps(config)))
ENSEMBLE = Baseline(
    ensemble, jobs=lambda config: len(config.nodes), work=lambda config: evaluations(config, len(config.nodes))
)
UPDATES = Baseline(updates, jobs=lambda config: len(few_bits(config)) * _federation_jobs(config), work=_updates_work)
FLOAT32 = Baseline(float32, jobs=_federation_jobs, work=lambda config: federation_work(float32_variant(config)).all)
