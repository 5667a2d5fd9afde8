"""Blocking work of the data plane in threads."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import Executor
from typing import ParamSpec, TypeVar

__all__ = ["run_in_thread", "switch_often"]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


_SWITCH_SECONDS = 0.0002


def switch_often() -> None:
    """Let the threads of this process take the interpreter from one another after 0.2 ms.

    For processes with a GPU: with the default of 5 ms a thread that only wants to hand on a piece waits
    longer for the event loop than the piece takes on the link. On few processors without one it costs
    more than it brings.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)


async def run_in_thread(
    executor: Executor,
    work: Callable[_Parameters, _Result],
    *arguments: _Parameters.args,
    **options: _Parameters.kwargs,
) -> _Result:
    """Run `work` in a thread of `executor` and return its result.

    A cancelled caller waits until the thread is done: it uses buffers and files that the caller is
    about to give back.
    """
    future = asyncio.get_running_loop().run_in_executor(
        executor, lambda: work(*arguments, **options)
    )
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise
