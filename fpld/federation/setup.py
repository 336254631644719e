"""What does not change in a federation: configuration, folders, budget, settings of the protocol, identity."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fpld.budget.limits import Uplinks, senders
from fpld.budget.policy import Budget, usual_allocator
from fpld.data.probe import round_probe
from fpld.node.spec import base_file
from fpld.protocol.aggregator import Settings
from fpld.protocol.wire import OVERHEAD_BYTES
from fpld.seeds import derive_key
from fpld.storage.files import canonical_json
from fpld.storage.run_folder import PROBE, PUBLIC, RunFolder
from fpld.types import MAX_BITS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Executor
    from pathlib import Path

    from fpld.config import Config
    from fpld.data import ProbeSet
    from fpld.federation.prepare import Public


@dataclass(frozen=True, eq=False, slots=True)
class Setup:
    """What does not change in a federation, which has a folder `store` of its own in that of the run.

    `pool` does the aggregator's own heavy work.
    """

    config: Config
    run: RunFolder
    store: RunFolder
    settings: Settings
    pool: Executor

    @property
    def base(self) -> Path:
        """Return the file of the student before the first round."""
        return self.run.path / base_file(self.config, None)

    @property
    def method(self) -> str:
        """Return the federation's name in the run."""
        return self.store.path.name

    @property
    def identity(self) -> str:
        """Name the federation by all that it comes from: its key, its configuration, its probe set."""
        parts = {
            "name": self.method,
            "config": self.config.model_dump(mode="json"),
            "probe": self.settings.probe.hex(),
        }
        return hashlib.blake2b(
            canonical_json(parts), key=self.settings.run_key, digest_size=32, person=b"fpld federation"
        ).hexdigest()

    def probe(self, round: int) -> ProbeSet:
        """Return the probe set of a round."""
        public = self.run.path / PUBLIC if self.config.probe.fresh else None
        return round_probe(self.run.path / PROBE, public, self.config.run.seed, round)


def protocol_settings(config: Config, public: Public, mac_keys: Mapping[int, bytes], run_key: bytes | None) -> Settings:
    """Turn a configuration into the aggregator's settings; bits per probe context from here on.

    Without a key of its own, a run has one that follows from the seed: the same configuration gives the same bits.
    """
    vocab = public.vocab
    contexts = public.probe.contexts
    return Settings(
        names=[node.name for node in config.nodes],
        run_key=derive_key(config.run.seed) if run_key is None else run_key,
        probe=bytes.fromhex(public.probe.digest),
        contexts=contexts,
        vocab=vocab,
        rounds=config.run.rounds,
        budget=configured_budget(config, contexts=contexts, vocab=vocab),
        clips=[node.clip for node in config.nodes],
        codec=config.codec.name,
        rule=config.combine.rule,
        trim=config.combine.trim,
        against=config.codec.against,
        stratified=config.codec.dither == "stratified",
        quorum=config.run.quorum or len(config.nodes),
        mac_keys=mac_keys,
    )


def configured_budget(config: Config, *, contexts: int, vocab: int) -> Budget:
    """Return the budget of a run, in bits per probe context; one that is infeasible is an error before any training."""
    nodes = senders(config.nodes, vocab)
    limits = Uplinks(nodes, contexts, vocab, config.budget.deadline, config.codec.name, OVERHEAD_BYTES).feasible()
    budget = Budget(
        caps=np.minimum(limits.caps, MAX_BITS * vocab),
        floors=limits.floors,
        vocab=vocab,
        total=config.budget.bits(vocab),
        allocator=config.budget.allocator,
        weights=np.array([node.allocation_weight for node in nodes]),
        estimator=config.budget.estimator,
        warmup=config.budget.warmup,
        forget=config.budget.forget,
        usual=usual_allocator(config.codec.name),
    )
    budget.bits(1)
    return budget
