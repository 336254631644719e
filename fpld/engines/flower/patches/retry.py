"""Retries of Flower's HTTP clients: how soon a process reaches a SuperLink again, and finds pieces of messages."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import httpx

from fpld.engines.flower.patches import is_on
from fpld.errors import exhausted_resource

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_RETRY_SECONDS = 2.0  # between two attempts to reach a SuperLink; Flower's own are longer
SERVER_ERROR_SECONDS = 1.0, 2.0, 4.0  # the longest pauses after a SuperLink's first three internal errors
PIECE_SECONDS = 0.3, 1.0  # between two requests for a piece of a message: the first pause, and the longest


def retry_sooner(longest: float = MAX_RETRY_SECONDS) -> None:
    """Retry requests of this process at least every `longest` seconds, at random moments.

    Pieces of a message are asked for more often too. A node hears of a message before its pieces are stored: Flower
    then waits for one second, two, four, at both of its hops.
    """
    if not is_on("retry"):
        return
    from flwr.supercore.inflatable.inflatable_utils import pull_objects
    from flwr.supercore.retry import http_retry
    from flwr.supercore.retry.retry_invoker import RetryInvoker

    class Invoker(RetryInvoker):
        """Give up at once if this machine has run out of something: waiting for the SuperLink would not help.

        A SuperLink's first internal errors are retried: a thousand nodes may lock its database for a moment.
        """

        def __init__(self, *arguments: Any, should_giveup: Callable[[Exception], bool], **named: Any) -> None:
            def hopeless(error: Exception) -> bool:
                return exhausted_resource(error) is not None or should_giveup(error)

            super().__init__(*arguments, should_giveup=hopeless, **named)

        def invoke(self, target: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            for longest_pause in SERVER_ERROR_SECONDS:
                try:
                    return super().invoke(target, *arguments, **named)
                except httpx.HTTPStatusError as error:
                    if error.response.status_code != httpx.codes.INTERNAL_SERVER_ERROR:
                        raise
                time.sleep(random.uniform(0.5, 1.0) * longest_pause)  # noqa: S311 - moments, no secrets
            return super().invoke(target, *arguments, **named)

    http_retry.RetryInvoker = Invoker  # type: ignore[attr-defined, assignment]
    http_retry.MAX_RETRY_DELAY = min(http_retry.MAX_RETRY_DELAY, longest)  # type: ignore[attr-defined, assignment]
    defaults = pull_objects.__kwdefaults__ or {}
    if {"initial_backoff", "backoff_cap"} <= set(defaults):
        defaults["initial_backoff"] = PIECE_SECONDS[0]
        defaults["backoff_cap"] = PIECE_SECONDS[1]
