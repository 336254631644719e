"""Every key of the configuration is in the docs, and every preset is sound."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from fpld import config
from fpld.config import Config
from fpld.units import parse_rate

PAGE = (Path(__file__).parent.parent / "docs/running.md").read_text()


def sections() -> dict[str, type[BaseModel]]:
    found: dict[str, type[BaseModel]] = {}
    for name, field in Config.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found[name] = kind
    return found


@pytest.mark.parametrize("section", sections())
def test_every_key_is_documented(section: str) -> None:
    assert f"[{section}]" in PAGE
    for key in sections()[section].model_fields:
        assert f"`{key}`" in PAGE, key


@pytest.mark.parametrize("name", config.presets())
def test_presets_are_sound(name: str) -> None:
    loaded, text = config.load(name)
    assert loaded == config.parse(text, name)
    assert text.startswith("#")


def test_the_demonstration_is_a_preset_with_two_thin_uplinks() -> None:
    demo, _ = config.load("demo")
    bits = sorted(node.bits or 0 for node in demo.nodes)
    assert bits[1] <= bits[2] / 2


@pytest.mark.parametrize(
    ("text", "rate"), [("64 kbit/s", 64e3), ("1.5Mbit/s", 1.5e6), ("300 bit/s", 300.0), (9600, 9600)]
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["64", "64 kB/s", "fast", "kbit/s", "-5 kbit/s x"])
def test_bad_rates_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a rate such as"):
        parse_rate(text)


def test_learning_rates_go_from_the_first_to_the_last_round() -> None:
    section = config.TrainSection(steps=1, rate=4.0, last_rate=2.0)
    assert [section.rate_in(t, 3) for t in (1, 2, 3)] == [4.0, 3.0, 2.0]
    assert config.TrainSection(steps=1, rate=4.0).rate_in(3, 3) == 4.0
