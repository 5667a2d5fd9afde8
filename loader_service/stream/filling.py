"""Reading parts of slices from the files to where they stand, and hashing them there.

Into host memory, bytes are read straight and hashed while they are in the cache. Into a device, threads
read small pieces into pinned memory, from where the device fetches and then hashes them. The coordinator
fills chunks so, a worker that reads for itself its tensors.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

from loader_kernels.device import STAGING_BYTES, Copy, Device, Span, Upload
from loader_service.plan.slices import Slice
from loader_service.stream.reader import (
    OpenFiles,
    Readable,
    Target,
    fill_targets,
    is_short,
    read_range,
    read_tensor,
    with_zero_rows,
)
from loader_service.stream.threads import run_in_thread

__all__ = ["Hashes", "Place", "fill_device", "fill_host"]

PIECE_BYTES = 4 << 20
"""Pinned memory that a thread reads into at once: small enough to stay in the cache until the GPU has
fetched it, large enough for the link (measured: 16 threads of 4 MiB are the fastest)."""

THREADS_PER_STEP = 8
"""Threads that fill one step together; several steps are filled at once."""


class Place(NamedTuple):
    """A part of a slice and where it stands: bytes [offset, offset + length) of a slot.

    Attributes:
        tensor: position of the tensor among those that are read.
        piece: the slice.
        begin: first wire byte of the part, a multiple of the digest's block.
        length: bytes of the part; 0 for a slice without payload.
        slot: host memory of shape (bytes,), or a buffer of the device that is filled.
        offset: first byte in the slot.
    """

    tensor: int
    piece: Slice
    begin: int
    length: int
    slot: Any
    offset: int


class Hashes(NamedTuple):
    """Block hashes of a part of a slice, those of the zero rows behind its last part included."""

    piece: Slice
    begin: int
    hashes: bytes


async def fill_host(
    readers: Executor, files: OpenFiles, tensors: Sequence[Readable], places: Sequence[Place]
) -> list[Hashes]:
    """Fill places in host memory by one thread; return the hashes of every distinct part.

    Parts that several places have in common are read once. A cancelled caller waits until nothing uses
    the slots any more.

    Raises:
        LoaderError: what reading raises, see `read_tensor`.
    """
    return await run_in_thread(readers, _read, files, tensors, places)


async def fill_device(
    device: Device,
    readers: Executor,
    files: OpenFiles,
    tensors: Sequence[Readable],
    places: Sequence[Place],
) -> list[Hashes]:
    """Fill places on a device by a few threads, the last of which has the device hash; as `fill_host`."""
    filling = _Filling(device, files, tensors, places)
    filling.start(readers)
    try:
        return await asyncio.shield(filling.done)
    except asyncio.CancelledError:
        filling.give_up()
        # Threads and device use the slots until then.
        await asyncio.wait([filling.done])
        raise


def _read(files: OpenFiles, tensors: Sequence[Readable], places: Sequence[Place]) -> list[Hashes]:
    hashed = []
    distinct, copies = _distinct(places)
    for index, of_tensor in distinct.items():
        targets = [Target(place.piece, place.begin, _host_view(place)) for place in of_tensor]
        for target, hashes in zip(
            targets, read_tensor(files, tensors[index], targets), strict=True
        ):
            hashed.append(Hashes(target.piece, target.begin, hashes))
    for first, again in copies:
        _host_view(again)[:] = _host_view(first)
    return hashed


def _host_view(place: Place) -> memoryview:
    # A slice without payload may have no slot; reading nothing needs memory all the same.
    view: memoryview = place.slot if place.length else memoryview(b"")
    return view[place.offset : place.offset + place.length]


def _distinct(
    places: Iterable[Place],
) -> tuple[dict[int, list[Place]], list[tuple[Place, Place]]]:
    """Return by tensor where its slices' parts are read to, and what is copied from there."""
    distinct: dict[int, dict[int, Place]] = {}
    copies = []
    for place in places:
        first = distinct.setdefault(place.tensor, {}).setdefault(id(place.piece), place)
        if first is not place and place.length:
            copies.append((first, place))
    return {index: list(each.values()) for index, each in distinct.items()}, copies


