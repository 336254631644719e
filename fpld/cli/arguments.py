"""What commands have in common: the record of a command, arguments that several take, and signals that stop them."""

from __future__ import annotations

import argparse
import math
import re
import signal
import tomllib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from fpld.errors import InputError
from fpld.units import parse_rate, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fpld.cli.output import Output

T = TypeVar("T")


class Command(NamedTuple):
    """A command: what its help ends with, its arguments, and what it does.

    `configure` adds the arguments to a parser. `run` takes the parsed ones, prints, and returns the exit code.
    """

    epilog: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Output], int]


def numbers(text: str) -> list[float]:
    """Parse a comma-separated list of numbers."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between them, got {text!r}") from None


def override(text: str) -> tuple[str, object]:
    """Parse KEY=VALUE: a dotted key of the configuration and its value as TOML has it; other words are a string.

    >>> override("local.steps=300"), override("student.dtype=bfloat16"), override("baselines.rounds=[1, 2]")
    (('local.steps', 300), ('student.dtype', 'bfloat16'), ('baselines.rounds', [1, 2]))
    """
    key, separator, value = text.partition("=")
    if not (key.strip() and separator):
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, such as local.steps=300, got {text!r}")
    try:
        read = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()
    # A line break in the value could begin other keys.
    return key.strip(), read["value"] if len(read) == 1 else value


def words(text: str) -> list[str]:
    """Parse a comma-separated list of names."""
    return [part.strip() for part in text.split(",")]


def rates(text: str) -> list[float]:
    """Parse a comma-separated list of links' rates, each with its unit."""
    try:
        values = [float(parse_rate(part)) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    for part, rate in zip(text.split(","), values, strict=True):
        if not 0 < rate < math.inf:
            raise argparse.ArgumentTypeError(f"must be greater than 0 and finite, got {part.strip()!r}")
    return values


@dataclass(frozen=True, slots=True)
class Size:
    """What may be sent in a round: bits per coordinate, bits per context, or bytes in all."""

    value: float
    in_bytes: bool
    of_context: bool = False

    def per_context(self, contexts: int, vocab: int, overhead: int = 0) -> float:
        """Return the payload in bits per probe context; of bytes, what headers and checksums take is taken off."""
        if not self.in_bytes:
            return self.value if self.of_context else self.value * vocab
        if self.value <= overhead:
            raise InputError(f"a size must be more than {overhead} bytes (headers, checksums), got {self.value:g}")
        return 8 * (self.value - overhead) / contexts


def sizes(text: str) -> list[Size]:
    """Parse a comma-separated list of sizes: `60bits` per context, `20MB` a round, `0.5` bits per coordinate."""
    return [_size(part.strip()) for part in text.split(",")]


def _size(text: str) -> Size:
    try:
        bits = re.fullmatch(r"([0-9.+-]+)( ?bits?)?", text)
        size = Size(float(bits[1]), False, bits[2] is not None) if bits else Size(parse_size(text), True)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, or bits per context, such as 60bits") from None
    if not 0 < size.value < math.inf:
        raise argparse.ArgumentTypeError(f"must be greater than 0, got {text!r}")
    return size


def one_or_each(values: list[T] | None, nodes: int) -> list[T] | None:
    """Repeat a single value for every node; leave a list as it is (its length is checked where it is used)."""
    return values * nodes if values is not None and len(values) == 1 else values


class Stopped(BaseException):
    """The user or the system asked this process to stop: an exception, so that what is open gets closed."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.code = 128 + number


@contextmanager
def stop_on_signals(text: str) -> Iterator[None]:
    """Raise `Stopped` at the first signal; further ones are ignored while things are being closed."""

    def stop(number: int, _frame: object) -> None:
        for other in (signal.SIGINT, signal.SIGTERM):
            signal.signal(other, signal.SIG_IGN)
        raise Stopped(number, text)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
