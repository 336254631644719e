"""Names of Flower's that are read and never replaced, also on stock Flower: sizes of messages, and their errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flwr.app.message import make_message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.run import RunNotRunningException

if TYPE_CHECKING:
    from flwr.app import Error, Message, Metadata, RecordDict

PushError = ObjectPushError
RunStoppedError = RunNotRunningException


def serialized_bytes(content: RecordDict) -> int:
    """Return how many bytes Flower sends for a message's content."""
    return sum(len(item.deflate()) for item in get_all_nested_objects(content).values())


def error_message(metadata: Metadata, error: Error) -> Message:
    """Return a message with an error in the place of a reply."""
    return make_message(metadata=metadata, error=error)
