"""What the models of a run or a node are worth on a text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.data import encode_documents, read_documents
from fpld.errors import InputError
from fpld.protocol.weights import weights_digest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fpld.report.models import Models

Tokens = np.ndarray[Any, Any]


def read_text(models: Models, path: Path | None, field: str) -> list[Tokens]:
    """Return a text as the models' tokens; without a path the texts that were held out, one for each node."""
    if path is not None:
        return [encode_documents(read_documents(path, field=field), models.tokenizer)]
    if not models.heldout:
        raise InputError("--data must be given: the held-out texts are with the nodes, not in this folder")
    return models.heldout


def evaluate(models: Models, texts: Sequence[Tokens], length: int) -> list[dict[str, Any]]:
    """Return a row for each model: nats per token, averaged over the texts, bits per byte and perplexity."""
    tokens = sum(len(text) for text in texts)
    size = sum(models.tokenizer.text_bytes(text) for text in texts)
    rows, known = [], dict[str, float]()
    for name in models.models:
        student = models.open(name)
        digest = weights_digest(student.state())  # the best student is often the last one, too
        if digest not in known:
            found = [student.loss(text, length) for text in texts]
            known[digest] = sum(nats / count for nats, count in found) / len(found)
        loss = known[digest]
        rows.append(
            {
                "model": name,
                "loss": loss,
                "bits_per_byte": loss * tokens / size / math.log(2),
                "perplexity": math.exp(loss),
                "tokens": tokens,
                "bytes": size,
            }
        )
    return rows
