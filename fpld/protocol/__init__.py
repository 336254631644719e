"""The protocol of a federation: two state machines without I/O, and the messages between them.

One round. The *aggregator* sends each *node* a *task*: a *plan* (who, which round, which probe set, how many bits), the
codec, and what the round broadcasts, such as the student's weights. The node trains, predicts the logits of all m probe
contexts over V tokens, and answers with one *frame*: a header that repeats the plan's identity, a payload of at most
the plan's bits, a checksum. When enough frames are in, the aggregator closes the round and combines them into the
*target*, and the student is distilled to it.

    aggregator                                    node
    ready       --open: a task for each node-->   idle       or answered in an earlier round
    collecting                                    training   the node's model predicts the probe contexts
                <--a frame for the plan------     answered   the same task again: the same bytes again
    closed      quorum reached, late frames are refused
    combined    decode, audit, combine
    ended       the state for the next round, which a checkpoint holds

Nothing here opens a socket, reads a file of the run or trains a model. An engine moves the bytes, `fpld.node` and
`fpld.federation` train and keep files, and every engine therefore gives the same result. `states` has both machines as
whole tables, every phase with every event: a cell is the next phase, or the reason for which the event is refused. A
refused event changes nothing.

Who gets how many bits. `fpld.budget` shares a total out by weights, caps and floors. The weights are configured, or an
estimator learns them from the frames of earlier rounds (`round_statistics`). Bits are those that are sent: a payload
over its plan's budget is refused at both ends.

The prior. Logits that both ends can predict need fewer bits. The prior is the student's prediction, rounded to eighths
of a nat. Floats differ between machines, so the aggregator sends notes on how it rounded (`shared_prior`), and a node
that still differs asks for those blocks. A plan contains the digest of its prior: an encoder and a decoder with
different priors are found out before a payload is decoded.

Randomness. Dither and draws follow from the run's key, the round and the node, by integer arithmetic that is the same
on every machine. The same logits under fresh dither would reveal more than the budget allows, so a node answers a round
once and repeats those bytes.

What is hostile. Either end may be; the network between them may alter, repeat, reorder or lose messages.

    what                                          checked in
    a frame: length, header, checksum or MAC      wire.decode_frame, before anything is allocated
    its payload: decodes within the plan          Aggregator.frame, once; afterwards combining cannot fail
    a frame that comes twice, late, unasked       states, and Aggregator.frame
    labels that are well formed but false         rules; node_audit measures, `guarded` distrusts
    false claims about noise                      budget.policy: estimated weights and shares are limited
    a task: format, sizes, names, known fields    messages.Task.from_bytes
    a task for another node, round or probe set   Node.receive
    a delta of weights                            weights.decode_delta, against its digest and the reference's sizes
    how much a node reveals                       the budget, and `fpld.privacy` for a promise

What a caller of this package does wrong is an `InputError` or a `ProtocolError`; what a peer does wrong is a
`FrameError`, which the aggregator turns into a `Receipt` with the reason.

Updates. Where weights may leave, a task has the codec "updates": the node answers with what training has changed in the
student's weights, in a few bits each, and the aggregator rebuilds its model (`updates`). Frames, budgets, states and
checks are the same.

The paper's variants are assemblies of the same pieces. Algorithm 1 is the mean of frames coded against nothing at equal
bits. Heterogeneous budgets give the allocator caps and weights. Algorithm 2 adds a warm-up and an estimator. Sequential
refinement codes against the node's own reconstruction.
"""

from fpld.budget.policy import Budget
from fpld.protocol.aggregator import Aggregator, Receipt, Settings
from fpld.protocol.combine import Combined
from fpld.protocol.messages import Task
from fpld.protocol.node import Node

__all__ = ["Aggregator", "Budget", "Combined", "Node", "Receipt", "Settings", "Task"]