class _Piece(NamedTuple):
    """Parts of one tensor's slices that together fit the pinned memory of a thread."""

    tensor: Readable
    places: list[Place]


def _pieces(
    files: OpenFiles, tensors: Sequence[Readable], places: dict[int, list[Place]]
) -> Iterator[_Piece]:
    """Cut what is read; column slices of all ranks are cut at the same rows."""
    for index, all_places in places.items():
        of_tensor = [place for place in all_places if place.length]
        if not of_tensor:
            continue
        count = -(-sum(_read_bytes(files, place) for place in of_tensor) // PIECE_BYTES)
        edges = [_edges(place, count) for place in of_tensor]
        for number in range(count + 2):
            parts = [
                place._replace(
                    begin=place.begin + edge[number],
                    offset=place.offset + edge[number],
                    length=edge[number + 1] - edge[number],
                )
                for place, edge in zip(of_tensor, edges, strict=True)
                if edge[number + 1] > edge[number]
            ]
            if parts:
                yield _Piece(tensors[index], parts)


def _read_bytes(files: OpenFiles, place: Place) -> int:
    """Return the bytes that are read for a part: more than its own where rows are read in vain."""
    (run, *others) = place.piece.runs
    if files.reads_rows_whole and not others and is_short(run):
        return place.length // run.length * run.source_stride
    return place.length


def _edges(place: Place, count: int) -> list[int]:
    """Cut a part into the rest of a row, `count` about equal runs of rows, and the begin of a row."""
    most = STAGING_BYTES - PIECE_BYTES
    row = min(
        (
            run.local_stride
            for run in place.piece.runs
            # Longer rows are cut anywhere, or a piece of whole ones would not fit.
            if run.count > 1 and run.source_stride <= most
        ),
        default=1,
    )
    first = min(-place.begin % row, place.length)
    rows = (place.length - first) // row
    inner = [first + rows * number // count * row for number in range(count + 1)]
    return [0, *inner, place.length]


class _Filling:
    """The filling of places by several threads.

    One future for all of it: asyncio's own for every piece would cost more than the reading.
    """

    def __init__(
        self,
        device: Device,
        files: OpenFiles,
        tensors: Sequence[Readable],
        places: Sequence[Place],
    ) -> None:
        self._device = device
        self._files = files
        distinct, self._copies = _distinct(places)
        self._places = [place for of_tensor in distinct.values() for place in of_tensor]
        self._pieces = deque(_pieces(files, tensors, distinct))
        self._uploads: list[object] = []
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._running = min(THREADS_PER_STEP, max(1, len(self._pieces)))
        self.done: asyncio.Future[list[Hashes]] = self._loop.create_future()
        # Its error is for `fill_device`; one that was cancelled does not ask.
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())

    def start(self, readers: Executor) -> None:
        for _ in range(self._running):
            readers.submit(self._run)

    def give_up(self) -> None:
        """Read nothing more."""
        self._pieces.clear()

    def _run(self) -> None:
        try:
            while self._error is None:
                try:
                    piece = self._pieces.popleft()
                except IndexError:
                    break
                self._uploads.append(self._upload(piece))
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever awaits the step
            self._error = error
        with self._lock:
            self._running -= 1
            last = not self._running
        if last:
            self._finish()

    def _finish(self) -> None:
        """Hash, or wait until the device uses the slots no more."""
        hashes: list[Hashes] = []
        try:
            if self._error is None:
                hashes = self._hashes()
            else:
                self._device.block_hashes([], self._uploads)
        except BaseException as error:  # noqa: BLE001
            self._error = self._error or error

        def tell() -> None:
            if self._error is not None:
                self.done.set_exception(self._error)
            else:
                self.done.set_result(hashes)

        self._loop.call_soon_threadsafe(tell)

    def _upload(self, piece: _Piece) -> object:
        (place, *others) = piece.places
        if not others and piece.tensor.twin is None and len(place.piece.runs) == 1:
            (run,) = place.piece.runs
            if run.count == 1:
                # Most bytes come this way, and what Python does for each piece bounds the rate.
                staging = self._device.staging(place.length)
                begin = run.source_offset + place.begin - run.local_offset
                read_range(self._files, piece.tensor, begin, staging)
                span = Span(place.slot, place.offset, place.length)
                return self._device.upload([Upload(0, place.length, span)])
        rows = _whole_rows(piece, self._files.reads_rows_whole)
        if rows is not None:
            first, count, stride = rows
            staging = self._device.staging(count * stride)
            read_range(self._files, piece.tensor, first * stride, staging)
            return self._device.upload(
                [
                    Upload(
                        place.piece.runs[0].source_offset % stride,
                        stride,
                        Span(place.slot, place.offset, place.length),
                        count,
                    )
                    for place in piece.places
                ]
            )
        staging = self._device.staging(sum(place.length for place in piece.places))
        targets, uploads = [], []
        position = 0
        for place in piece.places:
            view = staging[position : position + place.length]
            targets.append(Target(place.piece, place.begin, view))
            span = Span(place.slot, place.offset, place.length)
            uploads.append(Upload(position, place.length, span))
            position += place.length
        fill_targets(self._files, piece.tensor, targets)
        return self._device.upload(uploads)

    def _hashes(self) -> list[Hashes]:
        """Hash what has been uploaded, and copy what several chunks have in common."""
        present = [place for place in self._places if place.length]
        spans = [Span(place.slot, place.offset, place.length) for place in present]
        found = iter(self._device.block_hashes(spans, self._uploads))
        self._device.copy(
            [
                Copy(first.slot, first.offset, again.slot, again.offset, again.length)
                for first, again in self._copies
            ]
        )
        complete = []
        for place in self._places:
            hashes = with_zero_rows(
                place.piece,
                place.begin,
                place.length,
                next(found) if place.length else b"",
                functools.partial(self._tail, place),
            )
            complete.append(Hashes(place.piece, place.begin, hashes))
        return complete

    def _tail(self, place: Place, count: int) -> memoryview:
        return self._device.read(place.slot, place.offset + place.length - count, count)


def _whole_rows(piece: _Piece, in_vain: bool) -> tuple[int, int, int] | None:
    """Return (first row, rows, bytes of a row) of a piece whose places are columns of whole rows.

    The device takes the columns apart while it fetches the rows. Twins are left to the reader, which
    compares them.

    Args:
        piece: the piece.
        in_vain: whether parts of the rows may be read that no place wants.
    """
    if piece.tensor.twin is not None:
        return None
    found = set()
    width = 0
    for place in piece.places:
        if len(place.piece.runs) != 1:
            return None
        (run,) = place.piece.runs
        inside = place.begin - run.local_offset
        if run.local_stride != run.length or inside % run.length or place.length % run.length:
            return None
        row, column = divmod(run.source_offset, run.source_stride)
        if column + run.length > run.source_stride:
            return None
        first, rows = row + inside // run.length, place.length // run.length
        found.add((first, rows, run.source_stride))
        width += run.length
    if len(found) != 1:
        return None
    ((first, rows, stride),) = found
    # As wide as the row, and none the same (ranks that share a slice have one place): all of it.
    short = is_short(piece.places[0].piece.runs[0])
    inside = (first + rows) * stride <= piece.tensor.source.nbytes
    wanted = width == stride or (in_vain and short and inside)
    return (first, rows, stride) if wanted and rows * stride <= STAGING_BYTES else None
