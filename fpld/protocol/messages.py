"""What travels: a task down (plan, coding, what is broadcast, what is noted of the prior), a frame up.

A task is bytes in the safetensors format: arrays, and one JSON object in the metadata. A node checks it as it would
check anything from outside: sizes follow from what is there, nothing is executed, unknown fields are refused.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from fpld.codecs.prior import ArrayPrior
from fpld.errors import InputError
from fpld.protocol.priors import Notes, check_sent
from fpld.storage.arrays import dump_arrays, parse_arrays
from fpld.types import Plan

if TYPE_CHECKING:
    import numpy as np

Against = Literal["nothing", "own"]
Broadcast = Literal["none", "weights", "logits"]
FORMAT = "fpld-task-4"
PLAN_ARRAYS = ("prior", "learnt")  # of a plan, that travel among the task's arrays as "plan.prior" and so on
_NOTES, _SENT = "notes.", "sent."  # of the prior, likewise


@dataclass(frozen=True, eq=False, slots=True)
class Task:
    """State what a node is to do in a round.

    `against` is what the node codes its logits against: nothing, or its own last reconstruction (sequential
    refinement). `broadcast` is what `arrays` holds: nothing (the node goes on with what it has), the student's
    weights, or the combined logits of the last round as `logits` [m, V], from which the node distils its own model.

    A prior that the plan needs is either in the plan, whole, or the node computes it from the student's weights: then
    `notes` say how the aggregator rounded, and `sent` holds blocks that the node asked for (`fpld.protocol.priors`).
    `base` is the digest of the reconstruction that the node codes against, nothing before there is one.
    """

    plan: Plan
    codec: str
    against: Against = "nothing"
    broadcast: Broadcast = "none"
    arrays: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    notes: Notes | None = None
    sent: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)
    base: str = ""

    @property
    def identity(self) -> str:
        """Name the task, whatever blocks of the prior were sent along."""
        return digest(replace(self, sent={}).to_bytes())

    def all_arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return all arrays as they travel: what is broadcast, the plan's own, what is noted of the prior."""
        prior = self.plan.prior if self.notes is None else None
        own = {
            "plan.prior": None if prior is None else prior.block(range(self.plan.contexts)),
            "plan.learnt": self.plan.learnt,
            **({} if self.notes is None else {_NOTES + name: array for name, array in self.notes.arrays().items()}),
            **{f"{_SENT}{block}": integers for block, integers in self.sent.items()},
        }
        return self.arrays | {name: array for name, array in own.items() if array is not None}

    def metadata(self) -> dict[str, str]:
        """Return all of the task but its arrays, as text."""
        named = {item.name: getattr(self.plan, item.name) for item in fields(Plan) if item.name not in PLAN_ARRAYS}
        plan = {name: value.hex() if isinstance(value, bytes) else value for name, value in named.items()}
        head = {name: getattr(self, name) for name in ("codec", "against", "broadcast", "base")} | {"plan": plan}
        return {"format": FORMAT, "task": json.dumps(head, sort_keys=True)}

    def to_bytes(self) -> bytes:
        """Serialize, the same for the same task."""
        return dump_arrays(self.all_arrays(), self.metadata())

    @classmethod
    def from_bytes(cls, data: bytes) -> Task:
        """Parse and check; anything but a whole and sound task is refused."""
        arrays, metadata = parse_arrays(data, "task")
        if metadata.get("format") != FORMAT:
            raise InputError(f"task: format must be {FORMAT!r}, got {metadata.get('format')!r}")
        try:
            head = json.loads(metadata["task"])
            known = dict(head.pop("plan"))
            for name in ("run_key", "probe"):
                known[name] = bytes.fromhex(known[name])
            prior = arrays.pop("plan.prior", None)
            known["prior"] = None if prior is None else ArrayPrior(prior)
            known["learnt"] = arrays.pop("plan.learnt", None)
            notes, sent = _taken(arrays, _NOTES), _taken(arrays, _SENT)
            plan = Plan(**known)
            task = cls(
                plan,
                arrays=arrays,
                notes=Notes(plan.shape, **notes) if notes else None,
                sent=check_sent({int(block): integers for block, integers in sent.items()}, plan.shape),
                **head,
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise InputError(f"task: must hold a sound plan, but {error}") from error
        if not isinstance(task.codec, str) or not isinstance(task.base, str):
            raise InputError(f"task: codec and base must be text, got {task.codec!r:.80} and {task.base!r:.80}")
        for name, value, allowed in (
            ("against", task.against, ("nothing", "own")),
            ("broadcast", task.broadcast, ("none", "weights", "logits")),
        ):
            if value not in allowed:
                raise InputError(f"task: {name} must be one of {', '.join(allowed)}, got {value!r}")
        return task


def base_digest(reconstruction: np.ndarray[Any, Any] | None) -> str:
    """Name the reconstruction that a node codes against; nothing if there is none yet."""
    return "" if reconstruction is None else digest(reconstruction.astype("<f4", copy=False).tobytes())


def _taken(arrays: dict[str, np.ndarray[Any, Any]], prefix: str) -> dict[str, np.ndarray[Any, Any]]:
    """Take the arrays with a prefix out, and return them without it."""
    return {name.removeprefix(prefix): arrays.pop(name) for name in list(arrays) if name.startswith(prefix)}


def digest(data: bytes) -> str:
    """Name a message by its SHA-256."""
    return hashlib.sha256(data).hexdigest()
