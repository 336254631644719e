"""What several tests share."""

from __future__ import annotations

from typing import Any

from fpld import Plan


def make_plan(**changes: Any) -> Plan:
    """A small plan, with changes."""
    fields: dict[str, Any] = {
        "run_key": b"a key of a test!",
        "round": 3,
        "node": 1,
        "probe": bytes(range(32)),
        "contexts": 6,
        "vocab": 50,
        "bits": 118.5,
        "clip": 3.0,
    }
    return Plan(**{**fields, **changes})
