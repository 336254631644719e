"""FedAvg: rounds of local training whose updates are averaged; sent as float32, or in one bit per weight.

All local steps of a node are split into rounds. Where the run itself has one round, its nodes' models serve as the
first round here, if the rate is theirs.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fpld.federation import onebit
from fpld.federation.training import average
from fpld.seeds import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from fpld.engines.local.baselines import Bench
    from fpld.federation.result import Row
    from fpld.storage.folder import Arrays

    Send = Callable[[Arrays, int], tuple[int, Arrays]]

log = logging.getLogger(__name__)


def as_float32(update: Arrays, seed: int) -> tuple[int, Arrays]:  # noqa: ARG001  # the form of both channels
    """Return the bytes of an update, and the update as it arrives."""
    return sum(array.nbytes for array in update.values()), update


def as_signs(update: Arrays, seed: int) -> tuple[int, Arrays]:
    """Return the bytes of an update in one bit per weight, and the update as it arrives."""
    data = onebit.encode(update, seed=seed)
    return len(data), onebit.decode(data, update, seed=seed)


@dataclass(frozen=True, slots=True)
class Averaging:
    """FedAvg over a channel; `send` returns what an update costs, and what arrives of it."""

    name: str
    send: Send

    def __call__(self, bench: Bench) -> list[Row]:
        """Return a row for each number of rounds that is asked for."""
        asked = bench.config.baselines.rounds
        if asked is None:
            return [self._row(bench, self.name, bench.config.run.rounds)]
        # Side by side: one round may wait for the federation's models, the others fill the gaps that it leaves.
        with ThreadPoolExecutor(len(asked)) as threads:
            rows = {each: threads.submit(self._row, bench, _label(self.name, each), each) for each in asked}
        return [rows[each].result() for each in asked]

    def _row(self, bench: Bench, method: str, rounds: int) -> Row:
        state, uplink = bench.start, 0
        for round in range(1, rounds + 1):
            log.info("baseline: %s, round %d of %d", self.name, round, rounds)
            updates = []
            for node, own in enumerate(trained(bench, state, round, rounds)):
                update = {name: own[name] - value for name, value in state.items()}
                size, arrived = self.send(update, derive_seed(bench.config.run.seed, "signs", rounds, round, node))
                uplink += size
                updates.append(arrived)
            change = average(updates)
            state = {name: np.asarray(value + change[name], np.float32) for name, value in state.items()}
        weights = sum(array.nbytes for array in state.values())
        return bench.row(method, bench.evaluate(state).result(), uplink, rounds * len(bench.config.nodes) * weights)


def _label(name: str, rounds: int) -> str:
    return f"{name}, {rounds} round{'s' * (rounds > 1)}"


def trained(bench: Bench, state: Arrays, round: int, rounds: int) -> Sequence[Arrays]:
    """Return the nodes' models after a round of local training from a common state."""
    config = bench.config
    if rounds == config.run.rounds == 1 and config.baselines.fedavg_rate in (None, config.local.rate):
        return bench.models()
    if round > 1:
        futures = _train(bench, state, round, rounds)
    else:
        with bench.lock:
            if rounds not in bench.first:
                bench.first[rounds] = _train(bench, state, round, rounds)
            futures = bench.first[rounds]
    return [future.result() for future in futures]


def _train(bench: Bench, state: Arrays, round: int, rounds: int) -> list[Future[Arrays]]:
    config = bench.config
    rate = config.baselines.fedavg_rate or config.local.rate_in(round, rounds)
    steps = config.local.steps * config.run.rounds // rounds
    seeds = [derive_seed(config.run.seed, "local", round, node) for node in range(len(config.nodes))]
    return [bench.train(node, state, steps, seed, rate) for node, seed in enumerate(seeds)]


FEDAVG = Averaging("fedavg", as_float32)
FEDAVG_1BIT = Averaging("fedavg-1bit", as_signs)
