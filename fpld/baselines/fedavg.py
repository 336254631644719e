"""FedAvg: rounds of local training whose updates are averaged, sent as float32 or in one bit per weight.

After B. McMahan et al., *Communication-Efficient Learning of Deep Networks from Decentralized Data*, 2017. All local
steps of a node are split into rounds. Where the run itself has one round with the same learning rate, the models of its
nodes serve as FedAvg's single round.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from fpld.baselines import Baseline
from fpld.codecs.updates import decode_update, encode_update
from fpld.federation.cost import Work, evaluations
from fpld.node.training import average
from fpld.seeds import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from fpld.baselines.context import BaselineContext
    from fpld.config import Config
    from fpld.federation.evaluation import Row
    from fpld.types import Arrays

    Channel = Callable[[Arrays, int], tuple[int, Arrays]]
    """Sends an update with a seed; returns its bytes, and the update that arrives."""

log = logging.getLogger(__name__)


def send_float32(update: Arrays, seed: int) -> tuple[int, Arrays]:  # the signature of a channel  # noqa: ARG001 - the form of all encodings
    """Return the bytes of an update in float32, and the update as it arrives."""
    return sum(array.nbytes for array in update.values()), update


def send_signs(update: Arrays, seed: int) -> tuple[int, Arrays]:
    """Return the bytes of an update in one bit per weight, and the update as it arrives."""
    data = encode_update(update, bits=1, seed=seed)
    return len(data), decode_update(data, update, seed=seed)


def _rows(name: str, send: Channel, context: BaselineContext) -> list[Row]:
    """Return a row for each number of rounds that the configuration asks for."""
    asked = context.config.baselines.rounds
    if asked is None:
        return [_row(name, send, context, name, context.config.run.rounds)]
    # Side by side: one of them may wait for the federation's models while the others use the workers.
    with ThreadPoolExecutor(len(asked)) as threads:
        rows = {
            rounds: threads.submit(_row, name, send, context, f"{name}, {rounds} round{'s' * (rounds > 1)}", rounds)
            for rounds in asked
        }
    return [rows[rounds].result() for rounds in asked]


def _row(name: str, send: Channel, context: BaselineContext, method: str, rounds: int) -> Row:
    config = context.config
    state = context.start
    uplink = 0
    for round in range(1, rounds + 1):
        log.info("baseline: %s, round %d of %d", name, round, rounds)
        updates = []
        for node, model in enumerate(local_round(context, state, round, rounds)):
            update = {name: model[name] - value for name, value in state.items()}
            size, received = send(update, derive_seed(config.run.seed, "signs", rounds, round, node))
            uplink += size
            updates.append(received)
        mean = average(updates)
        state = {name: np.asarray(value + mean[name], np.float32) for name, value in state.items()}
    weights = sum(array.nbytes for array in state.values())
    return context.row(method, context.evaluate(state).result(), uplink, rounds * len(config.nodes) * weights)


def reuses_models(config: Config, rounds: int) -> bool:
    """Return whether the federation's nodes have done the local training of so many rounds already."""
    return rounds == config.run.rounds == 1 and config.baselines.fedavg_rate in (None, config.local.rate)


def local_round(context: BaselineContext, state: Arrays, round: int, rounds: int) -> Sequence[Arrays]:
    """Return the nodes' models after a round of local training from a common state."""
    if reuses_models(context.config, rounds):
        return context.models()
    if round > 1:
        futures = _train(context, state, round, rounds)
    else:
        # The first round is the same over every channel.
        with context.lock:
            if rounds not in context.first_rounds:
                context.first_rounds[rounds] = _train(context, state, round, rounds)
            futures = context.first_rounds[rounds]
    return [future.result() for future in futures]


def _train(context: BaselineContext, state: Arrays, round: int, rounds: int) -> list[Future[Arrays]]:
    config = context.config
    rate = config.baselines.fedavg_rate or config.local.rate_in(round, rounds)
    steps = config.local_steps // rounds
    seeds = [derive_seed(config.run.seed, "local", round, node) for node in range(len(config.nodes))]
    return [context.train(node, state, steps, seed, rate) for node, seed in enumerate(seeds)]


def averaging_jobs(config: Config, counts: Sequence[int] | None = None) -> int:
    """Count the jobs of averaging in each number of rounds: an evaluation, and a training for each node and round."""
    counts = counts or config.baselines.rounds or [config.run.rounds]
    trainings = sum(rounds for rounds in counts if not reuses_models(config, rounds))
    return len(counts) + len(config.nodes) * trainings


def averaging_work(config: Config, counts: Sequence[int] | None = None) -> Work:
    """Count the work of averaging in each number of rounds: each splits all local steps of all nodes."""
    counts = counts or config.baselines.rounds or [config.run.rounds]
    trained = sum(not reuses_models(config, rounds) for rounds in counts)
    steps = trained * len(config.nodes) * config.local_steps * config.step_cost
    return Work(steps=steps) + evaluations(config, len(counts))


FEDAVG = Baseline(partial(_rows, "fedavg", send_float32), averaging_jobs, averaging_work)
FEDAVG_1BIT = Baseline(partial(_rows, "fedavg-1bit", send_signs), averaging_jobs, averaging_work)
