"""docs/wire.md says what the code does: its layouts, digests and constants are those that the ends use."""

from __future__ import annotations

import hashlib
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fpld import encode_frame
from fpld.codecs import dither, make_prior, prior, rangecoder, text, updates
from fpld.codecs.predictive import companding, tokens
from fpld.codecs.predictive import decoder as predictive_decoder
from fpld.codecs.predictive import header as predictive
from fpld.codecs.samples import steps, symbol_model
from fpld.codecs.uniform import layout as uniform
from fpld.protocol import shared_prior, weights, wire, written
from fpld.protocol.updates import UPDATES_CODE
from fpld.registry import codecs
from tests.helpers import make_plan

if TYPE_CHECKING:
    from collections.abc import Iterable

PAGE = (Path(__file__).parents[2] / "docs/wire.md").read_text()
FORMS = {"32 bits": "<I", "float64": "<d", "16 bits": "<H"}
KINDS = {"int8": "i1", "float16": "<f2"}


def section(title: str) -> str:
    """Return a section of the page."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(title: str, head: str) -> list[list[str]]:
    """Return the rows of the table with this head in a section."""
    lines = section(title).partition(f"\n| {head} |\n")[2].partition("\n\n")[0].splitlines()[1:]
    return [re.split(r" \| ", line.strip("| ")) for line in lines]


def layout(title: str) -> list[tuple[int, int]]:
    """Return offset and length of the fields that have a fixed place in a section's first table."""
    found = [(offset, size.removesuffix(" each")) for offset, size, _ in rows(title, "offset | bytes | field")]
    return [(int(offset), int(size)) for offset, size in found if offset.isdigit() and size.isdigit()]


def places(*formats: str) -> list[tuple[int, int]]:
    """Return offset and length of fields that follow each other."""
    sizes = [struct.calcsize(f"<{each}") for each in formats]
    return [(sum(sizes[:index]), size) for index, size in enumerate(sizes)]


def fields(form: struct.Struct) -> list[str]:
    return re.findall(r"\d*[a-zA-Z]", form.format)


def test_the_layout_of_a_frame() -> None:
    assert layout("Frame") == places(*fields(wire.HEADER))
    assert rows("Frame", "offset | bytes | field")[-1][:2] == [f"{wire.HEADER.size} + n", str(wire.CHECKSUM_BYTES)]
    assert f"The {wire.OVERHEAD_BYTES} bytes around it" in section("Frame")
    assert f"| 4 | 2 | version, {wire.VERSION} |" in PAGE
    named = ", ".join(f"{codecs.get(name).code} = {name}" for name in sorted(codecs.names(), key=_code))
    assert f"codec: {named}; from 32768 up: yours" in PAGE


def test_the_layout_of_an_update() -> None:
    assert layout("Payload with an update") == places(*fields(updates.HEADER))
    assert f"magic, `{updates.MAGIC.decode()}`" in section("Payload with an update")
    assert f"Number {UPDATES_CODE} is that of a payload with an update" in section("Frame")
    assert UPDATES_CODE not in {_code(name) for name in codecs.names()}


def _code(name: str) -> int:
    return codecs.get(name).code


def test_the_fields_of_a_frame_lie_where_the_page_says() -> None:
    plan = make_plan()
    frame = encode_frame(b"data", plan, codec=1)
    known = {
        "magic": b"FPLD",
        "run id": plan.run_id,
        "round": plan.round.to_bytes(4, "little"),
        "node": plan.node.to_bytes(4, "little"),
        "SHA-256 digest of the probe set": plan.probe,
        "contexts m": plan.contexts.to_bytes(4, "little"),
        "vocabulary V": plan.vocab.to_bytes(4, "little"),
        "digest of the plan": plan.digest,
        "payload length n": (4).to_bytes(8, "little"),
    }
    table = {name: (offset, size) for offset, size, name in rows("Frame", "offset | bytes | field")}
    for name, value in known.items():
        (offset, size) = next(place for field, place in table.items() if re.split("[,:]", field)[0] == name)
        assert frame[int(offset) : int(offset) + int(size)] == value, name
    checksum = hashlib.blake2b(frame[:-16], digest_size=16, person=b"fpld frame").digest()
    assert frame[-16:] == checksum
    assert plan.run_id == hashlib.blake2b(b"run id", key=plan.run_key, digest_size=16, person=b"fpld v1").digest()


