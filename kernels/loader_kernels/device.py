"""The Device port: one memory that tensors live in.

The coordinator and the worker reach device memory through this port only, so that the NumPy device
of a machine without a GPU runs the same code path as a CUDA device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

__all__ = [
    "STAGING_BYTES",
    "Buffer",
    "Copy",
    "Device",
    "DeviceMemory",
    "DeviceOutOfMemoryError",
    "Span",
    "Upload",
    "check_staging",
]

STAGING_BYTES = 5 << 20
"""Most bytes of one upload."""


class DeviceOutOfMemoryError(MemoryError):
    """A device cannot hand out the bytes asked for.

    Attributes:
        wanted_bytes: bytes asked for.
        free_bytes: bytes that were left.
    """

    def __init__(self, wanted_bytes: int, free_bytes: int) -> None:
        """Say what was asked for and what was left."""
        super().__init__(f"{wanted_bytes} bytes wanted, {free_bytes} bytes are free")
        self.wanted_bytes = wanted_bytes
        self.free_bytes = free_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device, in bytes.

    Attributes:
        allocated_bytes: handed out by this process and not freed, rounding included.
        free_bytes: can still be handed out.
        total_bytes: the whole device.
    """

    allocated_bytes: int
    free_bytes: int
    total_bytes: int


class Buffer(Protocol):
    """Contiguous device memory. Owned by whoever allocated it; `Device.free` ends its life."""

    @property
    def nbytes(self) -> int:
        """Bytes that may be used."""
        ...


class Span(NamedTuple):
    """Bytes [offset, offset + length) of a buffer."""

    buffer: Buffer
    offset: int
    length: int


class Copy(NamedTuple):
    """`length` bytes of `source` from `source_offset` on, which go to `target` from `offset` on."""

    source: Buffer
    source_offset: int
    target: Buffer
    offset: int
    length: int


class Upload(NamedTuple):
    """Rows of staging memory that go to a buffer, where they follow one another.

    Attributes:
        position: first byte of the first row in the staging memory.
        stride: bytes from one row to the next there.
        span: where the rows go; its length is that of all rows.
        rows: number of rows, 1 for plain bytes.
    """

    position: int
    stride: int
    span: Span
    rows: int = 1


class Device(Protocol):
    """One device memory. Methods may be called from any thread; `free` ends a buffer's life.

    Methods that take a buffer raise ValueError when it is another device's, when it has been freed, or
    when the bytes lie outside it.
    """

    @property
    def name(self) -> str:
        """Name for people and for placement, for example `numpy` or `cuda:0`."""
        ...

    def memory(self) -> DeviceMemory:
        """Return what is handed out and what is left."""
        ...

    def allocate(self, nbytes: int) -> Buffer:
        """Return a buffer of `nbytes` bytes, contents undefined; zero bytes are allowed.

        Raises:
            DeviceOutOfMemoryError: nothing was allocated.
        """
        ...

    def free(self, buffer: Buffer) -> None:
        """Give `buffer` back. The caller guarantees that nothing uses it any more."""
        ...

    def window(self, buffer: Buffer, offset: int, length: int) -> Any:
        """Return a writable view of bytes [offset, offset + length) that a transport can fill.

        The view is contiguous, of dtype uint8 and shape (length,), and offers the buffer protocol
        or `__cuda_array_interface__`. It must not outlive the buffer.
        """
        ...

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy inside the device; done when the call returns.

        What is written may overlap neither what is read nor what else is written.
        """
        ...

    def zero(self, buffer: Buffer, offset: int, length: int) -> None:
        """Set `length` bytes to zero; done when the call returns."""
        ...

    def read(self, buffer: Buffer, offset: int, length: int) -> memoryview:
        """Return `length` bytes in host memory, read-only: a view or a copy, as the device is.

        Use it before the buffer changes or is freed.
        """
        ...

    def staging(self, nbytes: int) -> memoryview:
        """Return host memory of the calling thread to upload from, at most `STAGING_BYTES`.

        Raises:
            ValueError: more than `STAGING_BYTES`.

        A thread has few of these in turn; one is handed out again when the device has fetched what was
        uploaded from it.
        """
        ...

    def upload(self, uploads: Sequence[Upload]) -> object:
        """Begin to copy parts of the thread's last `staging` memory to the device.

        Returns:
            What `block_hashes` waits for.
        """
        ...

    def block_hashes(self, spans: Sequence[Span], uploads: Sequence[object] = ()) -> list[bytes]:
        """Hash each span in blocks, see `digest.hash_blocks`; computed from the device's bytes.

        Args:
            spans: what to hash.
            uploads: uploads that end before.
        """
        ...


def check_staging(nbytes: int) -> None:
    """Raise ValueError for more staging memory than a thread has."""
    if nbytes > STAGING_BYTES:
        raise ValueError(f"{nbytes} bytes are more than the {STAGING_BYTES} of staging memory")
