"""The configuration of a run: one TOML file, checked at the border, every error naming the key.

`read_config` reads a file, or one of the presets that come with the package. `Config` is what the rest trusts.
"""

from fpld.config.config import (
    Config,
    examine,
    override_keys,
    parse_config,
    parse_toml,
    presets,
    read_config,
    read_config_text,
)
from fpld.config.sections import (
    MOST_MESSAGE,
    AtOnce,
    CombineSection,
    Corpus,
    Count,
    FlowerSection,
    Name,
    NodeSection,
    Patches,
    Positive,
    PrivacySection,
    Processes,
    Section,
    SendSection,
    TrainSection,
    WrittenSection,
)

__all__ = [
    "MOST_MESSAGE",
    "AtOnce",
    "CombineSection",
    "Config",
    "Corpus",
    "Count",
    "FlowerSection",
    "Name",
    "NodeSection",
    "Patches",
    "Positive",
    "PrivacySection",
    "Processes",
    "Section",
    "SendSection",
    "TrainSection",
    "WrittenSection",
    "examine",
    "override_keys",
    "parse_config",
    "parse_toml",
    "presets",
    "read_config",
    "read_config_text",
]
