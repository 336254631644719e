"""Draw the probe set: the public contexts on which all nodes are compared.

Every position of a sequence is a context, so S sequences of T tokens are m = S * T contexts and one forward
pass over a sequence gives the logits of T of them. Both ends compare the digest before they compare logits.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.data.token_stream import check_text, is_stream
from fpld.data.tokenizers import check_token_ids
from fpld.errors import InputError
from fpld.storage.files import canonical_json, read_json, write_atomic

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray

    from fpld.data.tokenizers import Tokenizer

FORMAT = "fpld-probe-1"
_MAX_PERMUTED = 1 << 23  # windows of a text that are all shuffled to choose some


@dataclass(frozen=True, eq=False)
class ProbeSet:
    """Public sequences [S, T], with the vocabulary and the digest of the tokenizer that made them."""

    sequences: NDArray[np.int32]
    vocab: int
    tokenizer: str

    def __post_init__(self) -> None:
        array = np.asarray(self.sequences)
        if array.ndim != 2 or array.size == 0:
            raise InputError(f"sequences must be a non-empty array [S, T], got shape {array.shape}")
        if not 1 <= self.vocab <= 2**31:
            raise InputError(f"vocab must lie in 1..2^31, got {self.vocab}")
        if not _is_digest(self.tokenizer):
            raise InputError(f"tokenizer must be a SHA-256 in 64 hexadecimal digits, got {self.tokenizer!r}")
        frozen = check_token_ids(array, self.vocab).astype(np.int32)
        frozen.flags.writeable = False
        object.__setattr__(self, "sequences", frozen)

    @classmethod
    def draw(
        cls, tokens: NDArray[np.integer[Any]], *, contexts: int, length: int, tokenizer: Tokenizer, seed: int
    ) -> ProbeSet:
        """Draw at least `contexts` contexts, in whole sequences of `length`, from public tokens.

        The text is cut into windows that do not overlap; a random choice of them is kept in text order.
        """
        if length < 1 or contexts < 1:
            raise InputError(f"contexts and length must be at least 1, got {contexts} and {length}")
        stream = _checked_stream(tokens, tokenizer.vocab)
        if stream.ndim != 1:
            raise InputError(f"tokens must be one stream [N], got shape {stream.shape}")
        windows = stream.size // length
        if windows == 0:
            raise InputError(
                f"the public text has {stream.size} tokens, fewer than one sequence of {length}: "
                "give more text or a smaller length"
            )
        wanted = -(-contexts // length)
        if wanted > windows:
            raise InputError(
                f"contexts={contexts} is more than the public text offers: {windows * length} contexts in "
                f"{windows} sequences of {length}"
            )
        return cls(_windows(stream, length, wanted, seed), tokenizer.vocab, tokenizer.digest)

    def redraw(self, tokens: NDArray[np.integer[Any]], *, seed: int) -> ProbeSet:
        """Draw as many contexts anew, in sequences of the same length, from the same public tokens."""
        stream = _checked_stream(tokens, self.vocab)
        wanted, length = self.sequences.shape
        if stream.ndim != 1 or stream.size < wanted * length:
            raise InputError(f"the public text must have at least {wanted * length} tokens, got shape {stream.shape}")
        return ProbeSet(_windows(stream, length, wanted, seed), self.vocab, self.tokenizer)

    @property
    def contexts(self) -> int:
        """Return m = S * T."""
        return int(self.sequences.size)

    @property
    def following(self) -> NDArray[np.int64]:
        """Return the token that follows each context [m]; -1 at the end of a sequence, where it is not known."""
        unknown = np.full((len(self.sequences), 1), -1)
        return np.concatenate([self.sequences[:, 1:], unknown], axis=1).astype(np.int64).ravel()

    @functools.cached_property
    def digest(self) -> str:
        """Return the SHA-256 over shape, vocabulary, tokenizer digest and tokens (little-endian, by rows)."""
        count, length = self.sequences.shape
        hashed = hashlib.sha256(FORMAT.encode("ascii"))
        hashed.update(struct.pack("<QQQ", count, length, self.vocab))
        hashed.update(bytes.fromhex(self.tokenizer))
        hashed.update(self.sequences.astype("<i4").tobytes(order="C"))
        return hashed.hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the probe set as JSON, with its digest."""
        serial = {
            "format": FORMAT,
            "vocab": self.vocab,
            "tokenizer": self.tokenizer,
            "digest": self.digest,
            "sequences": self.sequences.tolist(),
        }
        write_atomic(Path(path), canonical_json(serial))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ProbeSet:
        """Read a probe set that `save` wrote, and check its digest."""
        file = Path(path)
        serial = read_json(file, FORMAT)
        try:
            sequences = np.array(serial["sequences"])
            if sequences.dtype.kind != "i":
                raise InputError(f"sequences must be integers in rows of one length, got {sequences.dtype}")
            probe = cls(sequences, int(serial["vocab"]), serial["tokenizer"])
            digest = serial["digest"]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"{file} is not a whole probe set ({error}): write it again with save()") from None
        if digest != probe.digest:
            raise InputError(f"{file} is damaged: its digest must be {digest}, it is {probe.digest}")
        return probe


def _windows(stream: NDArray[np.integer[Any]], length: int, wanted: int, seed: int) -> NDArray[np.int32]:
    """Return some of the windows that a text is cut into, chosen at random, in text order."""
    windows = stream.size // length
    rng = np.random.default_rng(seed)
    # A permutation takes eight bytes for each window, which is too much for a very long text.
    chosen = rng.permutation(windows)[:wanted] if windows <= _MAX_PERMUTED else rng.choice(windows, wanted, False)
    starts = np.sort(chosen)[:, None] * length
    sequences: NDArray[np.int32] = stream[starts + np.arange(length)].astype(np.int32)
    return sequences


def _checked_stream(tokens: NDArray[np.integer[Any]], vocab: int) -> NDArray[np.integer[Any]]:
    """Return the tokens of a text; those of a stream are checked when they are read."""
    return check_text(tokens, vocab, 0) if is_stream(tokens) else check_token_ids(tokens, vocab)


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and len(text) == 64 and all(digit in "0123456789abcdef" for digit in text)
