"""Numbers with units as text: rates of links, sizes, durations and times."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

from fpld.validation import shown

RATES = {"bit/s": 1.0, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9}
SIZES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}

NATS_PER_TOKEN = "nats per token"  # noqa: S105 - no password
BITS_PER_BYTE = "bits per byte"


def parse_rate(value: Any) -> Any:
    """Read a link's rate in bit/s from a number, or from text such as "64 kbit/s".

    >>> parse_rate("64 kbit/s")
    64000.0
    """
    return value if not isinstance(value, str) else _parse(value, RATES, "a rate such as '64 kbit/s'")


def parse_size(text: str) -> float:
    """Read a size in bytes from text such as "20 MB" (a million bytes each).

    >>> parse_size("1.5 MB")
    1500000.0
    """
    return _parse(text, SIZES, "a size such as '20 MB'")


def show_rate(rate: float) -> str:
    """Write a rate with the unit that suits it; `parse_rate` reads it.

    >>> show_rate(256_000), show_rate(2.5e6)
    ('256 kbit/s', '2.5 Mbit/s')
    """
    return _show(rate, RATES)


def show_size(size: float) -> str:
    """Write a size with the unit that suits it.

    >>> show_size(12_582_912)
    '12.58 MB'
    """
    return _show(size, SIZES)


def show_duration(seconds: float) -> str:
    """Write a duration in hours, minutes and seconds.

    >>> show_duration(0.42), show_duration(48), show_duration(200), show_duration(9000)
    ('0.4 s', '48 s', '3 min 20 s', '2 h 30 min')
    """
    if seconds < 10:
        return f"{round(seconds, 1):g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 1:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{hours:,} h {minutes} min" if minutes else f"{hours:,} h"


def show_time(seconds: float) -> str:
    """Write a time in seconds since the epoch as a local date with the time of day and the zone."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC).astimezone():%Y-%m-%d %H:%M %Z}"
    except (OverflowError, ValueError, OSError):  # a file that was edited by hand
        return "unknown"


def show_count(number: int, noun: str) -> str:
    """Write a number of things, with the noun's plural where there is not one of them.

    >>> show_count(1, "document"), show_count(1200, "process"), show_count(2, "reply")
    ('1 document', '1,200 processes', '2 replies')
    """
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


def _parse(text: str, units: dict[str, float], what: str) -> float:
    message = f"must be {what} (units: {', '.join(units)}), got {shown(text)}"
    match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*([A-Za-z/]+)\s*", text)
    if not match or match[2] not in units:
        raise ValueError(message)
    try:
        return float(match[1]) * units[match[2]]
    except ValueError:
        raise ValueError(message) from None


def _show(value: float, units: dict[str, float]) -> str:
    unit, scale = max(((u, s) for u, s in units.items() if s <= abs(value) or s == 1.0), key=lambda pair: pair[1])
    return f"{value / scale:.4g} {unit}"
