"""Algorithm 1 of the paper for one round, as it reads there: K nodes, a probe set, unequal budgets, one student.

Here a node's model is a table of logits, so that the protocol stands alone: the node quantizes its logits on the
probe set into a strict budget, the aggregator decodes, averages, and takes the softmax as its student.
"""

import secrets

import numpy as np

import fpld

# nodes, probe contexts, vocabulary
K = 4
m = 200
V = 256
clips = np.array([1.0, 1.0, 4.0, 4.0])  # the range of each node's logits
total = 8 * V  # bits per probe context for all nodes together

rng = np.random.default_rng(0)
truth = rng.uniform(-0.97, 0.97, (m, V))  # the logits of P*, which no node sees
node_logits = [truth + rng.normal(0, 30_000**-0.5, (m, V)) for _ in range(K)]  # after local training
probe = bytes(32)  # the digest of the public probe set
run_key = secrets.token_bytes(16)

# The aggregator plans: more bits to nodes with a wider range (Theorem 5).
bits = fpld.allocators.optimal(clips**2, total, V, floors=[V] * K)
plans = [
    fpld.Plan(
        run_key=run_key, round=1, node=i, probe=probe, contexts=m, vocab=V, bits=float(bits[i]), clip=float(clips[i])
    )
    for i in range(K)
]

# Each node quantizes, packs and sends a frame; nothing else leaves it.
codec = fpld.codecs.UniformCodec()
frames = [fpld.encode_frame(fpld.encode(codec, node_logits[i], plans[i]), plans[i], codec.code) for i in range(K)]

# The aggregator checks, decodes and averages; the student is the softmax of the mean.
payloads = [fpld.decode_frame(frames[i], plans[i], codec.code) for i in range(K)]
decoded = [fpld.decode(codec, payloads[i], plans[i], dtype=np.float64) for i in range(K)]
mean = fpld.combine(fpld.rules.MEAN, decoded)

kl = fpld.theory.kl(truth, mean - truth).mean()
print(f"bits per probe context and node: {bits.round().astype(int).tolist()}")
print(f"bytes sent: {sum(map(len, frames))} (float32 logits: {4 * K * m * V})")
print(f"KL(P* || student) = {kl:.3g} nats per token")
