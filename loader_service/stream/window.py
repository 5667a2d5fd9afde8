"""A bounded window of chunk buffers that all loads share."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from loader_kernels.numpy_device import map_memory

__all__ = ["HostWindow", "Window"]


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


_Buffer = TypeVar("_Buffer", bound=_Sized)


class Window(Generic[_Buffer]):
    """Buffers of at most `limit_bytes` together, handed out in the order of asking.

    Buffers are kept and reused, the one given back last first: it is the warmest in the cache.
    Used from one event loop.
    """

    def __init__(
        self,
        limit_bytes: int,
        make: Callable[[int], _Buffer],
        drop: Callable[[_Buffer], None] = lambda _: None,
    ) -> None:
        """Start empty; memory is taken when it is first needed.

        Args:
            limit_bytes: most bytes of all buffers together.
            make: returns a buffer of so many bytes; may fail.
            drop: frees a buffer that was made.
        """
        self.limit_bytes = limit_bytes
        self._make = make
        self._drop = drop
        self._held_bytes = 0
        self._idle: defaultdict[int, list[_Buffer]] = defaultdict(list)
        self._turn = asyncio.Lock()
        self._returned = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers, in use or idle."""
        return self._held_bytes

    async def acquire(self, size: int, count: int) -> list[_Buffer]:
        """Return `count` buffers of `size` bytes each; waits until the window has room.

        Taking all buffers of a step at once, one step after another, is what rules a deadlock out.

        Raises:
            ValueError: the window could never hold them.
        """
        if size * count > self.limit_bytes:
            raise ValueError(f"{count} buffers of {size} bytes do not fit the window")
        async with self._turn:
            while not self._make_room(size, count):
                self._returned.clear()
                await self._returned.wait()
            idle = self._idle[size]
            # Making one may fail: those made before it are then idle, and nothing is taken.
            while len(idle) < count:
                buffer = self._make(size)
                self._held_bytes += size
                idle.append(buffer)
            return [idle.pop() for _ in range(count)]

    def release(self, buffers: list[_Buffer]) -> None:
        """Give buffers back; nothing may use them any more."""
        for buffer in buffers:
            self._idle[buffer.nbytes].append(buffer)
        self._returned.set()

    def _make_room(self, size: int, count: int) -> bool:
        """Drop idle buffers of other sizes until the buffers fit; False when they do not."""
        fresh = size * max(0, count - len(self._idle[size]))
        for other, buffers in self._idle.items():
            while other != size and buffers and self._held_bytes + fresh > self.limit_bytes:
                self._drop(buffers.pop())
                self._held_bytes -= other
        return self._held_bytes + fresh <= self.limit_bytes


class HostWindow(Window[memoryview]):
    """A window of host memory."""

    def __init__(self, limit_bytes: int) -> None:
        """Start empty, see `Window`."""
        super().__init__(limit_bytes, lambda size: map_memory(size).data)
