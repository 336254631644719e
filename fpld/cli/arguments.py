"""Arguments that several commands take, and their parsing."""

from __future__ import annotations

import argparse


def numbers(text: str) -> list[float]:
    """Parse a comma-separated list of numbers."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between them, got {text!r}") from None


def one_or_each(values: list[float] | None, nodes: int) -> list[float] | None:
    """Repeat a single value for every node; leave a list as it is (its length is checked where it is used)."""
    return values * nodes if values is not None and len(values) == 1 else values
