"""Sort medical journals into the specialties of a hospital, by the words of their abbreviated titles.

MEDLINE abbreviates titles by fixed rules, so the beginnings of words tell the specialty. A title that fits
none (physiology, biochemistry, general medicine) is `general`: good public text for the others.
"""

from __future__ import annotations

import re

GENERAL = "general"

# The first match wins: surgery comes before the organs it operates on, but neurosurgery is neurology.
_BEGINNINGS = {
    "neurology-psychiatry": (
        r"neuro|psych|brain|epilep|stroke|ment\b|alcohol|schizo|nerv|childs brain|prog neuro|pharmakopsych"
    ),
    "surgery": r"surg|chir|orthop|bone joint|anaesth|anesth|transplant|urol|dis colon|endosc|trauma|plast",
    "radiology": r"roentgen|radiol|ultraso|nucl med|tomogr|comput tomogr|med phys",
    "paediatrics-obstetrics": (
        r"p[ae]+diatr|child|kinder|neonat|obstet|gyn[ae]|fertil|contracep|reprod|perinat|"
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
