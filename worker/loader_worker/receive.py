"""Receiving one rank's slices: chunks land in the tensors' own buffers and are hashed there."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Sequence
from concurrent.futures import Executor

from loader_kernels import digest
from loader_kernels.device import Buffer, Copy, Device, Span
from loader_service.errors import DigestMismatch, LoaderError
from loader_service.stream import wire
from loader_service.stream.chunks import CREDITS, Chunk, Extent, largest_bundle_bytes
from loader_service.stream.threads import run_in_thread
from loader_service.stream.transport import Connection, PeerLostError
from loader_worker.manifest import Manifest

__all__ = ["Receiver", "free_all"]

_log = logging.getLogger(__name__)

REFUSAL_SECONDS = 1.0
"""How long a refused peer may take to read why before the connection is dropped."""


class Receiver:
    """Fills the buffers of one manifest from one connection and verifies every slice.

    Cancelling `run` aborts the connection; nothing writes to the buffers when it returns.
    """

    def __init__(
        self, manifest: Manifest, buffers: Sequence[Buffer], device: Device, hashers: Executor
    ) -> None:
        """Prepare to receive.

        Args:
            manifest: slices and chunks.
            buffers: one per slice, zero rows already zeroed; owned by the caller.
            device: device that the buffers are on.
            hashers: threads that call the device, which can block: they allocate, hash, copy and free.
        """
        self._manifest = manifest
        self._buffers = buffers
        self._device = device
        self._hashers = hashers
        self._checks = [_SliceCheck(piece.nbytes) for piece in manifest.slices]
        self._staging: list[Buffer] = []
        """Landing room for bundles that no task uses at the moment."""
        self._next_chunk = itertools.count()
        self._refusal: DigestMismatch | None = None
        self.done_bytes = 0
        """Payload bytes that have landed and been hashed."""

    async def run(self, connection: Connection) -> None:
        """Receive and verify everything.

        Raises:
            PeerLostError: the connection is gone.
            DigestMismatch: a slice's landed bytes are not the ones that were read.
        """
        await connection.send(wire.TAG_WELCOME, bytearray(wire.encode_welcome(CREDITS)))
        try:
            await run_in_thread(self._hashers, self._allocate_staging)
            async with asyncio.TaskGroup() as group:
                for _ in range(min(CREDITS, len(self._manifest.chunks))):
                    group.create_task(self._take_chunks(connection))
        except BaseExceptionGroup as failed:
            raise self._refusal or failed.exceptions[0] from None
        finally:
            await run_in_thread(self._hashers, free_all, self._device, self._staging)
        unverified = [
            piece.name
            for piece, check in zip(self._manifest.slices, self._checks, strict=True)
            if not check.verified
        ]
        if unverified:
            raise self._mismatch(unverified[0], "missing", "")

    async def _take_chunks(self, connection: Connection) -> None:
        """Take chunks one after another until none is left; several of these run side by side."""
        while (index := next(self._next_chunk)) < len(self._manifest.chunks):
            chunk = self._manifest.chunks[index]
            staging = self._staging.pop() if len(chunk.extents) > 1 else None
            try:
                await self._take_chunk(connection, index, chunk, staging)
            except DigestMismatch as error:
                # The streamer hangs up once it has read this; that may end another task, and
                # through it this one, before it is raised.
                self._refusal = self._refusal or error
                await _refuse(connection, error)
                raise
            finally:
                if staging is not None:
                    self._staging.append(staging)
            self.done_bytes += chunk.nbytes
            await connection.send(wire.TAG_CREDIT, bytearray(wire.encode_credit(index)))

    def _allocate_staging(self) -> None:
        """Allocate one buffer for every bundle that can be on its way at once."""
        bundles = sum(len(chunk.extents) > 1 for chunk in self._manifest.chunks)
        for _ in range(min(CREDITS, bundles)):
            self._staging.append(self._device.allocate(largest_bundle_bytes(self._manifest.chunks)))

    async def _take_chunk(
        self, connection: Connection, index: int, chunk: Chunk, staging: Buffer | None
    ) -> None:
        if chunk.nbytes:
            if len(chunk.extents) == 1:
                (extent,) = chunk.extents
                buffer, offset = self._buffers[extent.slice_index], extent.offset
            else:
                assert staging is not None
                buffer, offset = staging, 0
            window = self._device.window(buffer, offset, chunk.nbytes)
            await connection.recv(wire.chunk_tag(index), window)
        landed = await run_in_thread(self._hashers, self._land, chunk, staging)
        for extent, hashes in zip(chunk.extents, landed, strict=True):
            self._checks[extent.slice_index].add(extent.offset, hashes)
        ended = [extent.slice_index for extent in chunk.extents if self._ends_slice(extent)]
        if ended:
            record = bytearray(digest.DIGEST_BYTES * len(ended))
            await connection.recv(wire.end_tag(index), record)
            for position, slice_index in enumerate(ended):
                start = position * digest.DIGEST_BYTES
                self._checks[slice_index].expected = bytes(
                    record[start : start + digest.DIGEST_BYTES]
                )
        for extent in chunk.extents:
            self._compare(extent.slice_index)

    def _ends_slice(self, extent: Extent) -> bool:
        piece = self._manifest.slices[extent.slice_index]
        return extent.offset + extent.length == piece.wire_bytes

    def _land(self, chunk: Chunk, staging: Buffer | None) -> list[bytes]:
        """Move a bundle's extents to their buffers; return the hashes of what the buffers hold."""
        position = 0
        copies, spans = [], []
        for extent in chunk.extents:
            buffer = self._buffers[extent.slice_index]
            if len(chunk.extents) > 1:
                assert staging is not None
                copies.append(Copy(staging, position, buffer, extent.offset, extent.length))
                position += extent.length
            end = extent.offset + extent.length
            if self._ends_slice(extent):
                # The zero rows belong to the digest.
                end = self._manifest.slices[extent.slice_index].nbytes
            spans.append(Span(buffer, extent.offset, end - extent.offset))
        self._device.copy(copies)
        return self._device.block_hashes(spans)

    def _compare(self, slice_index: int) -> None:
        """Compare a slice's digests as soon as both are there."""
        piece, check = self._manifest.slices[slice_index], self._checks[slice_index]
        if check.expected is None or check.missing_blocks or check.verified:
            return
        hashes = b"".join(check.parts[offset] for offset in sorted(check.parts))
        landed = digest.combine(hashes, piece.nbytes, piece.dtype, piece.shape)
        if landed != check.expected:
            raise self._mismatch(piece.name, check.expected.hex(), landed.hex())
        check.verified = True
        check.parts.clear()

    def _mismatch(self, name: str, expected: str, landed: str) -> DigestMismatch:
        return DigestMismatch(
            f"tensor {name!r} on rank {self._manifest.rank}: the landed bytes are not the bytes that "
            "were read",
            tensor=name,
            rank=self._manifest.rank,
            expected=expected,
            landed=landed,
        )


