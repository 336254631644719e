"""The configuration of a run: one TOML file, checked at the border, every error naming the key.

`load` reads a file, or one of the presets that come with the package. `Config` is what the rest trusts.
"""

from fpld.config.read import examine, load, parse, parse_toml, presets, read_text
from fpld.config.sections import (
    MOST_MESSAGE,
    CombineSection,
    Corpus,
    Count,
    FlowerSection,
    Name,
    NodeSection,
    Positive,
    PrivacySection,
    Section,
    TrainSection,
)
from fpld.config.whole import Config

__all__ = [
    "MOST_MESSAGE",
    "CombineSection",
    "Config",
    "Corpus",
    "Count",
    "FlowerSection",
    "Name",
    "NodeSection",
    "Positive",
    "PrivacySection",
    "Section",
    "TrainSection",
    "examine",
    "load",
    "parse",
    "parse_toml",
    "presets",
    "read_text",
]
