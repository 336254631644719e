"""Certificates that end soon, and clocks that differ: said before they are a connection that fails."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from cryptography import x509

from fpld.errors import InputError
from fpld.storage.files import read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

SOON = 30  # days before the end of a certificate from which it is said
_APART = 60.0  # seconds by which two clocks may differ; Flower refuses what is signed more than 300 s off


def ending(paths: Iterable[Path], now: datetime | None = None) -> list[str]:
    """Return a sentence for each certificate that ends soon; one that has ended, or not begun, is an error."""
    now, said = now or datetime.now(UTC), []
    for path in paths:
        try:
            found = x509.load_pem_x509_certificates(read_bytes(path))
        except ValueError as error:
            raise InputError(f"{path} must hold a certificate in PEM: {error}") from None
        for certificate in found:
            since, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
            if now < since:
                raise InputError(
                    f"{path} is valid from {since:%Y-%m-%d %H:%M} UTC on, and this machine's clock is at "
                    f"{now:%Y-%m-%d %H:%M}: set the clock, or wait"
                )
            if now >= until:
                raise InputError(
                    f"{path} has ended on {until:%Y-%m-%d}: make new ones with `fpld certs`, and send federation.toml "
                    "to the sites"
                )
            if (until - now).days < SOON:
                said.append(
                    f"{path} ends on {until:%Y-%m-%d}, in {(until - now).days} days: `fpld certs` makes new ones"
                )
    return said


def clock_difference(date: str | None, now: datetime | None = None) -> str:
    """Return a sentence if this machine's clock differs from a server's `Date`; nothing if it does not, or is unknown.

    >>> clock_difference("Tue, 17 Nov 2026 12:00:00 GMT", datetime(2026, 11, 17, 12, 10, tzinfo=UTC))
    "this machine's clock is 600 s ahead of the aggregator's: signatures are valid for 300 s; set the clocks"
    """
    try:
        theirs = parsedate_to_datetime(date or "")
    except ValueError:
        return ""
    apart = ((now or datetime.now(UTC)) - theirs).total_seconds()
    if abs(apart) <= _APART:
        return ""
    way = "ahead of" if apart > 0 else "behind"
    said = f"this machine's clock is {abs(apart):.0f} s {way} the aggregator's"
    return f"{said}: signatures are valid for 300 s; set the clocks"
