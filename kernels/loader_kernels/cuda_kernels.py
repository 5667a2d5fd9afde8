"""Our CUDA kernels, launched on a thread's own stream. Sources: the folder `cuda`.

CuPy compiles them with NVRTC when they are first used and keeps the result in its cache.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loader_kernels.device import STAGING_BYTES, Upload
from loader_kernels.digest import BLOCK_BYTES, HASH_BYTES, block_count

__all__ = ["CudaKernels", "Lane"]

_SOURCES = Path(__file__).with_name("cuda")
_THREADS = 256
_WARPS = _THREADS // 32
_TILE_BYTES = 64 << 10
"""Bytes that a thread block copies; the same number is in `move.cu`."""

_TABLE_BYTES = 512 << 10
"""Room of a thread for the table of a launch, and as much again for what the launch returns."""

_STAGINGS = 2
"""Staging memories of a thread: one is read into while the device fetches the other."""

_PIECE_BYTES = 256 << 20
"""Longer spans are hashed and copied in pieces, so that each piece's hashes fit the room."""


class Lane(threading.local):
    """What each thread has of its own, so that threads do not wait for one another's work.

    Attributes:
        stream: unlike the default one, it does not wait for other work in the process.
        host: pinned memory, uint8 of shape (2 * _TABLE_BYTES,).
        device: address of as much device memory; both are kept as long as the process.
    """

    def __init__(self, cupy: Any, index: int) -> None:
        """Make the calling thread's stream and memory."""
        runtime = cupy.cuda.runtime
        runtime.setDevice(index)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        pinned = cupy.cuda.alloc_pinned_memory(2 * _TABLE_BYTES)
        self.host: npt.NDArray[np.uint8] = np.frombuffer(pinned, np.uint8, 2 * _TABLE_BYTES)
        self.device: int = runtime.malloc(2 * _TABLE_BYTES)
        self._cupy = cupy
        self._stagings: list[_Staging] = []

    def next_staging(self, nbytes: int) -> memoryview:
        """Return pinned memory that the device has fetched everything from; two take turns."""
        if len(self._stagings) < _STAGINGS:
            self._stagings.append(_Staging(self._cupy))
        else:
            self._stagings.append(self._stagings.pop(0))
        staging = self._stagings[-1]
        staging.event.synchronize()
        return staging.view[:nbytes]

    def upload(self, uploads: Sequence[tuple[int, Upload]]) -> Any:
        """Copy from the last staging memory to the addresses, and return what `wait_for` takes.

        That is the memory itself, which must outlive the copy though its thread may end. It is used
        again by the next upload but one; who waits then waits longer than needed.
        """
        staging = self._stagings[-1]
        runtime = self._cupy.cuda.runtime
        kind = runtime.memcpyHostToDevice
        for address, (position, stride, span, rows) in uploads:
            source = staging.address + position
            if rows == 1:
                runtime.memcpyAsync(address, source, span.length, kind, self.stream.ptr)
            else:
                width = span.length // rows
                runtime.memcpy2DAsync(
                    address, width, source, stride, width, rows, kind, self.stream.ptr
                )
        staging.event.record(self.stream)
        return staging

    def wait_for(self, upload: Any) -> None:
        """Have what comes next on the stream wait for an upload of any thread."""
        self.stream.wait_event(upload.event)


class _Staging:
    """Pinned memory with the event that is due when the device has fetched it."""

    def __init__(self, cupy: Any) -> None:
        pinned = cupy.cuda.alloc_pinned_memory(STAGING_BYTES)
        array = np.frombuffer(pinned, np.uint8, STAGING_BYTES)
        self.view = array.data
        self.address: int = array.ctypes.data
        self.event = cupy.cuda.Event(disable_timing=True)


