"""Blocking work in threads that is given up when nobody waits for it any more.

The event loop cannot stop a thread. So the work asks, once for each thing of its loops, whether the
one who wants it is still there.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

__all__ = ["BackgroundThreads", "until_cancelled"]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Item = TypeVar("_Item")

_here = threading.local()
"""`cancelled`, an event, in a thread that works for somebody."""


class BackgroundThreads:
    """A few threads for work of one kind; what is more waits for its turn."""

    def __init__(self, threads: int, name: str) -> None:
        """Start no thread before there is work.

        Args:
            threads: how much may run at once.
            name: prefix of the threads' names.
        """
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(
        self,
        work: Callable[_Parameters, _Result],
        *arguments: _Parameters.args,
        **options: _Parameters.kwargs,
    ) -> _Result:
        """Return what `work` returns.

        Cancelling this returns at once; the work ends at its next `until_cancelled`, or is never begun.
        """
        cancelled = threading.Event()

        def call() -> _Result:
            _here.cancelled = cancelled
            return work(*arguments, **options)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, call)
        except asyncio.CancelledError:
            cancelled.set()
            raise


def until_cancelled(items: Iterable[_Item]) -> Iterator[_Item]:
    """Yield `items`, as long as whoever waits for this thread still does.

    Raises:
        asyncio.CancelledError: nobody waits any more; only inside `BackgroundThreads.run`.
    """
    cancelled: threading.Event | None = getattr(_here, "cancelled", None)
    if cancelled is None:
        yield from items
        return
    for item in items:
        if cancelled.is_set():
            raise asyncio.CancelledError
        yield item
