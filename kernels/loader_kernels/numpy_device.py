"""The NumPy device: host memory behind the Device port."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loader_kernels.device import (
    STAGING_BYTES,
    Buffer,
    Copy,
    DeviceMemory,
    DeviceOutOfMemoryError,
    Span,
    Upload,
    check_staging,
)
from loader_kernels.digest import hash_blocks

__all__ = ["NumpyBuffer", "NumpyDevice", "map_memory"]

_MAPPED_FROM_BYTES = 256 << 10
"""Buffers from this size on are mappings of their own, so that freeing one returns its pages."""

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class NumpyBuffer:
    """Host memory of one tensor.

    Attributes:
        bytes: uint8 array of shape (nbytes,); None once freed.
    """

    __slots__ = ("bytes", "nbytes")

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        """Wrap an array that nobody else frees."""
        self.bytes: npt.NDArray[np.uint8] | None = memory
        self.nbytes = memory.nbytes


class NumpyDevice:
    """Host memory as a device. Thread-safe."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        """Hand out at most `limit_bytes` bytes; None leaves it to the machine."""
        self._limit_bytes = limit_bytes
        self._allocated_bytes = 0
        self._lock = threading.Lock()
        self._staging = _Staging()

    @property
    def name(self) -> str:
        """`numpy`."""
        return "numpy"

    def memory(self) -> DeviceMemory:
        """Return the handed-out bytes, and what limit, machine and control group leave."""
        with self._lock:
            return self._memory()

    def _memory(self) -> DeviceMemory:
        total, available = _host_memory()
        if self._limit_bytes is not None:
            total = min(total, self._limit_bytes)
            available = min(available, self._limit_bytes - self._allocated_bytes)
        return DeviceMemory(self._allocated_bytes, max(0, available), total)

    def allocate(self, nbytes: int) -> NumpyBuffer:
        """Return fresh host memory; large buffers are mappings of their own."""
        with self._lock:
            # Asking the machine costs more than a small buffer is worth; its sum was asked for before.
            if nbytes >= _MAPPED_FROM_BYTES or self._limit_bytes is not None:
                free_bytes = self._memory().free_bytes
                if nbytes > free_bytes:
                    raise DeviceOutOfMemoryError(nbytes, free_bytes)
            try:
                buffer = NumpyBuffer(map_memory(nbytes))
            except (MemoryError, OSError) as error:
                raise DeviceOutOfMemoryError(nbytes, self._memory().free_bytes) from error
            self._allocated_bytes += nbytes
        return buffer

    def free(self, buffer: Buffer) -> None:
        """Drop the memory; the pages return when the last view of it is gone."""
        memory = _array(buffer)
        assert isinstance(buffer, NumpyBuffer)
        with self._lock:
            self._allocated_bytes -= memory.nbytes
            buffer.bytes = None

    def window(self, buffer: Buffer, offset: int, length: int) -> npt.NDArray[np.uint8]:
        """Return the array's part."""
        return _part(buffer, offset, length)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy between arrays."""
        for source, source_offset, target, offset, length in copies:
            _part(target, offset, length)[:] = _part(source, source_offset, length)

    def zero(self, buffer: Buffer, offset: int, length: int) -> None:
        """Fill with zeros."""
        _part(buffer, offset, length)[:] = 0

    def read(self, buffer: Buffer, offset: int, length: int) -> memoryview:
        """Return a view: the device's memory is host memory."""
        return _part(buffer, offset, length).data.toreadonly()

    def staging(self, nbytes: int) -> memoryview:
        """Return memory of the calling thread."""
        check_staging(nbytes)
        return self._staging.memory[:nbytes]

    def upload(self, uploads: Sequence[Upload]) -> object:
        """Copy at once."""
        for position, stride, span, rows in uploads:
            width = span.length // rows
            source = np.ndarray(
                (rows, width), np.uint8, self._staging.memory, position, (stride, 1)
            )
            _part(*span).reshape(rows, width)[:] = source
        return None

    def block_hashes(self, spans: Sequence[Span], uploads: Sequence[object] = ()) -> list[bytes]:
        """Hash the arrays' parts."""
        return [hash_blocks(self.read(*span)) for span in spans]


class _Staging(threading.local):
    def __init__(self) -> None:
        self.memory: memoryview = np.empty(STAGING_BYTES, np.uint8).data


def map_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return `nbytes` of host memory, shape (nbytes,); large ones are page-aligned mappings.

    A private mapping goes back to the system as soon as it is dropped, which the C allocator does
    not promise, and asks for huge pages, which makes first touches cheap.
    """
    if nbytes < _MAPPED_FROM_BYTES:
        return np.empty(nbytes, dtype=np.uint8)
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, dtype=np.uint8)


def _array(buffer: Buffer) -> npt.NDArray[np.uint8]:
    if not isinstance(buffer, NumpyBuffer) or buffer.bytes is None:
        raise ValueError("the buffer is not one of this device's, or it has been freed")
    return buffer.bytes


def _part(buffer: Buffer, offset: int, length: int) -> npt.NDArray[np.uint8]:
    memory = _array(buffer)
    if not 0 <= offset <= offset + length <= memory.nbytes:
        raise ValueError(
            f"bytes [{offset}, {offset + length}) are outside a buffer of {memory.nbytes}"
        )
    return memory[offset : offset + length]


def _host_memory() -> tuple[int, int]:
    """Return (total, available) bytes of the machine or of the control group, the smaller ones."""
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="ascii").splitlines())
    total, available = (int(fields[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    limit = _cgroup_number("memory.max")
    if limit is not None:
        used = _cgroup_number("memory.current") or 0
        total, available = min(total, limit), min(available, max(0, limit - used))
    return total, available


def _cgroup_number(name: str) -> int | None:
    """Return a control-group v2 value of the current root, None where there is no limit."""
    try:
        text = (_CGROUP / name).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
