"""Messages: a task down (plan, coding, broadcast, notes on the prior), a request for blocks of the prior up.

A task is bytes in the safetensors format: arrays, and one JSON object in the metadata. A node checks it as it would
check anything from outside: sizes follow from what is there, nothing is executed, unknown fields are refused.

A node that cannot compute the prior as the aggregator did asks for blocks of it. The request:

    offset  bytes  field
         0      4  magic "FPAS"
         4      4  number of blocks n
         8    4 n  the blocks' numbers, rising
               16  checksum over all before it and over the plan; with a key it is a MAC
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fpld.codecs.prior import ArrayPrior
from fpld.errors import FrameError, InputError
from fpld.protocol.shared_prior import PriorNotes, check_prior_blocks
from fpld.storage.arrays import dump_arrays, parse_arrays
from fpld.types import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence


Against = Literal["nothing", "own"]
Broadcast = Literal["none", "weights", "logits"]
FORMAT = "fpld-task-4"
PLAN_ARRAYS = ("prior", "learnt")  # of a plan, that travel among the task's arrays as "plan.prior" and so on
_NOTES = "notes."  # prefix of the arrays of the notes on the prior
_SENT = "sent."  # prefix of the blocks of the prior that a node asked for
REQUEST_MAGIC = b"FPAS"
_CHECKSUM_BYTES = 16


@dataclass(frozen=True, eq=False)
class Task:
    """State what a node is to do in a round.

    `against` is what the node codes its logits against: nothing, or its own last reconstruction (sequential
    refinement). `broadcast` is what `arrays` holds: nothing (the node goes on with what it has), the student's
    weights, or the combined logits of the last round as `logits` [m, V], from which the node distils its own model.

    A prior that the plan needs is either in the plan, whole, or the node computes it from the student's weights: then
    `notes` say how the aggregator rounded, and `sent` holds blocks that the node asked for (`protocol.shared_prior`).
    `base` is the digest of the reconstruction that the node codes against, nothing before there is one.
    """

    plan: Plan
    codec: str
    against: Against = "nothing"
    broadcast: Broadcast = "none"
    arrays: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    notes: PriorNotes | None = None
    sent: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)
    base: str = ""

    @cached_property
    def identity(self) -> str:
        """Name the task by the digest of its bytes, whatever blocks of the prior were sent along.

        It is computed once: a task holds the student's weights, or m * V logits.
        """
        return digest(replace(self, sent={}).to_bytes())

    def all_arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return all arrays as they travel: what is broadcast, the plan's own, what is noted of the prior."""
        prior = self.plan.prior if self.notes is None else None
        others = {
            "plan.prior": None if prior is None else prior.block(range(self.plan.contexts)),
            "plan.learnt": self.plan.learnt,
            **({} if self.notes is None else {_NOTES + name: array for name, array in self.notes.arrays().items()}),
            **{f"{_SENT}{block}": integers for block, integers in self.sent.items()},
        }
        return self.arrays | {name: array for name, array in others.items() if array is not None}

    def metadata(self) -> dict[str, str]:
        """Return all of the task but its arrays, as text."""
        named = {item.name: getattr(self.plan, item.name) for item in fields(Plan) if item.name not in PLAN_ARRAYS}
        plan = {name: value.hex() if isinstance(value, bytes) else value for name, value in named.items()}
        for name in ("written", "space"):
            if not plan[name]:
                del plan[name]  # a plan without them is the same to nodes that know of none
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
            values = dict(head.pop("plan"))
            for name in {"run_key", "probe", "space"} & {"run_key", "probe", *values}:
                values[name] = bytes.fromhex(values[name])
            prior = arrays.pop("plan.prior", None)
            values["prior"] = None if prior is None else ArrayPrior(prior)
            values["learnt"] = arrays.pop("plan.learnt", None)
            notes = _taken(arrays, _NOTES)
            sent = _taken(arrays, _SENT)
            plan = Plan(**values)
            task = cls(
                plan,
                arrays=arrays,
                notes=PriorNotes(plan.shape, **notes) if notes else None,
                sent=check_prior_blocks({int(block): integers for block, integers in sent.items()}, plan.shape),
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


def encode_prior_request(blocks: Sequence[int], plan: Plan, *, key: bytes = b"") -> bytes:
    """Encode a request for blocks of the prior under a plan.

    >>> from fpld.types import Plan
    >>> plan = Plan(run_key=bytes(16), round=1, node=0, probe=bytes(32), contexts=4, vocab=4, bits=8.0)
    >>> decode_prior_request(encode_prior_request([0, 2], plan), plan, blocks=3)
    [0, 2]
    """
    body = REQUEST_MAGIC + struct.pack("<I", len(blocks)) + np.asarray(blocks, "<u4").tobytes()
    return body + _checksum(body, plan, key)


def is_prior_request(data: bytes) -> bool:
    """Return whether a message is a request for blocks of the prior, and no frame."""
    return data[: len(REQUEST_MAGIC)] == REQUEST_MAGIC


def decode_prior_request(data: bytes, plan: Plan, *, blocks: int, key: bytes = b"") -> list[int]:
    """Check a request, and return the numbers of the blocks that it asks for; `blocks` is how many there are."""
    least = len(REQUEST_MAGIC) + 4 + _CHECKSUM_BYTES
    if not least < len(data) <= least + 4 * blocks or (len(data) - least) % 4:
        raise FrameError(f"a message that asks for blocks of the prior has one to {blocks}, got {len(data)} bytes")
    body = data[:-_CHECKSUM_BYTES]
    checksum = data[-_CHECKSUM_BYTES:]
    if not hmac.compare_digest(_checksum(body, plan, key), checksum):
        raise FrameError("the message that asks for blocks of the prior was altered, or is of another round or node")
    wanted = np.frombuffer(body[len(REQUEST_MAGIC) + 4 :], "<u4").astype(np.int64)
    (count,) = struct.unpack_from("<I", body, len(REQUEST_MAGIC))
    if count != wanted.size or (np.diff(wanted) <= 0).any() or wanted[-1] >= blocks:
        raise FrameError(f"blocks of the prior must be asked for by rising numbers below {blocks}")
    numbers: list[int] = wanted.tolist()
    return numbers


def _checksum(body: bytes, plan: Plan, key: bytes) -> bytes:
    hashed = hashlib.blake2b(digest_size=_CHECKSUM_BYTES, key=key, person=b"fpld ask")
    hashed.update(plan.run_id + struct.pack("<II", plan.round, plan.node) + plan.probe)
    hashed.update(body)
    return hashed.digest()