class CudaKernels:
    """The kernels of one process; the calling thread has chosen the device that it launches on."""

    def __init__(self, cupy: Any) -> None:
        """Read the sources; nothing is compiled yet."""
        self._runtime = cupy.cuda.runtime
        self._hash_blocks = _load(cupy, "digest.cu", "hash_blocks")
        self._copy_spans = _load(cupy, "move.cu", "copy_spans")

    def block_hashes(self, lane: Lane, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Hash spans of device memory, see `digest.hash_blocks`.

        Args:
            lane: the calling thread's.
            spans: (address, length) of each.
        """
        hashes = [bytearray() for _ in spans]
        pieces = [
            (number, address + start, min(_PIECE_BYTES, length - start))
            for number, (address, length) in enumerate(spans)
            for start in range(0, length, _PIECE_BYTES)
        ]
        for batch in _batches(pieces, BLOCK_BYTES, _TABLE_BYTES // 24, _TABLE_BYTES // HASH_BYTES):
            counts = [block_count(length) for _, _, length in batch]
            ends = np.cumsum(counts)
            blocks = int(ends[-1])
            rows = np.empty((len(batch), 3), np.uint64)
            rows[:, :2] = [piece[1:] for piece in batch]
            rows[:, 2] = ends - counts
            self._upload(lane, rows)
            with lane.stream:
                self._hash_blocks(
                    (-(-blocks // _WARPS),),
                    (_THREADS,),
                    (
                        np.uint64(lane.device),
                        np.uint32(len(batch)),
                        np.uint64(blocks),
                        np.uint64(lane.device + _TABLE_BYTES),
                    ),
                )
            answer = lane.host[_TABLE_BYTES : _TABLE_BYTES + blocks * HASH_BYTES]
            self._runtime.memcpyAsync(
                answer.ctypes.data,
                lane.device + _TABLE_BYTES,
                answer.nbytes,
                self._runtime.memcpyDeviceToHost,
                lane.stream.ptr,
            )
            lane.stream.synchronize()
            for (number, _, _), count, end in zip(batch, counts, ends, strict=True):
                hashes[number] += answer[(end - count) * HASH_BYTES : end * HASH_BYTES].tobytes()
        return list(map(bytes, hashes))

    def copy(self, lane: Lane, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy inside the device, and wait for it.

        Args:
            lane: the calling thread's.
            copies: (source address, target address, length) of each; none overlaps another.
        """
        pieces = [
            (source + start, target + start, min(_PIECE_BYTES, length - start))
            for source, target, length in copies
            for start in range(0, length, _PIECE_BYTES)
        ]
        for batch in _batches(pieces, _TILE_BYTES, _TABLE_BYTES // 32, 1 << 30):
            rows = np.empty((len(batch), 4), np.uint64)
            rows[:, :3] = batch
            tiles = -(-rows[:, 2].astype(np.int64) // _TILE_BYTES)
            ends = np.cumsum(tiles)
            rows[:, 3] = ends - tiles
            self._upload(lane, rows)
            with lane.stream:
                self._copy_spans(
                    (int(ends[-1]),), (_THREADS,), (np.uint64(lane.device), np.uint32(len(batch)))
                )
            # The table is used until the launch has ended.
            lane.stream.synchronize()

    def _upload(self, lane: Lane, rows: npt.NDArray[np.uint64]) -> None:
        """Put a launch's table where the device reads it."""
        table = rows.view(np.uint8).reshape(-1)
        lane.host[: table.nbytes] = table
        self._runtime.memcpyAsync(
            lane.device,
            lane.host.ctypes.data,
            table.nbytes,
            self._runtime.memcpyHostToDevice,
            lane.stream.ptr,
        )


def _load(cupy: Any, source: str, name: str) -> Any:
    code = (_SOURCES / source).read_text(encoding="ascii")
    return cupy.RawModule(code=code, options=("-std=c++17",)).get_function(name)


def _batches(
    pieces: Sequence[tuple[int, int, int]], unit_bytes: int, most_pieces: int, most_units: int
) -> Iterator[list[tuple[int, int, int]]]:
    """Yield runs of pieces, whose last number is their length, as large as one launch takes."""
    batch: list[tuple[int, int, int]] = []
    units = 0
    for piece in pieces:
        count = -(-piece[2] // unit_bytes)
        if batch and (len(batch) == most_pieces or units + count > most_units):
            yield batch
            batch, units = [], 0
        batch.append(piece)
        units += count
    if batch:
        yield batch
