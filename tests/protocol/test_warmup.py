"""Kernels are compiled beforehand for every codec with every rule that can combine what it decodes."""

from __future__ import annotations

import pytest

from fpld.protocol.fast_paths import warm_up
from fpld.registry import codecs, rules


@pytest.mark.parametrize("codec", codecs.names())
def test_a_codec_is_warmed_up_with_any_rule(codec: str) -> None:
    for rule in rules.names():
        warm_up(codec, rule)
