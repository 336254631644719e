from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpld.data import Document, TextUse, by_label, corpus, dirichlet, hold_out, iid, sample_documents, total_size
from fpld.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DOCUMENTS = st.lists(
    st.builds(
        Document,
        st.text("ab", max_size=2),
        st.text(min_size=1),
        st.sampled_from("xyz"),
        st.sampled_from("pq"),
    ),
    max_size=40,
)
NODES = st.integers(1, 5).map(lambda count: [f"n{k}" for k in range(count)])
SEEDS = st.integers(0, 2**32)
MANY = [Document(f"d{i}", "t" * (1 + i % 7), f"label{i % 10}") for i in range(2000)]


def _bytes(documents: Sequence[Document]) -> int:
    return sum(document.size for document in documents)


def _same(shards: Mapping[str, Sequence[Document]], documents: list[Document]) -> bool:
    return Counter(document for members in shards.values() for document in members) == Counter(documents)


@pytest.mark.slow
@given(documents=DOCUMENTS, nodes=NODES, seed=SEEDS)
def test_iid_uses_every_document_once_in_equal_numbers(documents: list[Document], nodes: list[str], seed: int) -> None:
    if len(documents) < len(nodes):
        with pytest.raises(InputError, match=f"node .*'{nodes[-1]}' without documents"):
            iid(documents, nodes, seed=seed)
        return
    shards = iid(documents, nodes, seed=seed)
    assert list(shards) == nodes
    assert _same(shards, documents)
    sizes = [len(members) for members in shards.values()]
    assert max(sizes) - min(sizes) <= 1


@given(documents=DOCUMENTS, nodes=NODES, seed=SEEDS, alpha=st.floats(1e-6, 1e6))
def test_dirichlet_uses_every_document_once_or_names_the_empty_node(
    documents: list[Document], nodes: list[str], seed: int, alpha: float
) -> None:
    try:
        shards = dirichlet(documents, nodes, alpha=alpha, seed=seed)
    except InputError as error:
        assert "without documents" in str(error)  # noqa: PT017 - both outcomes are right, for different inputs
        return
    assert _same(shards, documents)
    assert all(shards.values())


@given(documents=DOCUMENTS.filter(bool))
def test_by_label_uses_every_document_once(documents: list[Document]) -> None:
    shards = by_label(documents)
    assert _same(shards, documents)
    assert all({document.label for document in members} == {label} for label, members in shards.items())


@given(documents=DOCUMENTS, seed=SEEDS, fraction=st.floats(0.01, 0.99))
def test_hold_out_keeps_groups_whole(documents: list[Document], seed: int, fraction: float) -> None:
    groups = {document.group for document in documents}
    if len(groups) < 2:
        with pytest.raises(InputError, match="at least two groups"):
            hold_out(documents, fraction=fraction, seed=seed)
        return
    training, held = hold_out(documents, fraction=fraction, seed=seed)
    assert _same({"training": training, "held": held}, documents)
    assert training
    assert held
    assert not {document.group for document in training} & {document.group for document in held}


@given(order=st.permutations(MANY[:30]), seed=SEEDS)
def test_hold_out_does_not_depend_on_the_order_of_documents(order: list[Document], seed: int) -> None:
    _, expected = hold_out(MANY[:30], fraction=0.3, seed=seed)
    _, held = hold_out(order, fraction=0.3, seed=seed)
    assert set(held) == set(expected)


def test_hold_out_takes_the_fraction_of_bytes_and_one_group_at_most_more() -> None:
    _, held = hold_out(MANY, fraction=0.25, seed=1)
    share = _bytes(held) / _bytes(MANY)
    assert 0.25 <= share <= 0.25 + 7 / _bytes(MANY)


def test_a_lone_document_named_like_a_group_is_not_of_the_group() -> None:
    documents = [Document("g", "x"), Document("other", "x", group="g")]
    training, held = hold_out(documents, fraction=0.5, seed=0)
    assert len(training) == len(held) == 1


NOVEL = Document("novel", "\n\n".join(f"Paragraph {i}: " + "word " * 20 for i in range(300)))
NOTES = [Document(f"note{i}", "a short note " * 3) for i in range(20)]


def test_without_a_limit_all_documents_are_used() -> None:
    assert sample_documents(MANY, None, seed=0) == MANY
    assert sample_documents(MANY, total_size(MANY), seed=0) == MANY


@given(documents=DOCUMENTS.filter(bool), most=st.integers(4, 60), seed=SEEDS)
def test_a_limit_is_never_exceeded_and_cuts_one_document_at_most(
    documents: list[Document], most: int, seed: int
) -> None:
    try:
        sample = sample_documents(documents, most, seed=seed)
    except InputError as error:
        assert "leaves no text" in str(error)  # noqa: PT017 - the first document may begin with blanks
        return
    assert 0 < total_size(sample) <= most or total_size(documents) <= most
    cut = [document for document in sample if document not in documents]
    assert len(cut) <= 1
    assert sample == sample_documents(documents, most, seed=seed)


