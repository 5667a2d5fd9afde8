"""Devices for tests: one that counts and fails on demand, one whose memory goes bad."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from loader_kernels.device import Buffer, Span
from loader_kernels.numpy_device import NumpyBuffer, NumpyDevice

__all__ = ["CountingDevice", "FlippingDevice"]


class CountingDevice(NumpyDevice):
    """Knows which buffers live and how often each was freed; frees fail where a test says so.

    Attributes:
        live: buffers handed out and not freed.
        frees: how often `free` was called for each buffer, by `id`.
        failing: buffers whose `free` raises `RuntimeError`; their memory counts as lost.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        """Hand out at most `limit_bytes` bytes."""
        super().__init__(limit_bytes)
        self.live: list[Buffer] = []
        self.frees: Counter[int] = Counter()
        self.failing: list[Buffer] = []

    def allocate(self, nbytes: int) -> NumpyBuffer:
        """Allocate and remember."""
        buffer = super().allocate(nbytes)
        self.live.append(buffer)
        return buffer

    def free(self, buffer: Buffer) -> None:
        """Count the call; fail, or free and forget."""
        self.frees[id(buffer)] += 1
        if any(buffer is bad for bad in self.failing):
            raise RuntimeError("the driver says no")
        super().free(buffer)
        self.live = [other for other in self.live if other is not buffer]


class FlippingDevice(CountingDevice):
    """Flips one bit of a chosen buffer just before the buffer is hashed for the first time.

    It stands for memory that does not keep what was written to it.

    Attributes:
        flip_allocation: number of the allocation to spoil, counted from 0; None spoils nothing.
        flip_byte: byte to spoil.
    """

    def __init__(self, flip_allocation: int | None = None, flip_byte: int = 0) -> None:
        """Choose what goes bad."""
        super().__init__()
        self.flip_allocation = flip_allocation
        self.flip_byte = flip_byte
        self._allocations = 0
        self._victim: Buffer | None = None

    def allocate(self, nbytes: int) -> NumpyBuffer:
        """Allocate; remember the buffer that will go bad."""
        buffer = super().allocate(nbytes)
        if self._allocations == self.flip_allocation:
            self._victim = buffer
        self._allocations += 1
        return buffer

    def block_hashes(self, spans: Sequence[Span], uploads: Sequence[object] = ()) -> list[bytes]:
        """Spoil the chosen buffer when the byte is about to be hashed, then hash."""
        for buffer, offset, length in spans:
            if buffer is self._victim and offset <= self.flip_byte < offset + length:
                self._victim = None
                window = self.window(buffer, self.flip_byte, 1)
                window ^= np.uint8(1)
        return super().block_hashes(spans, uploads)
