"""Measure how a text is prepared: seconds, rate and peak memory, beside `tokenizers` alone, and the cost of a step.

The text is enwik8, shuffled by blocks of about 100 kB and repeated until it has the size that is asked for: files of 20
MB, each a `.txt` of one document, or with `--records` JSON lines of 800 characters each. For each size three processes
run, one after the other:

- *bare*: `encode_batch_fast` of the `tokenizers` library on the same files, in pieces of 64 kB or in records, a batch
  of 2 MB at once. The ids stay where the library has them.
- *prepare*: the files are measured, digested and tokenized, and the tokens are written to the cache.
- *again*: the same in a new process, which finds all of it there. Some documents are held out. Then come steps of a
  small transformer on the others, 20,000 draws of 16 windows, and one search of the text for runs of private tokens.

`ratio` is the rate of *prepare* over that of *bare*, by the clock; `cpu_ratio` by the seconds of processor time, which
other work on the machine changes less. Peaks are `VmHWM`. `growth_mb` is how much more memory is resident after the
draws and the search than before. `python -m benchmarks.texts --sizes 20,200,2000` prints a row of JSON for each size;
with `--out` they are kept for the docs. With `--bytes` every byte is a token: there is no *bare* process and no search,
and a text of 2 GB takes minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.data import BpeTokenizer, ByteTokenizer, corpus, hold_out, read_documents, total_size
from fpld.data.documents import cut_at_lines
from fpld.data.stored import TEXT_CACHE
from fpld.data.token_cache import TokenCache
from fpld.data.tokenizers import load_tokenizer, tokenizers_library
from fpld.node.writing import PrivateRuns
from fpld.students.configs import TransformerConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from fpld.types import Tokens

FILE_BYTES = 20_000_000
PIECE_CHARACTERS = 1 << 16
BATCH_CHARACTERS = 1 << 21
TOKENIZER_BYTES = 5_000_000
RECORD_CHARACTERS = 800
STEPS = 30
DRAWS = 20_000
HELDOUT = 0.15
RUN = 8  # tokens


def make_text(folder: Path, size: int, cache: Path, *, records: bool) -> Path:
    """Write files of `size` bytes in all, unless they are there; return their folder."""
    place = folder / f"{'jsonl' if records else 'txt'}-{size // 1_000_000}"
    if (place / "done").exists():
        return place
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    blocks = [document.text for document in corpus("enwik8", cache)]
    rng = np.random.default_rng(0)
    written = 0
    number = 0
    waiting: list[str] = []
    while written < size:
        if not waiting:
            waiting = [blocks[index] for index in rng.permutation(len(blocks))]
        filled = 0
        with (place / f"{number:04d}.{'jsonl' if records else 'txt'}").open("w", encoding="utf-8", newline="") as file:
            while waiting and filled < min(FILE_BYTES, size - written):
                text = waiting.pop()
                file.write(as_records(text) if records else text)
                filled += len(text.encode())
        written += filled
        number += 1
    (place / "done").write_bytes(b"")
    return place


def as_records(text: str) -> str:
    """Return a text as JSON lines of short records."""
    starts = range(0, len(text), RECORD_CHARACTERS)
    return "".join(json.dumps({"text": text[start : start + RECORD_CHARACTERS]}) + "\n" for start in starts)


def texts(folder: Path) -> list[Path]:
    """Return the files of a text."""
    return sorted(file for file in folder.iterdir() if file.suffix in (".txt", ".jsonl"))


def read_file(file: Path) -> list[str]:
    """Return the documents of a file."""
    content = file.read_text("utf-8")
    return [content] if file.suffix == ".txt" else [json.loads(line)["text"] for line in content.splitlines()]


def measured(started: tuple[float, float]) -> dict[str, float]:
    """Return seconds by the clock and of processor time since `started`, and the peak of this process in MB."""
    return {
        "seconds": round(time.perf_counter() - started[0], 2),
        "cpu_seconds": round(time.process_time() - started[1], 2),
        "peak_mb": memory("VmHWM"),
    }


def memory(name: str) -> int:
    """Return a line of this process's memory, in MB."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    kilobytes = next(int(line.split()[1]) for line in status.splitlines() if line.startswith(name))
    return round(1024 * kilobytes / 1e6)


def run_bare(folder: Path, tokenizer: Path) -> dict[str, Any]:
    """Encode the text with the library alone."""
    library = tokenizers_library().Tokenizer.from_file(str(tokenizer))
    started = (time.perf_counter(), time.process_time())
    tokens = 0
    batch: list[str] = []
    waiting = 0

    def encode() -> int:
        return sum(len(encoding) for encoding in library.encode_batch_fast(batch))

    for file in texts(folder):
        for document in read_file(file):
            for piece in cut_at_lines(document, PIECE_CHARACTERS):
                batch.append(piece)
                waiting += len(piece)
                if waiting >= BATCH_CHARACTERS:
                    tokens += encode()
                    batch.clear()
                    waiting = 0
    tokens += encode()
    return {"tokens": tokens, **measured(started)}


def run_prepare(folder: Path, tokenizer: Path, cache: Path) -> dict[str, Any]:
    """Prepare the text as a node does; where it is prepared already, say how long that takes to see."""
    loaded = load_tokenizer(tokenizer)
    started = (time.perf_counter(), time.process_time())
    documents = read_documents(folder, cache=cache)
    encoded = TokenCache(cache, loaded).encode(documents)
    sizes = {"bytes": total_size(documents), "documents": len(documents), "tokens": len(encoded.tokens)}
    return {**sizes, **measured(started)}


