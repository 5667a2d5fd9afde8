"""Requests that were answered: the same request id gets the same answer, and changes nothing again."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

from google.protobuf.message import Message

from loader_service.errors import Conflict

__all__ = ["RequestReplay"]

_REMEMBERED = 1000

_Response = TypeVar("_Response", bound=Message)


class RequestReplay:
    """Remembers the answers to the latest requests. Used from one event loop."""

    def __init__(self) -> None:
        """Start without a memory."""
        self._answers: OrderedDict[tuple[str, str], tuple[bytes, asyncio.Task[Message]]] = (
            OrderedDict()
        )

    async def answer(
        self,
        identity: str,
        request: Message,
        request_id: str,
        work: Callable[[], Awaitable[_Response]],
    ) -> _Response:
        """Answer a request by `work`, or by what was answered to the same id before.

        A repetition that comes while the first is at work waits for it. An error is not remembered:
        the next request with its id is tried anew. A caller that goes away leaves the work running,
        since a change that has begun must come to an end.

        Args:
            identity: caller; ids of different callers have nothing to do with each other.
            request: the request.
            request_id: its id; without one nothing is remembered.
            work: makes the change and returns the answer.

        Raises:
            Conflict: REQUEST_ID_REUSED, the id was used for another request.
            LoaderError: what `work` raises.
        """
        if not request_id:
            return await work()
        key = (identity, request_id)
        fingerprint = type(request).__name__.encode() + request.SerializeToString(
            deterministic=True
        )
        known = self._answers.get(key)
        if known is None:
            task: asyncio.Task[Message] = asyncio.ensure_future(_as_coroutine(work))
            self._answers[key] = (fingerprint, task)
            task.add_done_callback(lambda done: self._settle(key, done))
        elif known[0] != fingerprint:
            raise Conflict(
                f"request id {request_id!r} was used for another request",
                reason="REQUEST_ID_REUSED",
                field="request_id",
            )
        else:
            task = known[1]
        # The same request type has the same answer type.
        return cast("_Response", await asyncio.shield(task))

    def _settle(self, key: tuple[str, str], done: asyncio.Task[Message]) -> None:
        if done.cancelled() or done.exception() is not None:
            del self._answers[key]
        if len(self._answers) <= _REMEMBERED:
            return
        # What is still at work is never forgotten, or a repetition would begin it twice.
        finished = [key for key, (_, task) in self._answers.items() if task.done()]
        for old in finished[: max(0, len(finished) - _REMEMBERED)]:
            del self._answers[old]


async def _as_coroutine(work: Callable[[], Awaitable[_Response]]) -> Message:
    return await work()
