"""As much of CuPy as the CuPy device uses, over host memory, for machines without a GPU.

It is stricter than CUDA: work on a stream is done when the stream is waited for and not before, and
every thread must have chosen a device before it calls anything.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import SimpleNamespace

DEVICES = 2
TOTAL_BYTES = 1 << 30


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Runtime:
    """`cupy.cuda.runtime`, of one process and one device's memory."""

    CUDARuntimeError = CUDARuntimeError
    memcpyDeviceToHost = 2  # noqa: N815 - CuPy's name
    memcpyDeviceToDevice = 3  # noqa: N815 - CuPy's name

    def __init__(self) -> None:
        self.allocations: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.current = threading.local()
        self.pending: dict[int, list[Callable[[], object]]] = {}
        self.failing: CUDARuntimeError | None = None

    def getDeviceCount(self) -> int:
        self._fail()
        return DEVICES

    def setDevice(self, index: int) -> None:
        self.current.index = index

    def memGetInfo(self) -> tuple[int, int]:
        self.require_device()
        return TOTAL_BYTES - sum(map(len, list(self.allocations.values()))), TOTAL_BYTES

    def malloc(self, nbytes: int) -> int:
        self._fail()
        if nbytes > self.memGetInfo()[0]:
            raise CUDARuntimeError(2, "cudaErrorMemoryAllocation: out of memory")
        memory = ctypes.create_string_buffer(nbytes)
        self.allocations[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free(self, pointer: int) -> None:
        self.require_device()
        self._fail()
        if pointer:
            del self.allocations[pointer]

    def memcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert kind in {self.memcpyDeviceToHost, self.memcpyDeviceToDevice}
        self._later(stream, lambda: ctypes.memmove(target, source, nbytes))

    def memsetAsync(self, pointer: int, value: int, nbytes: int, stream: int) -> None:
        self._later(stream, lambda: ctypes.memset(pointer, value, nbytes))

    def require_device(self) -> None:
        assert hasattr(self.current, "index"), "this thread has not chosen a device"

    def _later(self, stream: int, work: Callable[[], object]) -> None:
        self.require_device()
        self.pending[stream].append(work)

    def _fail(self) -> None:
        if self.failing is not None:
            raise self.failing


class Stream:
    """`cupy.cuda.Stream`."""

    def __init__(self, runtime: Runtime) -> None:
        runtime.require_device()
        self.ptr = id(self)
        self._work = runtime.pending[self.ptr] = []

    def synchronize(self) -> None:
        while self._work:
            self._work.pop(0)()


def fake_cupy() -> SimpleNamespace:
    """A module to put in place of `cupy`; its `cuda.runtime` is a `Runtime`."""
    runtime = Runtime()
    return SimpleNamespace(
        cuda=SimpleNamespace(
            runtime=runtime,
            Stream=lambda non_blocking: Stream(runtime),
            alloc_pinned_memory=bytearray,
        )
    )
