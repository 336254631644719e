"""Updates of weights in the place of labels: how a plan asks for them, and what both ends derive from it.

Where weights may leave a site, a few bits for each of them give the aggregator the nodes' models themselves. A task
then has the codec "updates", the student's weights, and no prior. Its plan has a context for each weight. The payload
of the frame is the node's trained weights less the student's, coded by `fpld.codecs.updates`. The bits of the plan are
those of the whole payload, header and scales included, so the budget is kept to the byte as with labels.

The aggregator rebuilds each model: the student plus the update. It lets them write text and label it, without asking
the nodes again (`fpld.federation.workers.distill_from_updates`).
"""

from __future__ import annotations

import hashlib
import math
import struct
from typing import TYPE_CHECKING

import numpy as np

from fpld.budget.limits import LIMIT_KINDS, Limits
from fpld.codecs.updates import MAX_BITS, affordable_bits, decode_update, encode_update, update_bytes
from fpld.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fpld.budget.limits import Uplinks
    from fpld.types import Array, Arrays, Plan

UPDATES = "updates"
"""What a task names in the place of a codec of labels."""
CURVATURE_SEQUENCES = 64
"""Public sequences on which a model's curvature is measured, which decides how the bits are shared over its tensors."""
UPDATES_CODE = 6
"""The number in the header of a frame. It is beside those of codecs of labels, from 1 to 5."""


def count_weights(weights: Mapping[str, Array]) -> int:
    """Return how many weights a model has."""
    return sum(array.size for array in weights.values())


def payload_bits(count: int, bits: float) -> float:
    """Return the bits per weight of a plan whose budget is an update of `count` weights with `bits` each, to the byte.

    >>> payload_bits(1000, 2.0)
    2.176
    """
    size = update_bytes(count, bits)
    rounded = 8 * size / count
    # The product must not round down to a byte less.
    numerator, denominator = rounded.as_integer_ratio()
    return rounded if count * numerator >= 8 * size * denominator else math.nextafter(rounded, math.inf)


def update_limits(uplinks: Uplinks, weights: int, asked: float) -> Limits:
    """Return the limits of nodes that send updates of so many weights: bits of payload per weight.

    `uplinks` are those of a round of labels, without a codec: a node's limit is one in bytes, whatever it sends. The
    third limit is what the `asked` bits per weight take; the least is what one bit takes. A node that cannot send one
    bit per weight has a limit below that.
    """
    capacities = np.minimum(uplinks.limits().most * uplinks.contexts / 8, update_bytes(weights, MAX_BITS))
    most = np.array([[_payload_limit(weights, math.floor(size)) for size in row] for row in capacities.tolist()])
    most[LIMIT_KINDS.index("codec")] = payload_bits(weights, asked)
    return Limits(most, np.full(len(uplinks.nodes), payload_bits(weights, 1)))


def _payload_limit(weights: int, capacity: int) -> float:
    bits = affordable_bits(weights, capacity)
    return payload_bits(weights, bits) if bits else 8 * capacity / weights


def update_seed(plan: Plan) -> int:
    """Return the seed of a node's rotation in a round; who does not have the run's key cannot compute it."""
    place = struct.pack("<II", plan.round, plan.node)
    digest = hashlib.blake2b(place, key=plan.run_key, digest_size=8, person=b"fpld update").digest()
    return int.from_bytes(digest, "little") >> 1


def encode_weights(
    trained: Mapping[str, Array],
    student: Mapping[str, Array],
    plan: Plan,
    curvature: Mapping[str, float] | None = None,
) -> bytes:
    """Encode trained weights as an update of the student's, within the plan's budget.

    `curvature` says how much a squared error in each tensor matters (`fpld.students.Student.curvature`).
    """
    if trained.keys() != student.keys() or plan.contexts != count_weights(student):
        raise ProtocolError(f"the task asks for {plan.contexts} weights, this model has {count_weights(trained)}")
    bits = affordable_bits(plan.contexts, plan.budget_bytes)
    if bits < 1:
        raise ProtocolError(f"the task leaves less than a bit for each of {plan.contexts} weights")
    update = {name: np.asarray(array, np.float32) - student[name] for name, array in trained.items()}
    return encode_update(update, bits=bits, seed=update_seed(plan), weights=curvature)


def rebuild_weights(payload: bytes | memoryview, student: Mapping[str, Array], plan: Plan) -> Arrays:
    """Return a node's weights: the student's plus the update of a payload.

    Raises
    ------
    FrameError
        If the payload is not an update of these weights.
    """
    update = decode_update(payload, student, seed=update_seed(plan))
    return {name: np.asarray(array + update[name], np.float32) for name, array in student.items()}
