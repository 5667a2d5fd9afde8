"""How the chunks of a manifest come into the tensors' buffers: sent by the streamer, or read by the worker."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np

from loader_kernels import digest
from loader_kernels.device import Buffer, Copy, Device, Span
from loader_service.checkpoint.catalog import CheckpointFile
from loader_service.stream import wire
from loader_service.stream.chunks import CREDITS, Chunk, Extent, largest_bundle_bytes
from loader_service.stream.filling import Place, fill_device, fill_host
from loader_service.stream.reader import OpenFiles
from loader_service.stream.threads import run_in_thread
from loader_service.stream.transport import Connection
from loader_worker.manifest import Manifest

__all__ = ["Landed", "LocalFiles", "ReadChunks", "SentChunks", "free_all"]

_log = logging.getLogger(__name__)


class Landed(NamedTuple):
    """What is known of a chunk that is in its buffers.

    Attributes:
        hashes: block hashes of every extent, zero rows behind it included.
        expected: digests of the slices that the chunk ends, by position of the slice.
    """

    hashes: Sequence[bytes]
    expected: Mapping[int, bytes]


@dataclasses.dataclass(frozen=True, slots=True)
class LocalFiles:
    """The files of a manifest as this process has opened them, and the threads that read them."""

    files: Mapping[str, CheckpointFile]
    readers: Executor


class SentChunks:
    """Chunks that the streamer sends. Bundles land in memory of their own and are copied apart."""

    def __init__(
        self,
        manifest: Manifest,
        buffers: Sequence[Buffer],
        device: Device,
        hashers: Executor,
        connection: Connection,
    ) -> None:
        """See `Receiver`."""
        self._manifest = manifest
        self._buffers = buffers
        self._device = device
        self._hashers = hashers
        self._connection = connection
        self._staging: list[Buffer] = []
        """Landing room for bundles that no task uses at the moment."""

    def open(self) -> None:
        """Allocate one buffer for every bundle that can be on its way at once. Blocks."""
        bundles = sum(len(chunk.extents) > 1 for chunk in self._manifest.chunks)
        for _ in range(min(CREDITS, bundles)):
            self._staging.append(self._device.allocate(largest_bundle_bytes(self._manifest.chunks)))

    def check(self) -> None:
        """There is nothing to look at: the digests have been compared."""

    def close(self) -> None:
        """Free the landing room. Blocks."""
        free_all(self._device, self._staging)

    async def take(self, index: int, chunk: Chunk) -> Landed:
        """Receive a chunk and the digests that are sent with it.

        Raises:
            PeerLostError: the connection is gone.
        """
        staging = self._staging.pop() if len(chunk.extents) > 1 else None
        try:
            if chunk.nbytes:
                if staging is None:
                    (extent,) = chunk.extents
                    buffer, offset = self._buffers[extent.slice_index], extent.offset
                else:
                    buffer, offset = staging, 0
                window = self._device.window(buffer, offset, chunk.nbytes)
                await self._connection.recv(wire.chunk_tag(index), window)
            hashes = await run_in_thread(self._hashers, self._land, chunk, staging)
        finally:
            if staging is not None:
                self._staging.append(staging)
        ended = [extent.slice_index for extent in chunk.extents if self._ends_slice(extent)]
        if not ended:
            return Landed(hashes, {})
        record = bytearray(digest.DIGEST_BYTES * len(ended))
        await self._connection.recv(wire.end_tag(index), record)
        starts = range(0, len(record), digest.DIGEST_BYTES)
        digests = [bytes(record[start : start + digest.DIGEST_BYTES]) for start in starts]
        return Landed(hashes, dict(zip(ended, digests, strict=True)))

    def _ends_slice(self, extent: Extent) -> bool:
        piece = self._manifest.slices[extent.slice_index]
        return extent.offset + extent.length == piece.wire_bytes

    def _land(self, chunk: Chunk, staging: Buffer | None) -> list[bytes]:
        """Move a bundle's extents to their buffers; return the hashes of what the buffers hold."""
        position = 0
        copies, spans = [], []
        for extent in chunk.extents:
            buffer = self._buffers[extent.slice_index]
            if staging is not None:
                copies.append(Copy(staging, position, buffer, extent.offset, extent.length))
                position += extent.length
            end = extent.offset + extent.length
            if self._ends_slice(extent):
                # The zero rows belong to the digest.
                end = self._manifest.slices[extent.slice_index].nbytes
            spans.append(Span(buffer, extent.offset, end - extent.offset))
        self._device.copy(copies)
        return self._device.block_hashes(spans)


class ReadChunks:
    """Chunks that the worker reads itself, straight into the buffers.

    They are hashed where they first stand in memory: on the host while they are read, on a GPU by the GPU.
    Nobody else has read them, so there is no digest to compare with; that the files are those that were
    planned has been proved before, and that they did not change meanwhile is checked at the end.
    """

    def __init__(
        self, manifest: Manifest, buffers: Sequence[Buffer], device: Device, local: LocalFiles
    ) -> None:
        """See `Receiver`."""
        self._manifest = manifest
        self._buffers = buffers
        self._device = device
        self._local = local
        self._files: OpenFiles | None = None
        self._on_host = _host_view(device, buffers[0]) is not None

    def open(self) -> None:
        """Open the files. Blocks.

        Raises:
            DataLoss: FILE_CHANGED or READ_FAILED.
        """
        self._files = OpenFiles(self._local.files, reads_rows_whole=True)

    def check(self) -> None:
        """Compare the files with what was opened. Blocks.

        Raises:
            DataLoss: FILE_CHANGED.
        """
        assert self._files is not None
        self._files.check_unchanged()

    def close(self) -> None:
        """Close the files."""
        if self._files is not None:
            self._files.close()

    async def take(self, index: int, chunk: Chunk) -> Landed:
        """Read a chunk.

        Raises:
            LoaderError: what reading raises, see `read_tensor`.
        """
        assert self._files is not None
        places = [self._place(extent) for extent in chunk.extents]
        readers, origins = self._local.readers, self._manifest.origins
        if self._on_host:
            hashed = await fill_host(readers, self._files, origins, places)
        else:
            hashed = await fill_device(self._device, readers, self._files, origins, places)
        by_slice = {id(part.piece): part.hashes for part in hashed}
        return Landed([by_slice[id(place.piece)] for place in places], {})

    def _place(self, extent: Extent) -> Place:
        index = extent.slice_index
        buffer = self._buffers[index]
        slot = _host_view(self._device, buffer) if self._on_host else buffer
        piece = self._manifest.slices[index]
        return Place(index, piece, extent.offset, extent.length, slot, extent.offset)


def _host_view(device: Device, buffer: Buffer) -> memoryview | None:
    """Return a buffer's bytes if they are the host's own memory, which files can be read into."""
    window = device.window(buffer, 0, buffer.nbytes)
    return window.data if isinstance(window, np.ndarray) else None


def free_all(device: Device, buffers: list[Buffer]) -> None:
    """Free and forget every buffer; what cannot be freed is logged. Runs in a thread."""
    while buffers:
        try:
            device.free(buffers.pop())
        except Exception:  # noqa: BLE001 - one bad buffer must not keep the others
            _log.exception("a buffer could not be freed")