class _SliceCheck:
    """Landed hashes and expected digest of one slice."""

    __slots__ = ("expected", "missing_blocks", "parts", "verified")

    def __init__(self, nbytes: int) -> None:
        self.parts: dict[int, bytes] = {}
        self.missing_blocks = digest.block_count(nbytes)
        self.expected: bytes | None = None
        self.verified = False

    def add(self, offset: int, hashes: bytes) -> None:
        """Take the hashes of the blocks that start at `offset`."""
        self.parts[offset] = hashes
        self.missing_blocks -= len(hashes) // digest.HASH_BYTES


def free_all(device: Device, buffers: list[Buffer]) -> None:
    """Free and forget every buffer; what cannot be freed is logged. Runs in a thread."""
    while buffers:
        try:
            device.free(buffers.pop())
        except Exception:  # noqa: BLE001 - one bad buffer must not keep the others
            _log.exception("a buffer could not be freed")


async def _refuse(connection: Connection, error: LoaderError) -> None:
    """Tell the streamer why the load ends here, and give it time to hear it."""
    with contextlib.suppress(PeerLostError, TimeoutError):
        await connection.send(wire.TAG_VERDICT, bytearray(wire.encode_verdict(error)))
        # Dropping the connection at once could overtake the verdict; the streamer drops it first.
        async with asyncio.timeout(REFUSAL_SECONDS):
            await connection.recv(wire.TAG_CLOSED, bytearray(1))
