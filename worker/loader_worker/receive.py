"""Receiving one rank's slices: chunks arrive in the tensors' own buffers and are hashed and compared there."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from concurrent.futures import Executor

from loader_kernels import digest
from loader_kernels.device import Buffer, Device
from loader_service.errors import DigestMismatch, LoaderError
from loader_service.stream import wire
from loader_service.stream.chunks import CREDITS, Chunk
from loader_service.stream.threads import run_in_thread
from loader_service.stream.transport import Connection, PeerLostError
from loader_worker.arrivals import Landed, LocalFiles, ReadChunks, SentChunks
from loader_worker.manifest import Manifest

__all__ = ["Receiver"]

REFUSAL_SECONDS = 1.0
"""How long a refused peer may take to read why before the connection is dropped."""


class Receiver:
    """Fills the buffers of one manifest and verifies every slice.

    The connection brings the chunks, or with `local` the worker reads them itself and the connection
    carries only what the streamer hears of it. Cancelling `run` aborts the connection; nothing writes to
    the buffers when it returns.
    """

    def __init__(
        self,
        manifest: Manifest,
        buffers: Sequence[Buffer],
        device: Device,
        hashers: Executor,
        local: LocalFiles | None = None,
    ) -> None:
        """Prepare to receive.

        Args:
            manifest: slices and chunks.
            buffers: one per slice, zero rows already zeroed; owned by the caller.
            device: device that the buffers are on.
            hashers: threads that call the device, which can block: they allocate, hash, copy and free.
            local: files to read the slices from.
        """
        self._manifest = manifest
        self._buffers = buffers
        self._device = device
        self._hashers = hashers
        self._local = local
        self._checks = [_SliceCheck(piece.nbytes) for piece in manifest.slices]
        self._next_chunk = itertools.count()
        self._refusal: LoaderError | None = None
        self.done_bytes = 0
        """Payload bytes that have landed and been hashed."""

    async def run(self, connection: Connection) -> None:
        """Receive and verify everything.

        Raises:
            PeerLostError: the connection is gone.
            DigestMismatch: a slice's landed bytes are not the ones that were read.
            LoaderError: what reading raises, see `read_tensor`.
        """
        await connection.send(wire.TAG_WELCOME, bytearray(wire.encode_welcome(CREDITS)))
        chunks = self._arrivals(connection)
        try:
            await run_in_thread(self._hashers, chunks.open)
            async with asyncio.TaskGroup() as group:
                for _ in range(min(CREDITS, len(self._manifest.chunks))):
                    group.create_task(self._take_chunks(connection, chunks))
            await run_in_thread(self._hashers, chunks.check)
        except BaseExceptionGroup as failed:
            raise self._refusal or failed.exceptions[0] from None
        except LoaderError as error:
            await _refuse(connection, error)
            raise
        finally:
            await run_in_thread(self._hashers, chunks.close)
        unverified = [
            piece.name
            for piece, check in zip(self._manifest.slices, self._checks, strict=True)
            if not check.verified
        ]
        if unverified:
            raise self._mismatch(unverified[0], "missing", "")

    def _arrivals(self, connection: Connection) -> SentChunks | ReadChunks:
        if self._local is not None:
            return ReadChunks(self._manifest, self._buffers, self._device, self._local)
        return SentChunks(self._manifest, self._buffers, self._device, self._hashers, connection)

    async def _take_chunks(self, connection: Connection, chunks: SentChunks | ReadChunks) -> None:
        """Take chunks one after another until none is left; several of these run side by side."""
        while (index := next(self._next_chunk)) < len(self._manifest.chunks):
            chunk = self._manifest.chunks[index]
            try:
                self._check(chunk, await chunks.take(index, chunk))
            except LoaderError as error:
                # The streamer hangs up once it has read this; that may end another task, and
                # through it this one, before it is raised.
                if self._refusal is None:
                    self._refusal = error
                    await _refuse(connection, error)
                raise
            self.done_bytes += chunk.nbytes
            await connection.send(wire.TAG_CREDIT, bytearray(wire.encode_credit(index)))

    def _check(self, chunk: Chunk, landed: Landed) -> None:
        """Compare the digests of slices as soon as both are there."""
        for extent, hashes in zip(chunk.extents, landed.hashes, strict=True):
            self._checks[extent.slice_index].add(extent.offset, hashes)
        for slice_index, expected in landed.expected.items():
            self._checks[slice_index].expected = expected
        for extent in chunk.extents:
            self._compare(extent.slice_index)

    def _compare(self, slice_index: int) -> None:
        piece, check = self._manifest.slices[slice_index], self._checks[slice_index]
        if check.missing_blocks or check.verified:
            return
        if self._local is None:
            if check.expected is None:
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


async def _refuse(connection: Connection, error: LoaderError) -> None:
    """Tell the streamer why the load ends here, and give it time to hear it."""
    with contextlib.suppress(PeerLostError, TimeoutError):
        await connection.send(wire.TAG_VERDICT, bytearray(wire.encode_verdict(error)))
        # Dropping the connection at once could overtake the verdict; the streamer drops it first.
        async with asyncio.timeout(REFUSAL_SECONDS):
            await connection.recv(wire.TAG_CLOSED, bytearray(1))
