"""The CUDA device: memory of one GPU behind the Device port, through CuPy's runtime calls.

CuPy is imported when a device is opened, not when this module is.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from loader_kernels.device import Buffer, DeviceMemory, DeviceOutOfMemoryError
from loader_kernels.digest import BLOCK_BYTES, hash_blocks

__all__ = ["CupyBuffer", "CupyDevice"]

_THREAD_STREAM = 2
"""`cudaStreamPerThread`: work of one thread does not wait for that of another."""

_ALIGNMENT = 256
"""cudaMalloc hands out addresses of this alignment (CUDA C++ Programming Guide, 5.3.2)."""

_STAGING_BYTES = 512 * BLOCK_BYTES
"""Pinned memory of each hashing thread, through which device memory comes to the host."""

_DEVICE_TO_HOST, _DEVICE_TO_DEVICE = 2, 3
"""`cudaMemcpyKind`."""


class CupyBuffer:
    """Device memory of one tensor: an allocation of its own.

    Attributes:
        nbytes: bytes that may be used.
        pointer: device address; 0 for an empty buffer, None once freed.
    """

    __slots__ = ("nbytes", "pointer")

    def __init__(self, pointer: int, nbytes: int) -> None:
        """Wrap memory that only `CupyDevice.free` gives back."""
        self.pointer: int | None = pointer
        self.nbytes = nbytes


class _Window:
    """Part of a buffer as transports and array libraries take it; does not keep the memory alive."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


