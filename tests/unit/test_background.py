"""Threads whose work ends when nobody waits for it."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator

import pytest

from loader_service.background import BackgroundThreads, until_cancelled

SECONDS = 5.0


class Endless:
    """Work that ends only when it is stopped, and says what became of it."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.ended = threading.Event()

    def items(self) -> Iterator[int]:
        for number in itertools.count():
            self.begun.set()
            yield number

    def work(self) -> None:
        try:
            for _ in until_cancelled(self.items()):
                pass
        finally:
            self.ended.set()


async def wait(event: threading.Event) -> bool:
    return await asyncio.to_thread(event.wait, SECONDS)


async def test_work_returns_or_raises_what_it_does() -> None:
    threads = BackgroundThreads(1, "test")
    assert await threads.run(lambda: list(until_cancelled("ab"))) == ["a", "b"]
    with pytest.raises(ZeroDivisionError):
        await threads.run(divmod, 1, 0)


async def test_work_ends_when_its_caller_is_cancelled() -> None:
    threads, endless = BackgroundThreads(1, "test"), Endless()
    caller = asyncio.create_task(threads.run(endless.work))
    assert await wait(endless.begun)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert await wait(endless.ended)
    # The thread is free for others, who are not cancelled by what was.
    assert await threads.run(lambda: list(until_cancelled("ab"))) == ["a", "b"]


async def test_work_that_waits_for_its_turn_is_never_begun() -> None:
    threads, first, second = BackgroundThreads(1, "test"), Endless(), Endless()
    callers = [asyncio.create_task(threads.run(each.work)) for each in (first, second)]
    assert await wait(first.begun)
    for caller in reversed(callers):
        caller.cancel()
    assert await wait(first.ended)
    await threads.run(list)
    assert not second.begun.is_set()


def test_outside_of_such_threads_nothing_is_cancelled() -> None:
    assert list(until_cancelled("ab")) == ["a", "b"]
