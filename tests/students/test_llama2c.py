from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fpld.errors import InputError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fpld.students.llama2c import Piece, read_vocabulary, read_weights, tokenizer_json, write_folder  # noqa: E402
from fpld.students.pretrained import HuggingFaceTokenizer, load_model, locate  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

DIM, HIDDEN, LAYERS, HEADS, KEY_HEADS, LENGTH = 16, 24, 2, 4, 2, 12
WORDS = [" ", "a", "b", "c", "ab", " a", "bc", " ab", "abc", "  "]
V = 3 + 256 + len(WORDS)


def vocabulary_file(words: list[str]) -> bytes:
    pieces = [(0.0, "<unk>"), (0.0, "<s>"), (0.0, "</s>"), *((0.0, chr(byte)) for byte in range(256))]
    pieces += [(-float(rank), word) for rank, word in enumerate(words)]
    rows = [struct.pack("<fi", score, len(text.encode())) + text.encode() for score, text in pieces]
    return struct.pack("<i", 8) + b"".join(rows)


def weights_file(*, tied: bool = True) -> tuple[bytes, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    keys = DIM // HEADS * KEY_HEADS
    shapes = {
        "embed": (V, DIM),
        "rms_att": (LAYERS, DIM),
        "wq": (LAYERS, DIM, DIM),
        "wk": (LAYERS, keys, DIM),
        "wv": (LAYERS, keys, DIM),
        "wo": (LAYERS, DIM, DIM),
        "rms_ffn": (LAYERS, DIM),
        "w1": (LAYERS, HIDDEN, DIM),
        "w2": (LAYERS, DIM, HIDDEN),
        "w3": (LAYERS, HIDDEN, DIM),
        "rms": (DIM,),
        "positions": (2, LENGTH, DIM // HEADS // 2),
    } | ({} if tied else {"read_out": (V, DIM)})
    arrays = {name: rng.normal(0, 0.4, shape).astype("<f4") for name, shape in shapes.items()}
    header = struct.pack("<7i", DIM, HIDDEN, LAYERS, HEADS, KEY_HEADS, V if tied else -V, LENGTH)
    return header + b"".join(array.tobytes() for array in arrays.values()), arrays


def plain_logits(w: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """Compute what llama2.c computes, token by token: coordinates 2i and 2i + 1 of a head are turned together."""
    size = DIM // HEADS
    rate = 10000.0 ** (-np.arange(0, size, 2) / size)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return np.asarray(x / np.sqrt((x * x).mean() + 1e-5) * weight)

    def turned(x: np.ndarray, place: int) -> np.ndarray:
        pairs = x.reshape(-1, size // 2, 2)
        z = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * place * rate)
        return np.stack([z.real, z.imag], axis=-1).reshape(-1, size)

    keys: list[list[np.ndarray]] = [[] for _ in range(LAYERS)]
    values: list[list[np.ndarray]] = [[] for _ in range(LAYERS)]
    out = []
    for place, token in enumerate(ids):
        x = w["embed"][token].astype(np.float64)
        for layer in range(LAYERS):
            h = norm(x, w["rms_att"][layer])
            q = turned(w["wq"][layer] @ h, place)
            keys[layer].append(turned(w["wk"][layer] @ h, place))
            values[layer].append((w["wv"][layer] @ h).reshape(-1, size))
            heads = []
            for head in range(HEADS):
                key = np.array(keys[layer])[:, head // (HEADS // KEY_HEADS)]
                score = np.exp(key @ q[head] / np.sqrt(size))
                heads.append(score / score.sum() @ np.array(values[layer])[:, head // (HEADS // KEY_HEADS)])
            x = x + w["wo"][layer] @ np.concatenate(heads)
            h = norm(x, w["rms_ffn"][layer])
            gate = w["w1"][layer] @ h
            x = x + w["w2"][layer] @ (gate / (1 + np.exp(-gate)) * (w["w3"][layer] @ h))
        out.append(w.get("read_out", w["embed"]) @ norm(x, w["rms"]))
    return np.array(out)


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_computes_what_llama2c_computes(tmp_path: Path, *, tied: bool) -> None:
    data, arrays = weights_file(tied=tied)
    write_folder(data, vocabulary_file(WORDS), tmp_path)
    ids = [1, 262, 5, 270 - 4, 40, 262]
    with torch.no_grad():
        logits = load_model(tmp_path)(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(logits, plain_logits(arrays, ids), atol=2e-4)


def joined_by_score(text: str, pieces: list[Piece]) -> list[int]:
    """Return the tokens of a text as llama2.c makes them: it joins the best pair of neighbours, until there is none."""
    ids = {piece.text: number for number, piece in enumerate(pieces) if number >= 259}
    tokens = []
    for character in f" {text}":
        tokens += [ids[character]] if character in ids else [3 + byte for byte in character.encode()]
    while True:
        pairs = [
            (pieces[ids[union]].score, -place)
            for place in range(len(tokens) - 1)
            if min(tokens[place : place + 2]) >= 259
            and (union := pieces[tokens[place]].text + pieces[tokens[place + 1]].text) in ids
        ]
        if not pairs:
            return tokens
        place = -max(pairs)[1]
        union = pieces[tokens[place]].text + pieces[tokens[place + 1]].text
        tokens[place : place + 2] = [ids[union]]


def test_tokens_are_joined_by_their_scores(tmp_path: Path) -> None:
    data, _ = weights_file()
    write_folder(data, vocabulary_file(WORDS), tmp_path)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    pieces = read_vocabulary(vocabulary_file(WORDS), V)
    for text in ("abc", "ab abc  cab", "\u00e9t\u00e9 <0x41>", "a\n\U0001d11e", ""):
        tokens = tokenizer.encode(text).tolist()
        assert tokenizer.decode(np.array(tokens, np.int32)) == text
        if text:
            assert tokens == joined_by_score(text, pieces)


def test_damaged_files_are_refused() -> None:
    weights, _ = weights_file()
    vocabulary = vocabulary_file(WORDS)
    for data in (b"", weights[:20], weights[:-1], weights + b"\0", struct.pack("<7i", 0, *[1 << 30] * 6), weights[4:]):
        with pytest.raises(InputError, match="model of llama2"):
            read_weights(data)
    for data in (b"", vocabulary[:-1], vocabulary + b"\0", vocabulary.replace(b"bc", b"\xff\xff")):
        with pytest.raises(InputError, match="vocabulary of llama2"):
            read_vocabulary(data, V)
    with pytest.raises(InputError, match="twice"):
        tokenizer_json([*read_vocabulary(vocabulary, V), Piece("ab", 0.0)])


@pytest.mark.slow
def test_stories15m_tells_a_story() -> None:
    folder = locate("stories15m")
    tokenizer = HuggingFaceTokenizer(folder)
    ids = torch.tensor([[1, *tokenizer.encode("Once upon a time").tolist()]])
    written = load_model(folder).generate(ids, max_new_tokens=12, do_sample=False)[0, 1:].numpy()
    assert tokenizer.decode(written.astype(np.int32)).startswith("Once upon a time, there was a little girl named")
    texts = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(texts) == tokenizer.vocab == 32000
