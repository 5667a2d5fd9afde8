"""Blocking work of the data plane in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import ParamSpec, TypeVar

__all__ = ["run_in_thread"]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


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