@pytest.mark.parametrize("bare", [True, False], ids=["bare", "with prior, tables, written text and a label space"])
def test_the_digest_of_a_plan_is_that_of_the_parts_that_the_page_lists(bare: bool) -> None:
    learnt: np.ndarray | None = None if bare else np.arange(1, 7, dtype=np.uint16)
    known = None if bare else make_prior(np.linspace(-3, 3, 300).reshape(6, 50))
    space = b"" if bare else bytes(range(32))
    plan = make_plan(slot=1, slots=3, clip=None, written=0 if bare else 12, learnt=learnt, prior=known, space=space)
    values: dict[str, list[Any]] = {
        "run id, probe digest": [plan.run_id, plan.probe],
        "round, node, m, V": [plan.round, plan.node, plan.contexts, plan.vocab],
        "budget B, clip (-1 for none)": [plan.bits, -1.0],
        "slot, slots": [plan.slot, plan.slots],
        "digest of the prior": [bytes(32) if known is None else prior_digest(known.block(range(6)))],
        "only if there are learnt tables: how many integers they are": [] if learnt is None else [learnt.size],
        "and the tables by rows": [] if learnt is None else learnt.tolist(),
        "only if the node is to write text: `written` in ASCII": [] if bare else [b"written"],
        "and w, the contexts that it is to write": [] if bare else [plan.written],
        "only if labels are over strings: `space` in ASCII": [] if bare else [b"space"],
        "and the digest of the maps of node and student": [] if bare else [plan.space],
    }
    listed = rows("Frame", "part | form")
    assert [part for part, _ in listed] == list(values)
    hashed = hashlib.blake2b(digest_size=32, person=b"fpld plan")
    for part, form in listed:
        for value in values[part]:
            packed = FORMS.get(form.removesuffix(" each"))
            hashed.update(struct.pack(packed, value) if packed else value)
    assert hashed.digest() == plan.digest


def prior_digest(integers: np.ndarray) -> bytes:
    """Return the digest of a prior of one block, as the page says."""
    block = hashlib.blake2b(integers.astype("<i2").tobytes(), digest_size=8).digest()
    assert len(integers) <= prior.DIGEST_BLOCK // integers.shape[1] == 2**18 // 50
    return hashlib.blake2b(block, digest_size=32, person=b"fpld prior").digest()


def test_the_layout_of_weights() -> None:
    assert layout("Weights") == places(*fields(weights.HEADER))
    assert rows("Weights", "offset | bytes | field")[-1][0] == str(weights.HEADER.size)
    assert f"magic, `{weights.MAGIC.decode()}`" in section("Weights")
    assert f"| 4 | 4 | version, {weights.VERSION} |" in section("Weights")
    assert (weights.SAME, weights.ALL_BITS, weights.HALF) == (0, 1, 2)
    assert [row[0] for row in rows("Weights", "form | the array")] == ["0", "1", "2"]


def test_the_layout_of_predictive_payloads() -> None:
    title = "Payload of the predictive codec"
    cells = predictive._GROUP
    assert layout(title) == [*places("B", "H", "H"), (5, cells.itemsize)]
    assert predictive.START_BYTES == 3
    assert predictive.cell_bytes(1) == 2 + cells.itemsize
    listed = rows(title, "of a group | bytes | form | without mode 4")
    assert [int(size) for _, size, *_ in listed] == [cells[name].itemsize for name in cells.names or ()]
    assert [KINDS[form.partition(",")[0]] for _, _, form, _ in listed] == [
        cells[name].str.lstrip("|") for name in cells.names or ()
    ]
    first = predictive.default_cells()[0]
    assert [float(first[name]) for name in cells.names or ()] == pytest.approx([0, -8, 0, 0.1, 1 / 12], rel=1e-3)
    assert [default for *_, default in listed] == ["0", "-8", "0", "0.1", "1/12"]


def test_the_layout_of_samples_payloads() -> None:
    title = "Payload of the samples codec"
    assert layout(title) == [*places("H", "f"), (steps.HEADER_BYTES, steps.FINER_BYTES)]
    assert rows(title, "offset | bytes | field")[-1][0] == f"6 or {steps.HEADER_BYTES + steps.FINER_BYTES}"
    listed = dict(rows(title, "position | decision"))
    octaves = symbol_model._SIZE_OCTAVES
    assert list(listed) == [
        f"{symbol_model._ACTIVITY_LEVELS} k + activity",
        f"{symbol_model._EXPECTED} + k",
        f"{symbol_model._SIGN} + k",
        f"{symbol_model._SIZE} + {2 * octaves} (2 h + sign)",
        f"{symbol_model._ESCAPE}, {symbol_model._ESCAPE + 1}",
        f"{symbol_model._GAP}",
    ]
    groups = f"h = ({2 * steps.STEPS_PER_OCTAVE} - R) >> 8, held to 0 ... {symbol_model.SIZE_GROUPS - 1};"
    assert f"of {octaves} octaves; {groups}" in section(title)
    assert listed[f"{symbol_model._GAP}"] == f"a gap, of {symbol_model._GAP_OCTAVES} octaves"
    assert [c for *_, c in rows(title, "positions | q / 64 at first | c")] == [str(symbol_model._INITIAL_COUNT)] * 2 + [
        "0"
    ] * 2


def test_the_layout_of_a_payload_with_written_text() -> None:
    title = "Payload with written text"
    assert layout(title) == places(*fields(written.HEADER))
    listed = rows(title, "offset | bytes | field")
    assert [row[0] for row in listed[5:8]] == [f"{written.HEADER.size}{more}" for more in ("", " + L", " + L + X")]
    assert listed[7][1] == f"{written._ENTRY_BYTES} E"
    ends = [
        [int(end) for end in row[1:]] for row in rows(title, "model | class 0 up to | class 1 up to | class 2 up to")
    ]
    assert ends == text._CLASS_ENDS.tolist()
    plan = make_plan(contexts=48, vocab=24, written=24)
    probe = np.arange(48, dtype=np.int32).reshape(8, 6)
    drawn = hashlib.shake_256(b"fpld written" + plan.run_id + struct.pack("<II", plan.round, plan.node)).digest(8 * 4)
    assert written.beginnings(plan, probe).tolist() == [number % 48 for number in struct.unpack("<4Q", drawn)]


def power(number: int) -> str:
    assert number == 1 << number.bit_length() - 1
    return f"2^{number.bit_length() - 1}"


def spaced(numbers: Iterable[Any]) -> str:
    return " ".join(map(str, numbers))


