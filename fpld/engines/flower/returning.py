"""How soon a process of Flower's finds again what is away: a SuperLink, and pieces of messages."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import httpx

from fpld.errors import ProtocolError, ran_out

if TYPE_CHECKING:
    from collections.abc import Callable

LONGEST_WAIT = 2.0  # seconds between two attempts to reach a SuperLink that is away; Flower's own are longer
TROUBLE_WAITS = 1.0, 2.0, 4.0  # seconds at most after each of a SuperLink's first internal errors
PIECE_WAITS = 0.3, 1.0  # seconds between two looks for a piece of a message, first and at most


def hurry(longest: float = LONGEST_WAIT) -> None:
    """Let this process look more often for a SuperLink that is away, and for pieces of a message that are on their way.

    It looks at least every `longest` seconds; moments stay random. A node hears of a message before its pieces are
    there: Flower then waits for one second, two, four, at both of its hops.
    """
    from flwr.supercore.inflatable.inflatable_utils import pull_objects
    from flwr.supercore.retry import http_retry
    from flwr.supercore.retry.retry_invoker import RetryInvoker

    class Invoker(RetryInvoker):
        """Give up at once when it is this machine that lacks something: nobody else's return would help.

        But not at a SuperLink's first error: its database may be locked for a moment, by a thousand nodes.
        """

        def __init__(self, *arguments: Any, should_giveup: Callable[[Exception], bool], **named: Any) -> None:
            def hopeless(error: Exception) -> bool:
                return ran_out(error) is not None or should_giveup(error)

            super().__init__(*arguments, should_giveup=hopeless, **named)

        def invoke(self, target: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            for wait in TROUBLE_WAITS:
                try:
                    return super().invoke(target, *arguments, **named)
                except httpx.HTTPStatusError as error:
                    if error.response.status_code != httpx.codes.INTERNAL_SERVER_ERROR:
                        raise
                time.sleep(random.uniform(0.5, 1.0) * wait)  # noqa: S311 - moments, no secrets
            return super().invoke(target, *arguments, **named)

    http_retry.RetryInvoker = Invoker  # type: ignore[attr-defined, assignment]
    http_retry.MAX_RETRY_DELAY = min(http_retry.MAX_RETRY_DELAY, longest)  # type: ignore[attr-defined, assignment]
    waits = pull_objects.__kwdefaults__ or {}
    if not {"initial_backoff", "backoff_cap"} <= set(waits):
        raise ProtocolError("this version of Flower waits for pieces of messages in another way")
    waits["initial_backoff"], waits["backoff_cap"] = PIECE_WAITS
