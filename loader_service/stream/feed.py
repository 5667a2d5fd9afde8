"""Where chunks are made: filled from the files, hashed, and held until they are sent.

On the host, or with a GPU in a ring of chunks on it, from where they go to the workers' devices over UCX.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any, Protocol

from loader_kernels.device import Buffer, Device, DeviceOutOfMemoryError
from loader_service.errors import OutOfMemory
from loader_service.stream.filling import Hashes, Place, fill_device, fill_host
from loader_service.stream.reader import OpenFiles, Readable
from loader_service.stream.window import HostWindow, Window

__all__ = ["DeviceFeed", "Feed", "HostFeed"]

HOST_STEPS = 4
"""Steps that a host feed works on at once: more would only push one another out of the cache."""

DEVICE_STEPS = 16
"""Steps that a device feed works on at once: enough for all threads while others are on their way."""


class Feed(Protocol):
    """Makes the chunks of steps. Used from one event loop."""

    steps_at_once: int
    """Steps of one load that may be made or be on their way at once."""

    @property
    def name(self) -> str:
        """Where chunks are made, for people and for reports; empty for the host."""
        ...

    async def acquire(self, size: int, count: int) -> list[Any]:
        """Return `count` slots of `size` bytes each; waits until there is room for all of them."""
        ...

    def release(self, slots: list[Any]) -> None:
        """Give slots back; nothing may use them any more."""
        ...

    async def fill(
        self, files: OpenFiles, tensors: Sequence[Readable], places: Sequence[Place]
    ) -> list[Hashes]:
        """Fill places in slots; return the hashes of every distinct part, see `fill_host`.

        A cancelled caller waits until nothing uses the slots any more.

        Raises:
            LoaderError: what reading raises, see `read_tensor`.
        """
        ...

    def view(self, slot: Any, nbytes: int) -> Any:
        """Return the first bytes of a slot as a transport sends them."""
        ...


class HostFeed:
    """Chunks in host memory; a step is read by one thread."""

    steps_at_once = HOST_STEPS
    name = ""

    def __init__(self, window: HostWindow, readers: Executor) -> None:
        """Make chunks in buffers of `window`, and use `readers` to read."""
        self._window = window
        self._readers = readers

    async def acquire(self, size: int, count: int) -> list[memoryview]:
        """Return buffers of the window."""
        return await self._window.acquire(size, count)

    def release(self, slots: list[memoryview]) -> None:
        """Give buffers back to the window."""
        self._window.release(slots)

    async def fill(
        self, files: OpenFiles, tensors: Sequence[Readable], places: Sequence[Place]
    ) -> list[Hashes]:
        """Read and hash in one thread."""
        return await fill_host(self._readers, files, tensors, places)

    def view(self, slot: memoryview, nbytes: int) -> memoryview:
        """Return the buffer's beginning."""
        return slot[:nbytes]


class DeviceFeed:
    """Chunks in a ring on the streamer's own device."""

    steps_at_once = DEVICE_STEPS

    def __init__(self, device: Device, ring_bytes: int, readers: Executor) -> None:
        """Use at most `ring_bytes` of the device, and `readers` to read."""
        self._device = device
        self._ring: Window[Buffer] = Window(ring_bytes, device.allocate, device.free)
        self._readers = readers

    @property
    def name(self) -> str:
        """Name of the device."""
        return self._device.name

    async def acquire(self, size: int, count: int) -> list[Buffer]:
        """Return buffers of the ring.

        Raises:
            OutOfMemory: the device has no room for the ring.
        """
        try:
            return await self._ring.acquire(size, count)
        except DeviceOutOfMemoryError as error:
            raise OutOfMemory(
                f"the streamer's ring on {self._device.name} does not fit: {error}",
                wanted_bytes=error.wanted_bytes,
                free_bytes=error.free_bytes,
            ) from error

    def release(self, slots: list[Buffer]) -> None:
        """Give buffers back to the ring."""
        self._ring.release(slots)

    def view(self, slot: Buffer, nbytes: int) -> Any:
        """Return a window of the device."""
        return self._device.window(slot, 0, nbytes)

    async def fill(
        self, files: OpenFiles, tensors: Sequence[Readable], places: Sequence[Place]
    ) -> list[Hashes]:
        """Read in a few threads; the last of them has the device hash."""
        return await fill_device(self._device, self._readers, files, tensors, places)
