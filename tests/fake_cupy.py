"""As much of CuPy as the CuPy device uses, over host memory, for machines without a GPU.

It is stricter than CUDA: work on a stream is done when the stream is waited for and not before, and
every thread must have chosen a device before it calls anything.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from loader_kernels.digest import hash_blocks

DEVICES = 2
TOTAL_BYTES = 1 << 30


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Runtime:
    """`cupy.cuda.runtime`, of one process and one device's memory."""

    CUDARuntimeError = CUDARuntimeError
    memcpyHostToDevice = 1  # noqa: N815 - CuPy's name
    memcpyDeviceToHost = 2  # noqa: N815 - CuPy's name

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
        assert kind in {self.memcpyHostToDevice, self.memcpyDeviceToHost}
        self.later(stream, lambda: ctypes.memmove(target, source, nbytes))

    def memcpy2DAsync(
        self, target: int, target_pitch: int, source: int, pitch: int, width: int, rows: int,
        kind: int, stream: int,
    ) -> None:  # fmt: skip
        for row in range(rows):
            self.memcpyAsync(target + row * target_pitch, source + row * pitch, width, kind, stream)

    def memsetAsync(self, pointer: int, value: int, nbytes: int, stream: int) -> None:
        self.later(stream, lambda: ctypes.memset(pointer, value, nbytes))

    def require_device(self) -> None:
        assert hasattr(self.current, "index"), "this thread has not chosen a device"

    def later(self, stream: int, work: Callable[[], object]) -> None:
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
        self._runtime = runtime
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._runtime.current.stream = self.ptr

    def __exit__(self, *error: object) -> None:
        del self._runtime.current.stream

    def synchronize(self) -> None:
        with self._lock:
            while self._work:
                self._work.pop(0)()

    def wait_event(self, event: Event) -> None:
        self._work.append(event.synchronize)


class Event:
    """`cupy.cuda.Event`; waiting for it does the work of its stream."""

    def __init__(self) -> None:
        self._stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self._stream = stream

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


class RawModule:
    """`cupy.RawModule` with our kernels, as they are described; test_cuda_kernels runs their sources."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def get_function(self, name: str) -> Callable[..., None]:
        kernels: dict[str, Callable[..., None]] = {
            "hash_blocks": _hash_blocks,
            "copy_spans": _copy_spans,
        }
        kernel = kernels[name]

        def launch(grid: tuple[int], block: tuple[int], args: tuple[Any, ...]) -> None:
            numbers = [int(argument) for argument in args]
            self._runtime.later(self._runtime.current.stream, lambda: kernel(grid[0], *numbers))

        return launch


def _hash_blocks(grid: int, table: int, count: int, blocks: int, hashes: int) -> None:
    assert grid * 8 >= blocks
    rows = np.frombuffer(ctypes.string_at(table, count * 24), np.uint64).reshape(count, 3)
    for address, length, first in rows.tolist():
        found = hash_blocks(memoryview(ctypes.string_at(address, length)))
        ctypes.memmove(hashes + first * 8, found, len(found))


def _copy_spans(grid: int, table: int, count: int) -> None:
    rows = np.frombuffer(ctypes.string_at(table, count * 32), np.uint64).reshape(count, 4)
    tiles = 0
    for source, target, length, first in rows.tolist():
        assert first == tiles
        tiles += -(-length // 65536)
        ctypes.memmove(target, source, length)
    assert tiles == grid


def fake_cupy() -> SimpleNamespace:
    """A module to put in place of `cupy`; its `cuda.runtime` is a `Runtime`."""
    runtime = Runtime()
    return SimpleNamespace(
        cuda=SimpleNamespace(
            runtime=runtime,
            Stream=lambda non_blocking: Stream(runtime),
            alloc_pinned_memory=bytearray,
            Event=lambda disable_timing: Event(),
        ),
        RawModule=lambda code, options: RawModule(runtime),
    )