def test_a_limit_takes_a_sample_and_not_the_first_by_name() -> None:
    most = 1000
    samples = [{document.name for document in sample_documents(MANY, most, seed=seed)} for seed in range(2)]
    assert samples[0] != samples[1]
    # The documents among the first 250 by order are in a sample of 250 of 2000 with a chance of 1/8 each: 31 of them,
    # with a standard deviation of 5.
    first = {document.name for document in MANY[:250]}
    assert all(len(sample & first) < 70 for sample in samples)
    in_order = [document.name for document in sample_documents(MANY, most, seed=0)]
    assert in_order == sorted(in_order, key=[document.name for document in MANY].index)


def test_a_novel_is_cut_to_the_limit_at_a_paragraph() -> None:
    (start,) = sample_documents([NOVEL], 5000, seed=0)
    assert 4500 < start.size <= 5000
    assert start.text.endswith("\n\n")
    assert NOVEL.text.startswith(start.text)


def test_a_long_document_is_split_rather_than_held_out_whole() -> None:
    for documents in ([NOVEL, *NOTES], [NOVEL, Document("other", NOVEL.text[::-1])]):
        for seed in range(8):
            training, held = hold_out(documents, fraction=0.15, seed=seed)
            assert 0 < total_size(held) / total_size(documents) < 0.25
            # Nothing is lost, and nothing is on both sides.
            rebuilt = Counter("".join(document.text for document in (*training, *held)))
            assert rebuilt == Counter("".join(document.text for document in documents))


def test_what_is_left_out_is_said() -> None:
    use = TextUse("north", 3, 13_000_000, 4_000_000, 600_000, "data.limit")
    assert use.left_out == "north: 4.0 of 13.0 MB used (data.limit)"
    assert use.heldout_share == "15.0% of the bytes"
    assert replace(use, tokens=1000, heldout_tokens=162).heldout_share == "16.2% of the tokens"
    assert not TextUse("north", 3, 13, 13, 2, "data.limit").left_out


def _spread(alpha: float) -> float:
    """Return the mean largest share of a label at one of 4 nodes: 1/4 when even, 1 when one node has all."""
    shards = dirichlet(MANY, ["a", "b", "c", "d"], alpha=alpha, seed=3)
    counts = [Counter(document.label for document in members) for members in shards.values()]
    return float(np.mean([max(count[f"label{j}"] for count in counts) / 200 for j in range(10)]))


def test_a_small_alpha_makes_nodes_differ() -> None:
    assert _spread(1e6) == pytest.approx(0.25, abs=0.01)
    # E[max of Dirichlet(1,1,1,1)] = (1 + 1/2 + 1/3 + 1/4) / 4 = 0.52; the mean of ten has sd 0.045.
    assert _spread(1.0) == pytest.approx(0.52, abs=0.18)
    assert _spread(1e-3) > 0.97


def test_an_alpha_that_underflows_gives_each_label_to_one_node() -> None:
    shards = dirichlet(MANY, ["a", "b"], alpha=1e-320, seed=0)
    assert not {document.label for document in shards["a"]} & {document.label for document in shards["b"]}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: iid(MANY, [], seed=0), "nodes must be one or more different names"),
        (lambda: iid(MANY, "ab", seed=0), "nodes must be one or more different names, got 'ab'"),
        (lambda: iid(MANY, ["a", "a"], seed=0), "different names"),
        (lambda: dirichlet(MANY, ["a"], alpha=0.0, seed=0), "alpha must be a positive number, got 0"),
        (lambda: dirichlet(MANY, ["a"], alpha=float("nan"), seed=0), "alpha must be"),
        (lambda: by_label([]), "at least one document"),
        (
            lambda: by_label(MANY, nodes=["label1", "nobody"]),
            "node 'nobody' has no documents: the labels are label0",
        ),
        (lambda: hold_out(MANY, fraction=1.0, seed=0), "fraction must lie between 0 and 1, got 1.0"),
    ],
)
def test_bad_input_is_named(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(InputError, match=message):
        call()


def test_golden_split_of_the_annual_messages() -> None:
    hashed = hashlib.sha256()
    shares = {}
    for label, members in by_label(corpus("sotu")).items():
        training, held = hold_out(members, fraction=0.1, seed=0)
        years = {document.group for document in held}
        assert not years & {document.group for document in training}
        shares[label] = _bytes(held) / _bytes(members)
        for side in (training, held):
            for document in side:
                hashed.update(f"{label}/{document.name}\n".encode() + document.text.encode())
    assert all(0.1 <= share < 0.25 for share in shares.values())
    assert hashed.hexdigest() == "82290340cdd56f4140b8f05a13d9172dbd06ca5867dde47fcd924f3f9e036791"
