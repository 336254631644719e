"""Encode, send, decode and combine: the default codec, with a prior that both ends hold."""

import numpy as np

import fpld

rng = np.random.default_rng(0)
m, V, K = 256, 1024, 3  # probe contexts, vocabulary, nodes
student = rng.normal(0, 2, (m, V))  # logits of the last student on the probe set
nodes = [student + rng.normal(0, 0.7, (m, V)) for _ in range(K)]  # and of each node's model, after training

codec, prior = fpld.SamplesCodec(), fpld.make_prior(student)
plans = [
    fpld.Plan(bytes(16), round=1, node=i, probe=bytes(32), contexts=m, vocab=V, bits=200, slot=i, slots=K, prior=prior)
    for i in range(K)
]
frames = [fpld.seal(fpld.encode(codec, nodes[i], plans[i]), plans[i], codec.code) for i in range(K)]  # at each node
payloads = [fpld.unseal(frames[i], plans[i], codec.code) for i in range(K)]  # at the aggregator
combined = fpld.combine(fpld.rules.MIXTURE, [fpld.decode(codec, payloads[i], plans[i]) for i in range(K)])

exact = fpld.combine(fpld.rules.MIXTURE, [fpld.Decoded(logits, np.zeros(1), np.zeros(1)) for logits in nodes])
error, change = (np.square(np.exp(each) - np.exp(exact)).sum(axis=1).mean() for each in (combined, prior.array / 8))
print(f"{sum(map(len, frames)):,} bytes sent, {4 * K * m * V:,} as float32")
print(f"squared distance to the mixture of the nodes: {error:.5f}; without a word from them: {change:.5f}")