SAID = {
    "Dither": [
        f"h = j * 0x{dither.GOLDEN:X} + a;  h ^= h >> 16;  h *= 0x{dither.MIX_1:X};",
        f"h ^= b;  h ^= h >> 15;  h *= 0x{dither.MIX_2:X} h += c;",
        f"Philox4x32-{dither.ROUNDS} with key",
        f"`(v + d) mod {dither.PERMUTATIONS}` of {dither.PERMUTATIONS}",
    ],
    "Frame": [f"of the {prior.DIGEST_BYTES}-byte BLAKE2b", f"`max({power(prior.DIGEST_BLOCK)} div V, 1)` contexts"],
    "Payload of the uniform codec": [
        f"words of {uniform.WORD} bits",
        f"A radix is at most {uniform.MAX_RADIX}, a symbol has at most `{power(uniform.MAX_LEVELS)}` levels",
        f"`low` is a sum of {uniform.MAX_LOW}, 4, 2 and 1",
    ],
    "Payload of the predictive codec": [
        f"in eighths of a nat, from {prior.LEAST_PRIOR} to 0",
        f"`min(-prior div {prior.EIGHTHS_PER_NAT // 2}, {prior.CLASSES - 1})`, and four classes are a group",
        f"mode: {predictive.PRIOR} = coded against the prior, {predictive.DITHER} = with dither, ",
        f"with dither, {predictive.MEASURED} = what was measured",
        f"step number n < {predictive.STEPS}; the step is `2^((n - {predictive._OFFSET}) / {predictive.PER_OCTAVE})`",
        f"a bit for each of {predictive.GROUPS} groups",
        f"Contexts come in blocks of `max({power(prior.DIGEST_BLOCK)} div V, 1)`",
        f"of at most {tokens.GAPS}; token 0",
        f"of at most {tokens.SIZES}. There are two tables",
        f"`most = min(4 * 2^k + 2, {power(tokens.MAX_SYMBOL + 1)} - 1)`",
        f"`k = max(0, ceil(({predictive._OFFSET} - n) / {predictive.PER_OCTAVE}))`",
        f"`bucket({2 * tokens.MAX_TAIL + 1}) + 2`",
        f"`1 + floor(c ({tokens.ONE} - t) / max(S, 1))`. What is missing to {tokens.ONE} goes",
        f"If `S > {power(tokens._MAX_COUNTS)}`, all counts are halved",
        f"adds {tokens.COUNT} to its count. A table is made again after {tokens._FIRST_PERIOD} of its tokens, ",
        f"after {2 * tokens._FIRST_PERIOD} more, and so on up to {tokens._LONGEST_PERIOD}, then",
        f"1 for tokens 0 to {tokens._NEAR_GAPS - 1}. Those of symbols are `{spaced(tokens._SMALL_SIZES)}`",
        f"[{tokens.CLASSES} classes, {tokens.GAPS} + {tokens.SIZES} + {tokens.SIZES} tokens]",
        f"`floor(({tokens._LEARNT_COUNTS} p + 2^15) / 2^16)`",
        f"A budget of more than {predictive_decoder._COMPACT_BYTES} bytes",
        f"in `[{power(tokens.LOW)}, 2^32)`",
        f"for `2^(-t / {companding.TAILS_PER_OCTAVE})`, from 0 to {tokens.MAX_TAIL}",
        f"as a gap of class {tokens.CLASSES - 1}",
        f"(4 sqrt pi), 1/{1 / companding.MIN_RATIO:.0f})`",
    ],
    "Payload of the samples codec": [
        f"`g = 0 ... {steps.LEVEL_COUNT - 1}`",
        f"`exp(-g / {prior.EIGHTHS_PER_NAT})`",
        f"step number n < {steps.STEP_COUNT}; the step tau is",
        f"`2^((n - {steps.STEP_OFFSET}) / {steps.STEPS_PER_OCTAVE})`; plus",
        f"plus {steps._TWO_STEPS} if there are two steps",
        f"`R = ((47274 g + 512) >> 10) + n - {steps.STEP_OFFSET}`",
        f">> {steps.BIN_SHIFT}) + {steps.BIN_OFFSET}, held to 0 ... {steps.PLUS_BINS} minus = ",
        f">> {steps.BIN_SHIFT}) + {steps.BIN_OFFSET}, held to 0 ... {steps.MINUS_BINS} log(x)",
        f"({spaced(steps._MANTISSA_LOG2)})[t]",
        f"unless plus is {steps.PLUS_BINS} and minus {steps.MINUS_BINS}",
        f"{rangecoder._END_MARKER_BITS} raw bits, `0x{rangecoder._END_MARKER:X}`",
        f"more than {steps.MAX_SYMBOLS_PER_BYTE} symbols",
        f"in `2^-{rangecoder.PROBABILITY_BITS}` and a count c",
        f"`min(max(q >> 6, {rangecoder._MIN_PROBABILITY}), {(1 << 16) - rangecoder._MIN_PROBABILITY})`",
        f"`min(c + 1, {rangecoder.MAX_COUNT})`",
        f"There are {symbol_model.MODEL_COUNT} positions; k is the pair of bins, `{steps.MINUS_BINS + 1} plus + minus`",
        (
            f"[{symbol_model.MODEL_COUNT}] probabilities in `2^-16` from 1 to 65535, q is 64 times that "
            f"and c is {symbol_model._LEARNT_COUNT}"
        ),
        f"A = {spaced(symbol_model._POSITIVE)} B = {spaced(symbol_model._NEGATIVE)} ```",
        f"width `W = {power(rangecoder._WHOLE)}`",
        f"While `W < {power(rangecoder._TOP)}`",
    ],
    "Payload with written text": [
        f"{rangecoder._END_MARKER_BITS} raw bits `0x{rangecoder._END_MARKER:X}` end it",
        f"from four models, j = 0 ... {text._ORDERS - 1}",
        f"`k = min(d, {text._MAX_TABLE_BITS})`",
        f"`max({text._ENTRIES_PER_BIT} b n T, 2^10)`",
        f"stands for `q = {power(text._HALF)}`",
        f"else `stretch(q >> {text._STRETCH_SHIFT})`",
        f"held to {-text._MAX_STRETCHED - 1} ... {text._MAX_STRETCHED}:",
        f"({text._UNITS_PER_ENTRY} - r) + S[i + 1] r) div {text._UNITS_PER_ENTRY}",
        f"S = {spaced(text._LOGISTIC)} ```",
        f"of the {text._CLASSES**3} triples of classes there are four weights v",
        f"weights v, at first `{power(text._INITIAL_WEIGHT)}`",
        f"held to {text._MIN_PROBABILITY} ... {(1 << text._CODED_BITS) - text._MIN_PROBABILITY}.",
        f"`({text._LEARNING_RATE} x (2^16 z - t) + 2^{text._LEARNING_SHIFT - 1}) >> {text._LEARNING_SHIFT}`",
        f"Above {prior._LIKELY_EIGHTHS} it is rounded to the nearest integer, otherwise to the nearest multiple of 8.",
        f"`max(-8 g, {prior.LEAST_PRIOR})` ... 0",
        f"A gap of {shared_prior._SKIP} names no coordinate",
    ],
}


@pytest.mark.parametrize(("title", "said"), [(title, said) for title, some in SAID.items() for said in some])
def test_a_constant_of_the_code_is_on_the_page(title: str, said: str) -> None:
    assert " ".join(said.split()) in " ".join(section(title).split())


def test_formulas_of_the_page_that_stand_in_the_code_as_tables() -> None:
    assert [int(each) for each in steps.MINUS_LOG2_PRIOR] == [(47274 * g + 512) >> 10 for g in range(321)]
    assert [int(each) for each in rangecoder.RATES] == [min(2**17 // (2 * c + 3), 2**15) for c in range(251)]
    bits = {vocab: (16 * vocab).bit_length() for vocab in (2, 1024, 50257, 2**24)}
    least = {vocab: max(-8 * (7 * a // 10), -320) for vocab, a in bits.items()}
    assert {vocab: prior.coarse_grid(vocab).least for vocab in bits} == least
    most = [min(4 * 2 ** max(0, -((n - 5632) // 256)) + 2, 2**24 - 1) for n in range(0, 6656, 97)]
    assert [predictive.largest_symbol(n) for n in range(0, 6656, 97)] == most
