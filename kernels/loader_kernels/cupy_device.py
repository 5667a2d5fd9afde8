"""The CuPy device: one CUDA device behind the Device port. CuPy is imported when one is opened."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from loader_kernels.cuda_kernels import CudaKernels, Lane
from loader_kernels.device import (
    Buffer,
    Copy,
    DeviceMemory,
    DeviceOutOfMemoryError,
    Span,
    Upload,
    check_staging,
)

__all__ = ["CupyBuffer", "CupyDevice", "CupyWindow"]

_SHARED_UP_TO_BYTES = 1 << 20
_SHARED_UNIT_BYTES = 512
_OWN_UNIT_BYTES = 2 << 20
_OUT_OF_MEMORY = 2
"""`cudaErrorMemoryAllocation`."""


class CupyBuffer:
    """Device memory of one tensor.

    Attributes:
        owner: device that handed it out.
        pointer: device address, 0 for a buffer without bytes; None once freed.
    """

    __slots__ = ("nbytes", "owner", "pointer")

    def __init__(self, owner: CupyDevice, pointer: int, nbytes: int) -> None:
        """Wrap memory that only `owner` frees."""
        self.owner = owner
        self.pointer: int | None = pointer
        self.nbytes = nbytes


class CupyWindow:
    """Writable view of device memory for a transport: uint8 of shape (length,)."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, address: int, length: int) -> None:
        """View `length` bytes at a device address; the buffer there must outlive the view."""
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CupyDevice:
    """One CUDA device. Thread-safe; a call makes the device the calling thread's current one.

    Every buffer is a `cudaMalloc` of its own, without a pool, so that freeing a tensor really gives
    its bytes back. `memory` counts what CUDA takes for a buffer: up to 1 MiB multiples of 512 bytes
    (small buffers share blocks of 2 MiB), above it multiples of 2 MiB.
    """

    def __init__(self, index: int, limit_bytes: int | None = None) -> None:
        """Open a device and make its primary context, which UCX needs before it starts.

        Args:
            index: number of the device among those that CUDA shows.
            limit_bytes: most bytes that may be handed out; None leaves it to the device.

        Raises:
            ValueError: CuPy, the driver or the device is missing; the text says what to do.
        """
        self._index = index
        self._cupy = _import_cupy(self.name)
        self._runtime = self._cupy.cuda.runtime
        self._limit_bytes = limit_bytes
        self._allocated_bytes = 0
        self._lock = threading.Lock()
        self._open()
        self._lane = Lane(self._cupy, index)
        self._kernels = CudaKernels(self._cupy)

    def _open(self) -> None:
        try:
            count = self._runtime.getDeviceCount()
            if self._index >= count:
                raise ValueError(
                    f"no device {self.name!r}; CUDA shows {count}, the first is cuda:0 "
                    "(CUDA_VISIBLE_DEVICES may hide others)"
                )
            self._use()
            self._runtime.free(0)  # the usual way to make the context now
        except self._runtime.CUDARuntimeError as error:
            raise ValueError(
                f"{self.name} cannot be used; `nvidia-smi` must list it, and its driver must be new "
                f"enough for the installed CuPy: {error}"
            ) from error

    @property
    def name(self) -> str:
        """`cuda:0` for the first device."""
        return f"cuda:{self._index}"

    def memory(self) -> DeviceMemory:
        """Return the handed-out bytes, and what the limit and all processes on the device leave."""
        with self._lock:
            return self._memory()

    def _memory(self) -> DeviceMemory:
        self._use()
        free, total = self._runtime.memGetInfo()
        if self._limit_bytes is not None:
            total = min(total, self._limit_bytes)
            free = min(free, self._limit_bytes - self._allocated_bytes)
        return DeviceMemory(self._allocated_bytes, max(0, free), total)

    def allocate(self, nbytes: int) -> CupyBuffer:
        """Return fresh device memory; the limit counts rounded bytes."""
        taken = _taken_bytes(nbytes)
        with self._lock:
            if self._limit_bytes is not None and self._allocated_bytes + taken > self._limit_bytes:
                raise DeviceOutOfMemoryError(nbytes, self._memory().free_bytes)
            self._use()
            try:
                pointer = self._runtime.malloc(nbytes) if nbytes else 0
            except self._runtime.CUDARuntimeError as error:
                if error.status != _OUT_OF_MEMORY:
                    raise
                raise DeviceOutOfMemoryError(nbytes, self._memory().free_bytes) from error
            self._allocated_bytes += taken
        return CupyBuffer(self, pointer, nbytes)

    def free(self, buffer: Buffer) -> None:
        """Give the memory back; if the driver refuses, it stays counted and the buffer is dead."""
        pointer = self._address(buffer, 0, 0)
        assert isinstance(buffer, CupyBuffer)
        with self._lock:
            buffer.pointer = None
            if pointer:
                self._use()
                self._runtime.free(pointer)
            self._allocated_bytes -= _taken_bytes(buffer.nbytes)

    def window(self, buffer: Buffer, offset: int, length: int) -> CupyWindow:
        """Return a view that offers `__cuda_array_interface__`."""
        return CupyWindow(self._address(buffer, offset, length), length)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy by one kernel on the calling thread's stream and wait for it."""
        addresses = [
            (
                self._address(source, source_offset, length),
                self._address(target, offset, length),
                length,
            )
            for source, source_offset, target, offset, length in copies
        ]
        self._use()
        self._kernels.copy(self._lane, addresses)

    def zero(self, buffer: Buffer, offset: int, length: int) -> None:
        """Fill with zeros on the calling thread's stream and wait for it."""
        address = self._address(buffer, offset, length)
        if length:
            self._use()
            stream = self._lane.stream
            self._runtime.memsetAsync(address, 0, length, stream.ptr)
            stream.synchronize()

    def read(self, buffer: Buffer, offset: int, length: int) -> memoryview:
        """Return a copy in host memory."""
        address = self._address(buffer, offset, length)
        host = np.empty(length, np.uint8)
        if length:
            self._use()
            stream = self._lane.stream
            self._runtime.memcpyAsync(
                host.ctypes.data, address, length, self._runtime.memcpyDeviceToHost, stream.ptr
            )
            stream.synchronize()
        return host.data.toreadonly()

    def staging(self, nbytes: int) -> memoryview:
        """Return pinned memory."""
        check_staging(nbytes)
        self._use()
        return self._lane.next_staging(nbytes)

    def upload(self, uploads: Sequence[Upload]) -> object:
        """Copy on the calling thread's stream; returns what `block_hashes` waits for."""
        self._use()
        return self._lane.upload([(self._address(*each.span), each) for each in uploads])

    def block_hashes(self, spans: Sequence[Span], uploads: Sequence[object] = ()) -> list[bytes]:
        """Hash by one kernel on the calling thread's stream."""
        addresses = [(self._address(*span), span.length) for span in spans]
        self._use()
        for upload in uploads:
            self._lane.wait_for(upload)
        if not any(length for _, length in addresses):
            self._lane.stream.synchronize()
        return self._kernels.block_hashes(self._lane, addresses)

    def _use(self) -> None:
        """Make the device the thread's; it stays, since going back would open another device."""
        self._runtime.setDevice(self._index)

    def _address(self, buffer: Buffer, offset: int, length: int) -> int:
        """Return the device address of bytes [offset, offset + length) of a buffer."""
        if not isinstance(buffer, CupyBuffer) or buffer.owner is not self or buffer.pointer is None:
            raise ValueError("the buffer is not one of this device's, or it has been freed")
        if not 0 <= offset <= offset + length <= buffer.nbytes:
            raise ValueError(
                f"bytes [{offset}, {offset + length}) are outside a buffer of {buffer.nbytes}"
            )
        return buffer.pointer + offset


def _taken_bytes(nbytes: int) -> int:
    """Return what CUDA takes for an allocation."""
    unit = _SHARED_UNIT_BYTES if nbytes <= _SHARED_UP_TO_BYTES else _OWN_UNIT_BYTES
    return -(-nbytes // unit) * unit


def _import_cupy(name: str) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ValueError(
            f"{name} needs CuPy: install `loader-service[cuda13]`, or `loader-service[cuda12]` for a "
            f"driver of CUDA 12 ({error})"
        ) from error
    return cupy