class CupyDevice:
    """One CUDA device. Thread-safe; every thread works on a stream of its own.

    Each buffer is one cudaMalloc, so that freeing a tensor gives its bytes back to the card and not to
    a pool. `allocated_bytes` counts buffers rounded up to 256 bytes; what the driver needs beside that
    shows in `free_bytes`, which is the driver's own number.
    """

    def __init__(self, index: int = 0, limit_bytes: int | None = None) -> None:
        """Open the device and make its context, which takes some hundred MiB of its memory.

        Args:
            index: number of the device, as CUDA counts.
            limit_bytes: most bytes to hand out; None leaves it to the device.

        Raises:
            ValueError: CuPy, the driver or the device is missing; the text says what to do.
        """
        try:
            import cupy
        except ImportError as error:
            raise ValueError(
                f"device 'cuda:{index}' needs CuPy: install loader-service[cuda12] or [cuda13] "
                f"({error})"
            ) from error
        self._cuda: Any = cupy.cuda
        self._runtime: Any = cupy.cuda.runtime
        self._index = index
        self._limit_bytes = limit_bytes
        self._allocated_bytes = 0
        self._lock = threading.Lock()
        self._staging = threading.local()
        try:
            count = self._runtime.getDeviceCount()
        except self._runtime.CUDARuntimeError as error:
            raise ValueError(
                f"device 'cuda:{index}' needs an NVIDIA driver that works: {error}"
            ) from error
        if not 0 <= index < count:
            raise ValueError(f"there is no device 'cuda:{index}'; this machine has {count}")
        with self._cuda.Device(index):
            # The first call that needs a context makes it, before UCX looks for one.
            self._runtime.free(0)

    @property
    def name(self) -> str:
        """`cuda:` and the number of the device."""
        return f"cuda:{self._index}"

    def memory(self) -> DeviceMemory:
        """Return the handed-out bytes, and what the driver and the limit leave."""
        with self._lock:
            return self._memory()

    def _memory(self) -> DeviceMemory:
        with self._cuda.Device(self._index):
            available, total = self._runtime.memGetInfo()
        if self._limit_bytes is not None:
            total = min(total, self._limit_bytes)
            available = min(available, self._limit_bytes - self._allocated_bytes)
        return DeviceMemory(self._allocated_bytes, max(0, available), total)

    def allocate(self, nbytes: int) -> CupyBuffer:
        """Return fresh device memory, contents undefined."""
        if not nbytes:
            return CupyBuffer(0, 0)
        with self._lock:
            if self._limit_bytes is not None:
                left = self._limit_bytes - self._allocated_bytes
                if _rounded(nbytes) > left:
                    raise DeviceOutOfMemoryError(nbytes, max(0, left))
            try:
                with self._cuda.Device(self._index):
                    pointer = self._runtime.malloc(nbytes)
            except self._runtime.CUDARuntimeError as error:
                raise DeviceOutOfMemoryError(nbytes, self._memory().free_bytes) from error
            self._allocated_bytes += _rounded(nbytes)
        return CupyBuffer(pointer, nbytes)

    def free(self, buffer: Buffer) -> None:
        """Give the memory back to the card; waits for work that is under way on it."""
        pointer = self._pointer(buffer)
        assert isinstance(buffer, CupyBuffer)
        buffer.pointer = None
        if not pointer:
            return
        with self._lock, self._cuda.Device(self._index):
            self._runtime.free(pointer)
            self._allocated_bytes -= _rounded(buffer.nbytes)

    def window(self, buffer: Buffer, offset: int, length: int) -> Any:
        """Return an object with `__cuda_array_interface__`, uint8 of shape (length,)."""
        return _Window(self._part(buffer, offset, length), length)

    def copy(
        self, source: Buffer, source_offset: int, target: Buffer, offset: int, length: int
    ) -> None:
        """Copy on the device; done when the call returns."""
        there = self._part(target, offset, length)
        here = self._part(source, source_offset, length)
        self._transfer(there, here, length, _DEVICE_TO_DEVICE)

    def zero(self, buffer: Buffer, offset: int, length: int) -> None:
        """Set bytes to zero; done when the call returns."""
        pointer = self._part(buffer, offset, length)
        if not length:
            return
        with self._cuda.Device(self._index):
            self._runtime.memsetAsync(pointer, 0, length, _THREAD_STREAM)
            self._runtime.streamSynchronize(_THREAD_STREAM)

    def read(self, buffer: Buffer, offset: int, length: int) -> memoryview:
        """Return a copy in host memory, read-only."""
        host = np.empty(length, np.uint8)
        pointer = self._part(buffer, offset, length)
        self._transfer(host.ctypes.data, pointer, length, _DEVICE_TO_HOST)
        return host.data.toreadonly()

    def block_hashes(self, buffer: Buffer, offset: int, length: int) -> bytes:
        """Hash the device's bytes, on the host: they come over in pieces of whole blocks."""
        staging = self._thread_staging()
        hashes = []
        for start in range(0, length, _STAGING_BYTES):
            size = min(_STAGING_BYTES, length - start)
            pointer = self._part(buffer, offset + start, size)
            self._transfer(staging.ctypes.data, pointer, size, _DEVICE_TO_HOST)
            hashes.append(hash_blocks(staging[:size].data))
        return b"".join(hashes)

    def _thread_staging(self) -> Any:
        if not hasattr(self._staging, "array"):
            with self._cuda.Device(self._index):
                memory = self._cuda.alloc_pinned_memory(_STAGING_BYTES)
            # The array keeps the pinned memory alive.
            self._staging.array = np.frombuffer(memory, np.uint8, _STAGING_BYTES)
        return self._staging.array

    def _transfer(self, target: int, source: int, length: int, kind: int) -> None:
        if not length:
            return
        with self._cuda.Device(self._index):
            self._runtime.memcpyAsync(target, source, length, kind, _THREAD_STREAM)
            self._runtime.streamSynchronize(_THREAD_STREAM)

    def _part(self, buffer: Buffer, offset: int, length: int) -> int:
        """Return the address of bytes [offset, offset + length)."""
        pointer = self._pointer(buffer)
        if offset < 0 or length < 0 or offset + length > buffer.nbytes:
            raise ValueError(f"bytes {offset} to {offset + length} lie outside of the buffer")
        return pointer + offset

    def _pointer(self, buffer: Buffer) -> int:
        if not isinstance(buffer, CupyBuffer) or buffer.pointer is None:
            raise ValueError("the buffer is not one of this device's, or it has been freed")
        return buffer.pointer


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
