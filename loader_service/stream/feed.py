"""Where chunks are made: read from the files, hashed, and held until they are sent.

On the host, bytes are read straight into the chunk and hashed while they are in the cache. With a GPU,
threads read small pieces into pinned memory, which the GPU fetches into a ring of chunks on itself; there
they are hashed, and from there they go to the workers' devices over UCX.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple, Protocol

from loader_kernels.device import (
    STAGING_BYTES,
    Buffer,
    Copy,
    Device,
    DeviceOutOfMemoryError,
    Span,
    Upload,
)
from loader_service.errors import OutOfMemory
from loader_service.plan.slices import Slice, TensorPlan
from loader_service.stream.chunks import Extent
from loader_service.stream.reader import (
    OpenFiles,
    Target,
    fill_targets,
    read_range,
    read_tensor,
    with_zero_rows,
)
from loader_service.stream.threads import run_in_thread
from loader_service.stream.window import HostWindow, Window

__all__ = ["DeviceFeed", "Feed", "Hashes", "HostFeed", "Payload"]

PIECE_BYTES = 4 << 20
"""Pinned memory that a thread reads into at once: small enough to stay in the cache until the GPU has
fetched it, large enough for the link (measured: 16 threads of 4 MiB are the fastest)."""

THREADS_PER_STEP = 8
"""Threads that fill one step together; several steps are filled at once."""

HOST_STEPS = 4
"""Steps that a host feed works on at once: more would only push one another out of the cache."""

DEVICE_STEPS = 16
"""Steps that a device feed works on at once: enough for all threads while others are on their way."""


class Payload:
    """One chunk's bytes, and the ranks that get exactly these.

    Attributes:
        parts: slice and extent of everything in the chunk, back to back.
        ranks: the ranks.
        nbytes: bytes of the chunk.
        slot: the memory that holds it, see `Feed.acquire`; None for a chunk without bytes.
    """

    def __init__(self, parts: tuple[tuple[Slice, Extent], ...], ranks: list[int]) -> None:
        """Describe the chunk."""
        self.parts = parts
        self.ranks = ranks
        self.nbytes = sum(extent.length for _, extent in parts)
        self.slot: Any = None


class Hashes(NamedTuple):
    """Block hashes of a part of a slice, those of the zero rows behind its last part included."""

    piece: Slice
    begin: int
    hashes: bytes


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
        self, files: OpenFiles, tensors: Sequence[TensorPlan], payloads: Sequence[Payload]
    ) -> list[Hashes]:
        """Fill the payloads' slots; return the hashes of every distinct part.

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
        self, files: OpenFiles, tensors: Sequence[TensorPlan], payloads: Sequence[Payload]
    ) -> list[Hashes]:
        """Read and hash in one thread."""
        return await run_in_thread(self._readers, _read_step, files, tensors, payloads)

    def view(self, slot: memoryview, nbytes: int) -> memoryview:
        """Return the buffer's beginning."""
        return slot[:nbytes]


def _read_step(
    files: OpenFiles, tensors: Sequence[TensorPlan], payloads: Sequence[Payload]
) -> list[Hashes]:
    hashed = []
    places, copies = _places(payloads)
    for index, places_of_tensor in places.items():
        targets = [
            Target(place.piece, place.begin, place.slot[place.offset : place.offset + place.length])
            for place in places_of_tensor
        ]
        for target, hashes in zip(
            targets, read_tensor(files, tensors[index], targets), strict=True
        ):
            hashed.append(Hashes(target.piece, target.begin, hashes))
    for first, again in copies:
        again.slot[again.offset : again.offset + again.length] = first.slot[
            first.offset : first.offset + first.length
        ]
    return hashed


class _Place(NamedTuple):
    """A part of a slice and where it stands: bytes [offset, offset + length) of a slot."""

    piece: Slice
    begin: int
    length: int
    slot: Any
    offset: int


def _places(
    payloads: Sequence[Payload],
) -> tuple[dict[int, list[_Place]], list[tuple[_Place, _Place]]]:
    """Return by tensor where its slices' parts are read to, and what is copied from there.

    Ranks with different chunks may have slices in common; these are read once.
    """
    places: dict[int, dict[int, _Place]] = {}
    copies = []
    for payload in payloads:
        offset = 0
        for piece, extent in payload.parts:
            place = _Place(piece, extent.offset, extent.length, payload.slot, offset)
            offset += extent.length
            if not extent.length:
                # Its slot may be none; reading nothing needs memory all the same.
                place = place._replace(slot=memoryview(b""), offset=0)
            first = places.setdefault(extent.slice_index, {}).setdefault(id(piece), place)
            if first is not place and place.length:
                copies.append((first, place))
    return {index: list(each.values()) for index, each in places.items()}, copies


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
        self, files: OpenFiles, tensors: Sequence[TensorPlan], payloads: Sequence[Payload]
    ) -> list[Hashes]:
        """Read in a few threads; the last of them has the device hash."""
        filling = _Filling(self._device, files, tensors, payloads)
        filling.start(self._readers)
        try:
            return await asyncio.shield(filling.done)
        except asyncio.CancelledError:
            filling.give_up()
            # Threads and device use the slots until then.
            await asyncio.wait([filling.done])
            raise


class _Piece(NamedTuple):
    """Parts of one tensor's slices that together fit the pinned memory of a thread."""

    tensor: TensorPlan
    places: list[_Place]


def _pieces(tensors: Sequence[TensorPlan], places: dict[int, list[_Place]]) -> Iterator[_Piece]:
    """Cut what a step reads; column slices of all ranks are cut at the same rows."""
    for index, all_places in places.items():
        of_tensor = [place for place in all_places if place.length]
        if not of_tensor:
            continue
        count = -(-sum(place.length for place in of_tensor) // PIECE_BYTES)
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


def _edges(place: _Place, count: int) -> list[int]:
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
    """The making of one step by several threads.

    One future for all of it: asyncio's own for every piece would cost more than the reading.
    """

    def __init__(
        self,
        device: Device,
        files: OpenFiles,
        tensors: Sequence[TensorPlan],
        payloads: Sequence[Payload],
    ) -> None:
        self._device = device
        self._files = files
        places, self._copies = _places(payloads)
        self._places = [place for of_tensor in places.values() for place in of_tensor]
        self._pieces = deque(_pieces(tensors, places))
        self._uploads: list[object] = []
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._running = min(THREADS_PER_STEP, max(1, len(self._pieces)))
        self.done: asyncio.Future[list[Hashes]] = self._loop.create_future()
        # Its error is for `fill`; one that was cancelled does not ask.
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
        rows = _whole_rows(piece)
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

    def _tail(self, place: _Place, count: int) -> memoryview:
        return self._device.read(place.slot, place.offset + place.length - count, count)


def _whole_rows(piece: _Piece) -> tuple[int, int, int] | None:
    """Return (first row, rows, bytes of a row) of a piece whose places are columns of whole rows.

    The device takes the columns apart while it fetches the rows. Twins are left to the reader, which
    compares them.
    """
    if len(piece.places) < 2 or piece.tensor.twin is not None:
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
    return (first, rows, stride) if width == stride and rows * stride <= STAGING_BYTES else None