def run_again(folder: Path, tokenizer: Path, cache: Path) -> dict[str, Any]:
    """Find the text prepared, and train on it."""
    row = run_prepare(folder, tokenizer, cache)
    loaded = load_tokenizer(tokenizer)
    train, _ = hold_out(read_documents(folder, cache=cache), fraction=HELDOUT, seed=0)
    tokens = TokenCache(cache, loaded).encode(train).tokens
    import torch

    from fpld.students.transformer import Transformer

    student = Transformer(TransformerConfig(vocab=loaded.vocab), seed=0)
    student.finetune(tokens, steps=3, seed=0)
    torch.set_num_threads(1)  # as in a run, where threads do not wait for each other in seconds that are counted
    started = (time.perf_counter(), time.process_time())
    student.finetune(tokens, steps=STEPS, seed=1)
    step = measured(started)
    resident = memory("VmRSS")
    random = np.random.default_rng(0)
    begun = time.process_time()
    for _ in range(DRAWS):
        tokens[random.integers(len(tokens) - 33, size=16)[:, None] + np.arange(33)]
    drawing = (time.process_time() - begun) / DRAWS
    searching = None if isinstance(loaded, ByteTokenizer) else search_seconds(tokens, loaded.vocab)
    return {
        "seconds": row["seconds"],
        "step_ms": round(1000 * step["cpu_seconds"] / STEPS, 2),
        "draw_us": round(1e6 * drawing),
        "search_seconds": searching,
        "growth_mb": memory("VmRSS") - resident,
        "peak_mb": memory("VmHWM"),
    }


def search_seconds(tokens: Tokens, vocab: int) -> float:
    """Return the processor time of one search of a text for runs of eight sequences."""
    begun = time.process_time()
    public = np.random.default_rng(0).integers(vocab, size=(8, 32), dtype=np.int32)
    PrivateRuns(tokens, public, RUN).stand_in(tokens[np.arange(256)].reshape(8, 32))
    return round(time.process_time() - begun, 2)


def _child(part: str, *arguments: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.texts", "--part", part, *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure_size(folder: Path, size: int, archives: Path, *, records: bool, as_bytes: bool) -> dict[str, Any]:
    """Return the row of a size."""
    place = make_text(folder, size, archives, records=records)
    tokenizer = folder / ("bytes.json" if as_bytes else "bpe.json")
    if as_bytes:
        ByteTokenizer().save(tokenizer)
    elif not tokenizer.exists():
        sample = "".join(read_file(texts(place)[0]))[:TOKENIZER_BYTES]
        BpeTokenizer.train([sample], vocab=1024).save(tokenizer)
    cache = folder / TEXT_CACHE
    shutil.rmtree(cache, ignore_errors=True)
    bare = None if as_bytes else _child("bare", place, tokenizer)
    prepare = _child("prepare", place, tokenizer, cache)
    again = _child("again", place, tokenizer, cache)
    size = prepare["bytes"]
    return {
        "mb": round(size / 1e6, 1),
        "documents": prepare["documents"],
        "tokens": prepare["tokens"],
        "bare_seconds": bare and bare["seconds"],
        "seconds": prepare["seconds"],
        "mb_per_second": round(size / 1e6 / prepare["seconds"], 2),
        "ratio": bare and round(bare["seconds"] / prepare["seconds"], 2),
        "cpu_ratio": bare and round(bare["cpu_seconds"] / prepare["cpu_seconds"], 2),
        "peak_mb": prepare["peak_mb"],
        "again_seconds": again["seconds"],
        "step_ms": again["step_ms"],
        "draw_us": again["draw_us"],
        "search_seconds": again["search_seconds"],
        "growth_mb": again["growth_mb"],
        "train_peak_mb": again["peak_mb"],
    }


def main(words: list[str] | None = None) -> int:
    """Measure the sizes that are asked for, or one part in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="20,200", help="megabytes of text (default: 20,200)")
    parser.add_argument("--records", action="store_true", help="short records in place of files of one document")
    parser.add_argument("--bytes", action="store_true", help="tokens are bytes: no tokenizer beside it")
    parser.add_argument("--out", type=Path, help="folder for the rows, as docs/kept_results.py reads them")
    parser.add_argument("--folder", type=Path, default=Path("out/texts"), help="for files and cache")
    parser.add_argument("--archives", type=Path, help="the package's cache, for enwik8")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.part:
        part, *paths = arguments.part
        parts: dict[str, Callable[..., dict[str, Any]]] = {"bare": run_bare, "prepare": run_prepare, "again": run_again}
        print(json.dumps(parts[part](*map(Path, paths))))
        return 0
    kinds = [kind for kind in ("records", "bytes") if getattr(arguments, kind)]
    command = " ".join(["python -m benchmarks.texts", *(f"--{kind}" for kind in kinds), f"--sizes {arguments.sizes}"])
    kept: dict[str, Any] = {"command": command, "seeds": [0], "rows": []}
    for size in arguments.sizes.split(","):
        row = measure_size(
            arguments.folder,
            int(size) * 1_000_000,
            arguments.archives,
            records=arguments.records,
            as_bytes=arguments.bytes,
        )
        kept["rows"].append(row)
        print(json.dumps(row), flush=True)
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
            name = "-".join(["texts", *kinds])
            (arguments.out / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
