"""The local engine: nodes are jobs of a pool on this machine, and exchange the bytes that a network would carry."""

from __future__ import annotations

from concurrent.futures import as_completed
from functools import partial
from typing import TYPE_CHECKING

from fpld.federation import jobs
from fpld.federation.prepare import base_file, student_options
from fpld.federation.rounds import Heldout, evaluation
from fpld.federation.site import Site

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from fpld.config import Config
    from fpld.federation.rounds import Federation
    from fpld.protocol import Receipt, Task
    from fpld.storage.folder import Arrays


class LocalEngine:
    """Let the nodes of a federation work in its pool, each in its folder of the run."""

    def __init__(self, federation: Federation, bytes_per_token: float) -> None:
        self._federation, self._bytes_per_token = federation, bytes_per_token
        self.busy: set[int] = set()
        config = federation.config
        self._folders = [federation.store.path / "nodes" / str(index) for index in range(len(config.nodes))]
        for index, folder in enumerate(self._folders):
            _site(config, index).save(folder)

    def collect(self, tasks: Mapping[int, Task], deliver: Callable[[int, bytes], Receipt]) -> list[str]:
        """Let the nodes work until all have answered or the deadline; return who did not answer, and why."""
        names, pool = self._federation.names, self._federation.pool
        deadline = self._federation.config.run.deadline
        absent = [f"{names[node]}: still busy with an earlier round" for node in tasks if node in self.busy]
        futures = {}
        for node, task in tasks.items():
            if node not in self.busy:  # a node does one thing at a time
                futures[pool.submit(jobs.node_round, str(self._folders[node]), task.to_bytes())] = node
        try:
            for future in as_completed(futures, timeout=deadline):
                node = futures[future]
                try:
                    frame = future.result()
                except Exception as error:  # whatever stops a node, the others go on
                    absent.append(f"{names[node]}: failed: {error}")
                else:
                    deliver(node, frame)
        except TimeoutError:
            for future, node in futures.items():
                if not future.done():
                    absent.append(f"{names[node]}: late: no answer within {deadline:g} s")
                    self.busy.add(node)
                    future.add_done_callback(partial(self._late, node))
        return absent

    def _late(self, node: int, future: Future[bytes]) -> None:
        """Take a frame that came after the deadline: it is refused and recorded, and the node is free again."""
        if not future.cancelled() and future.exception() is None:
            self._federation.aggregator.frame(node, future.result())
        self.busy.discard(node)

    def evaluate(self, student: Arrays) -> Heldout:
        """Evaluate the student on the held-out text of all nodes, in one job."""
        arguments = evaluation(self._federation.config, self._federation.run, student)
        losses = self._federation.pool.submit(jobs.evaluate, *arguments).result()
        return Heldout(losses, self._bytes_per_token)


def _site(config: Config, index: int) -> Site:
    return Site(
        name=config.nodes[index].name,
        index=index,
        seed=config.run.seed,
        rounds=config.run.rounds,
        text=f"../../../text/{index}.safetensors",
        base=f"../../../{base_file(config, index)}",
        probe="../../../probe.json",
        kind=student_options(config, index).kind,
        local=config.local.model_dump(),
        distill=config.distill.model_dump(),
    )
