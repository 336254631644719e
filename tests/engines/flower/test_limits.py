"""Messages that are too large are refused before a run begins, with their size and with what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fpld.cli import main
from fpld.engines.flower.messages import check_message_size
from fpld.errors import SizeError
from tests.engines.flower.conftest import Deployment

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("most", "bits", "what", "cure"),
    [
        (200_000, 1.5, "a message to north", "choose a smaller student, adapters, or combine.weight_bits = 16"),
        (700_000, 60.0, "a frame of north", "choose fewer probe contexts or fewer bits"),
    ],
)
def test_a_run_with_messages_that_are_too_large_is_refused_before_any_node_is_asked(
    most: int, bits: float, what: str, cure: str, tmp_path: Path
) -> None:
    changes = [("wait = 0.2", f"wait = 0.2\nmost_message = {most}"), ("bits = 1.5", f"bits = {bits}")]
    deployment = Deployment(tmp_path, changes)
    grid = deployment.grid()
    with pytest.raises(SizeError) as raised:
        deployment.serve(grid)
    error = raised.value
    assert (error.most, error.size > most) == (most, True)
    said = f"{what} would have {error.size:,} bytes, at most {most:,} are carried (flower.most_message): {cure}"
    assert str(error) == said
    assert grid.sent == []


def test_a_message_of_just_the_most_bytes_is_carried() -> None:
    check_message_size("north", 1000, 1000)
    with pytest.raises(SizeError, match="1,001 bytes, at most 1,000"):
        check_message_size("north", 1001, 1000)


def test_the_planner_says_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --links 1Gbit/s,2Mbit/s --clips 1 --deadline 60 --contexts 4000000 --vocab 1024 --codec samples"
    assert main([*words.split(), "--student", "3GB"]) == 0
    said = capsys.readouterr().out
    assert "caution: a student would have 3," in said
    assert main([*words.split(), "--student", "4.3MB"]) == 0
    assert "a student would have" not in capsys.readouterr().out
