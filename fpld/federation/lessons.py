"""What a round teaches the student: labels on public text, text that nodes wrote, models rebuilt from updates.

Labels on public contexts are combined into one target before (`Aggregator.combine`). A written context has the labels
of its node alone, so its target is the prior plus that node's change, times the node's trust: `lesson_of` puts both
behind each other. Where nodes send updates of their weights, the models that these stand for write the text and teach
the student themselves: `rebuilt_models`, then `distill_from_rebuilt`.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.codecs.base import MAX_LOGIT
from fpld.errors import FrameError, QuorumError
from fpld.federation import workers
from fpld.federation.record import Incident
from fpld.progress import ProgressLabel, run_labelled
from fpld.seeds import derive_seed
from fpld.storage.run_folder import PUBLIC, WRITTEN_PRIOR

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fpld.federation.state import Setup, State
    from fpld.protocol import Aggregator, Combined
    from fpld.target import Target
    from fpld.types import Arrays, Tokens

log = logging.getLogger(__name__)


class Lesson(NamedTuple):
    """What a student is distilled from: sequences [S, T], and a target with a context for each of their positions."""

    sequences: Tokens
    target: Target


def lesson_of(setup: Setup, state: State, aggregator: Aggregator, combined: Combined) -> tuple[Lesson, list[Incident]]:
    """Return the public contexts with the combined target, followed by those that nodes wrote with each node's own.

    What a node wrote counts by the trust that its labels on public contexts have earned, since nobody else has labelled
    it. Labels that cannot be decoded, because the node's prediction differs from the aggregator's, are refused.
    """
    public = Lesson(setup.probe(aggregator.round).sequences, dataclasses.replace(combined.target, grid=setup.grid))
    names = aggregator.settings.names
    shares = np.ones(len(combined.nodes)) if combined.trust is None else combined.trust
    trust = dict(zip(combined.nodes, shares.tolist(), strict=True))
    jobs = {
        node: setup.pool.submit(
            run_labelled,
            ProgressLabel(setup.method, aggregator.round, names[node]),
            workers.read_written,
            setup.base,
            state.student,
            dataclasses.replace(aggregator.plan(node), prior=None),  # a large array, and of other contexts
            text,
            setup.store.path / f"{node}-{WRITTEN_PRIOR}",
        )
        for node, text in sorted(aggregator.written.items())
    }
    sequences = [public.sequences]
    targets = []
    refused = []
    for node, job in jobs.items():
        try:
            target = job.result()
        except FrameError as error:
            log.warning("round %d: what %s wrote is refused: %s", aggregator.round, names[node], error)
            refused.append(Incident(names[node], "refused", str(error)))
            continue
        sequences.append(aggregator.written[node].sequences)
        targets.append(target.scaled(trust[node]))
    if not targets:
        return public, refused
    return Lesson(np.concatenate(sequences), public.target.joined(targets)), refused


def distillation_arguments(setup: Setup, state: State, lesson: Lesson) -> tuple[Any, ...]:
    """Return the arguments of the job `workers.distill`, in the round after a state."""
    options = distillation_options(setup, state)
    return setup.base, state.student, *lesson, *options, setup.config.combine.weight_bits, setup.strings


def distillation_options(setup: Setup, state: State) -> tuple[dict[str, Any], Path | None]:
    """Return the options of a distillation in the round after a state, and the file of public text if it is used."""
    config = setup.config
    round = state.round + 1
    options = {
        "steps": config.distill.steps,
        "rate": config.distill.rate_in(round, config.run.rounds),
        "seed": derive_seed(config.run.seed, "distill", round),
        "public_weight": config.distill.public_weight,
        "batch": config.distill.batch,
        "average": config.distill.average,
    }
    return options, setup.run.path / PUBLIC if config.distill.public_weight > 0 else None


class RebuiltModel(NamedTuple):
    """A node whose model can be rebuilt: its update, and the sequences that the model has written."""

    node: int
    update: workers.NodeUpdate
    written: Tokens


def rebuilt_models(setup: Setup, state: State, aggregator: Aggregator) -> tuple[list[RebuiltModel], list[Incident]]:
    """Rebuild the models of the updates that were collected and let each write text; return also who is refused.

    Raises
    ------
    QuorumError
        If fewer models than the quorum can be used.
    """
    config = setup.config
    round = aggregator.round
    names = setup.settings.names
    payloads = aggregator.updates()
    updates = {node: workers.NodeUpdate(aggregator.plan(node), bytes(payload)) for node, payload in payloads.items()}
    probe = setup.probe(round).sequences
    writing = workers.WritingOptions(
        config.contexts_by_model // probe.shape[1],
        1.0 if config.written is None else config.written.temperature,
        derive_seed(config.run.seed, "rebuilt", round),
    )
    jobs = {
        node: setup.pool.submit(
            run_labelled,
            ProgressLabel(setup.method, round, names[node]),
            workers.write_rebuilt,
            setup.base,
            state.student,
            update,
            probe,
            writing,
        )
        for node, update in updates.items()
    }
    found = {node: job.result() for node, job in jobs.items()}
    models = [RebuiltModel(node, updates[node], text) for node, text in found.items() if text is not None]
    reason = f"the model of its update must predict logits of at most {MAX_LOGIT:g}"
    refused = [Incident(names[node], "refused", reason) for node, text in found.items() if text is None]
    for incident in refused:
        log.warning("round %d: %s", round, incident)
    if len(models) < setup.settings.quorum:
        raise QuorumError(
            f"round {round}: {len(models)} updates can be used, the quorum is {setup.settings.quorum}; "
            + "; ".join(map(str, refused))
        )
    return models, refused


def distill_from_rebuilt(setup: Setup, state: State, models: Sequence[RebuiltModel]) -> tuple[Arrays, float]:
    """Distil the student from rebuilt models, on public text and on what they wrote; return it and its divergence."""
    round = state.round + 1
    options, public = distillation_options(setup, state)
    found: tuple[Arrays, float] = setup.pool.submit(
        run_labelled,
        ProgressLabel(setup.method, round, "student"),
        workers.distill_from_updates,
        setup.base,
        state.student,
        [model.update for model in models],
        setup.probe(round).sequences,
        [model.written for model in models],
        options,
        public,
        setup.config.combine.weight_bits,
    ).result()
    return found
