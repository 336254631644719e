"""What a bit buys: each node alone, all text pooled, FedAvg of weights; at their own measured uplink."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fpld.federation import jobs
from fpld.federation.prepare import base_file, student_options
from fpld.federation.rounds import evaluation
from fpld.federation.training import average
from fpld.seeds import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from fpld.config import Config
    from fpld.storage.folder import Arrays, RunFolder

    Baseline = Callable[[Config, RunFolder, Executor, Callable[[str], None]], list[dict[str, Any]]]


def _finetuning(
    config: Config, run: RunFolder, index: int, state: Arrays | None, steps: int, seed: int, rate: float | None
) -> tuple[Any, ...]:
    base, kind = str(run.path / base_file(config, index)), student_options(config, index).kind
    return base, kind, state, [str(run.path / f"text/{index}.safetensors")], steps, seed, rate


def alone(config: Config, run: RunFolder, pool: Executor, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Train each node on its own text for as many steps as it makes in the federation, from the same base."""
    report("baseline: each node alone")
    steps, rate = config.local.steps * config.run.rounds, config.baselines.rate or config.local.rate
    futures = [
        pool.submit(
            jobs.finetune,
            *_finetuning(config, run, index, None, steps, derive_seed(config.run.seed, "alone", index), rate),
        )
        for index in range(len(config.nodes))
    ]
    scores = [
        pool.submit(jobs.evaluate, *evaluation(config, run, future.result(), index))
        for index, future in enumerate(futures)
    ]
    return [
        {"method": f"alone: {node.name}", "losses": score.result(), "uplink_bytes": 0}
        for node, score in zip(config.nodes, scores, strict=True)
    ]


def pooled(config: Config, run: RunFolder, pool: Executor, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Train on the text of all nodes for as many steps as one node makes: what could be had if text could move."""
    report("baseline: all text pooled")
    texts = [run.path / f"text/{index}.safetensors" for index in range(len(config.nodes))]
    state = pool.submit(
        jobs.finetune,
        str(run.path / base_file(config, None)),
        config.student.kind,
        None,
        [str(text) for text in texts],
        config.local.steps * config.run.rounds,
        derive_seed(config.run.seed, "pooled"),
        config.baselines.rate or config.local.rate,
    ).result()
    losses = pool.submit(jobs.evaluate, *evaluation(config, run, state)).result()
    private = run.read_json("prepared.json")["private_bytes"]  # pooling would send the text itself
    return [{"method": "pooled", "losses": losses, "uplink_bytes": private}]


def fedavg(config: Config, run: RunFolder, pool: Executor, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Average float32 weights each round, with the same local steps."""
    state: Arrays | None = None
    uplink = 0
    for round in range(1, config.run.rounds + 1):
        report(f"baseline: FedAvg, round {round}")
        rate = config.local.rate_in(round, config.run.rounds)
        futures = [
            pool.submit(
                jobs.finetune,
                *_finetuning(
                    config,
                    run,
                    index,
                    state,
                    config.local.steps,
                    derive_seed(config.run.seed, "local", round, index),
                    rate,
                ),
            )
            for index in range(len(config.nodes))
        ]
        states = [future.result() for future in futures]
        uplink += sum(array.nbytes for weights in states for array in weights.values())
        state = average(states)
    losses = pool.submit(jobs.evaluate, *evaluation(config, run, state)).result()
    return [{"method": "fedavg", "losses": losses, "uplink_bytes": uplink}]
