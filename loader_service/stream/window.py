"""The streamer's host memory: a bounded window of chunk buffers that all loads share."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from loader_kernels.numpy_device import map_memory

__all__ = ["HostWindow"]


class HostWindow:
    """Buffers of at most `limit_bytes` together, handed out in the order of asking.

    Buffers are kept and reused, the one given back last first: it is the warmest in the cache.
    Used from one event loop.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Start empty; memory is taken when it is first needed."""
        self.limit_bytes = limit_bytes
        self._held_bytes = 0
        self._idle: defaultdict[int, list[memoryview]] = defaultdict(list)
        self._turn = asyncio.Lock()
        self._returned = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers, in use or idle."""
        return self._held_bytes

    async def acquire(self, size: int, count: int) -> list[memoryview]:
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
            # Mapping may fail; nothing is counted or taken before it has worked.
            fresh = [map_memory(size).data for _ in range(count - len(idle))]
            self._held_bytes += size * len(fresh)
            return [idle.pop() for _ in range(count - len(fresh))] + fresh

    def release(self, buffers: list[memoryview]) -> None:
        """Give buffers back; nothing may use them any more."""
        for buffer in buffers:
            self._idle[len(buffer)].append(buffer)
        self._returned.set()

    def _make_room(self, size: int, count: int) -> bool:
        """Drop idle buffers of other sizes until the buffers fit; False when they do not."""
        fresh = size * max(0, count - len(self._idle[size]))
        for other, buffers in self._idle.items():
            while other != size and buffers and self._held_bytes + fresh > self.limit_bytes:
                buffers.pop()
                self._held_bytes -= other
        return self._held_bytes + fresh <= self.limit_bytes
