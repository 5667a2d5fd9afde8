"""Sending one load: read a step, hash it, send every rank its chunk, for all steps."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

from loader_kernels import digest
from loader_service.errors import LoaderError, WorkerLost
from loader_service.plan.slices import Slice
from loader_service.stream import wire
from loader_service.stream.chunks import Chunk, plan_steps, rank_chunks
from loader_service.stream.feed import Feed
from loader_service.stream.jobs import RankEndpoint, StartStream
from loader_service.stream.payloads import Payload, step_payloads
from loader_service.stream.reader import OpenFiles
from loader_service.stream.threads import run_in_thread
from loader_service.stream.transport import Connection, PeerLostError, Transport

__all__ = ["LoadSender"]

CONNECT_TIMEOUT_SECONDS = 5.0

MOST_CREDITS = 64
"""Credits that are waited for at once, whatever the worker grants."""

_Result = TypeVar("_Result")


class LoadSender:
    """Streams one plan to its ranks. `run` does everything and cleans up after itself.

    Cancelling `run` drops the connections; no thread reads and no buffer is in use when it returns.
    """

    def __init__(
        self, job: StartStream, transport: Transport, feed: Feed, readers: Executor
    ) -> None:
        """Prepare the steps; nothing is opened yet.

        Args:
            job: what to send, and where.
            transport: how.
            feed: makes the chunks.
            readers: threads that open files.
        """
        self._job = job
        self._transport = transport
        self._feed = feed
        self._readers = readers
        self._steps = plan_steps(job.plan, job.chunk_bytes)
        self._digests = {
            id(piece): _SliceDigest(piece) for tensor in job.plan.tensors for piece in tensor.slices
        }
        self._opened: dict[int, _RankLink] = {}
        self._links: list[_RankLink] = []

    @property
    def done_bytes(self) -> tuple[int, ...]:
        """Payload bytes of each rank that have landed and been hashed there."""
        return tuple(link.done_bytes for link in self._links) or (0,) * self._job.plan.tp

    @property
    def verified(self) -> tuple[bool, ...]:
        """Ranks whose worker has verified every slice."""
        return tuple(link.verified for link in self._links) or (False,) * self._job.plan.tp

    async def run(self, connected: Callable[[tuple[str, ...]], Awaitable[None]]) -> None:
        """Send everything and return once every rank has verified it.

        Args:
            connected: called with each rank's data lanes when all ranks have let us in.

        Raises:
            LoaderError: the first thing that went wrong; WorkerLost for a broken connection.
        """
        opened: list[OpenFiles] = []

        def open_files() -> OpenFiles:
            opened.append(OpenFiles(self._job.plan.files))
            return opened[0]

        try:
            # A cancel while the thread opens them loses its result, but not the list.
            files = await run_in_thread(self._readers, open_files)
            await _first_error(
                [
                    self._open_link(rank, endpoint)
                    for rank, endpoint in enumerate(self._job.endpoints)
                ]
            )
            self._links = [link for _, link in sorted(self._opened.items())]
            await connected(tuple(link.lanes for link in self._links))
            await _first_error(
                [self._send_steps(files)]
                + [link.take_credits() for link in self._links]
                + [link.take_verdict() for link in self._links]
            )
            await run_in_thread(self._readers, files.check_unchanged)
        finally:
            for link in self._opened.values():
                link.abort()
            for files in opened:
                files.close()

    async def _open_link(self, rank: int, endpoint: RankEndpoint) -> None:
        chunks = rank_chunks(self._steps, rank)
        self._opened[rank] = await _RankLink.open(self._transport, rank, endpoint, chunks)

    async def _send_steps(self, files: OpenFiles) -> None:
        next_index = [0] * len(self._links)
        served = [rank for rank, end in enumerate(self._job.endpoints) if not end.reads_itself]
        ahead = asyncio.Semaphore(self._feed.steps_at_once)

        def release(slots: list[Any], _: asyncio.Task[None]) -> None:
            self._feed.release(slots)
            ahead.release()

        async with asyncio.TaskGroup() as group:
            for step in self._steps:
                indices = tuple(next_index)
                for rank, chunk in enumerate(step.chunks):
                    next_index[rank] += chunk is not None
                payloads = step_payloads(step, self._job.plan.tensors, served)
                if not payloads:
                    continue
                size = self._job.chunk_bytes
                await ahead.acquire()
                slots = await self._feed.acquire(size, sum(p.nbytes > 0 for p in payloads))
                sending = group.create_task(self._send_step(files, payloads, indices, slots))
                # Not in the task itself: one that is cancelled before its first step runs nothing.
                sending.add_done_callback(functools.partial(release, slots))

    async def _send_step(
        self,
        files: OpenFiles,
        payloads: list[Payload],
        indices: Sequence[int],
        slots: list[Any],
    ) -> None:
        spare = list(slots)
        for payload in payloads:
            payload.slot = spare.pop() if payload.nbytes else None
        places = [place for payload in payloads for place in payload.places()]
        for part in await self._feed.fill(files, self._job.plan.tensors, places):
            self._digests[id(part.piece)].add(part.begin, part.hashes)
        async with asyncio.TaskGroup() as group:
            for payload in payloads:
                for rank in payload.ranks:
                    group.create_task(self._send_chunk(rank, indices[rank], payload))

    async def _send_chunk(self, rank: int, index: int, payload: Payload) -> None:
        link = self._links[rank]
        await link.wait_for_credit(index)
        if payload.nbytes:
            await link.send(wire.chunk_tag(index), self._feed.view(payload.slot, payload.nbytes))
        ended = [
            self._digests[id(piece)]
            for piece, extent in payload.parts
            if extent.offset + extent.length == piece.wire_bytes
        ]
        if ended:
            record = b"".join([await slice_digest.value() for slice_digest in ended])
            await link.send(wire.end_tag(index), bytearray(record))


class _SliceDigest:
    """Expected digest of one slice, from the hashes of its parts in any order."""

    def __init__(self, piece: Slice) -> None:
        self._piece = piece
        self._missing = digest.block_count(piece.nbytes)
        self._parts: dict[int, bytes] = {}
        self._complete = asyncio.Event()

    def add(self, offset: int, hashes: bytes) -> None:
        """Take the block hashes of the part that starts at `offset`."""
        self._parts[offset] = hashes
        self._missing -= len(hashes) // digest.HASH_BYTES
        if not self._missing:
            self._complete.set()

    async def value(self) -> bytes:
        """Return the digest, once all parts are there."""
        await self._complete.wait()
        hashes = b"".join(self._parts[offset] for offset in sorted(self._parts))
        return digest.combine(hashes, self._piece.nbytes, self._piece.dtype, self._piece.shape)


class _RankLink:
    """The connection to one rank, its credits and how far it has come."""

    def __init__(
        self, connection: Connection, rank: int, worker_id: str, chunks: list[Chunk], credits: int
    ) -> None:
        self._connection = connection
        self._rank = rank
        self._worker_id = worker_id
        self._chunks = chunks
        self._most_credits = min(credits, MOST_CREDITS)
        self._first_barred = credits
        self._barred: dict[int, asyncio.Future[None]] = {}
        self.done_bytes = 0
        self.verified = False

    @classmethod
    async def open(
        cls, transport: Transport, rank: int, endpoint: RankEndpoint, chunks: list[Chunk]
    ) -> _RankLink:
        """Connect and exchange hello and welcome."""
        welcome = bytearray(wire.WELCOME_BYTES)
        try:
            connection = await transport.connect(
                endpoint.host, endpoint.port, CONNECT_TIMEOUT_SECONDS
            )
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                    await connection.send(
                        wire.TAG_HELLO, bytearray(wire.encode_hello(endpoint.token))
                    )
                    await connection.recv(wire.TAG_WELCOME, welcome)
                credits = wire.decode_welcome(bytes(welcome))
            except BaseException:
                connection.abort()
                raise
        except (PeerLostError, wire.ProtocolError, TimeoutError) as error:
            raise _worker_lost(endpoint.worker_id, rank, error) from error
        return cls(connection, rank, endpoint.worker_id, chunks, credits)

    @property
    def lanes(self) -> str:
        """What carries this rank's data."""
        return self._connection.lanes

    async def wait_for_credit(self, index: int) -> None:
        """Wait until chunk number `index` may be on the way; the worker takes chunks in order.

        Credits belong to the earliest chunks: one that a later chunk had taken would be missing to
        those before it, which the worker waits for.
        """
        if index >= self._first_barred:
            self._barred[index] = asyncio.get_running_loop().create_future()
            await self._barred[index]

    async def send(self, tag: int, buffer: memoryview | bytearray) -> None:
        """Send one message."""
        try:
            await self._connection.send(tag, buffer)
        except PeerLostError as error:
            raise _worker_lost(self._worker_id, self._rank, error) from error

    async def take_credits(self) -> None:
        """Take the credit of every chunk.

        Several are waited for at once: from a message's arrival to its task takes a millisecond or
        two, in which a fast link carries more than one chunk.
        """
        waiting = iter(range(len(self._chunks)))
        async with asyncio.TaskGroup() as group:
            for _ in range(self._most_credits):
                group.create_task(self._take_some_credits(waiting))

    async def _take_some_credits(self, waiting: Iterator[int]) -> None:
        message = bytearray(wire.CREDIT_BYTES)
        for _ in waiting:
            await self._recv(wire.TAG_CREDIT, message)
            index = wire.decode_credit(bytes(message))
            if not 0 <= index < len(self._chunks):
                raise _worker_lost(
                    self._worker_id, self._rank, wire.ProtocolError(f"credit for chunk {index}")
                )
            self.done_bytes += self._chunks[index].nbytes
            allowed = self._barred.pop(self._first_barred, None)
            self._first_barred += 1
            if allowed is not None and not allowed.done():
                allowed.set_result(None)

    async def take_verdict(self) -> None:
        """Take the worker's verdict; raise what it says."""
        message = bytearray(wire.VERDICT_BYTES)
        await self._recv(wire.TAG_VERDICT, message)
        try:
            error = wire.decode_verdict(bytes(message))
        except wire.ProtocolError as broken:
            raise _worker_lost(self._worker_id, self._rank, broken) from broken
        if error is not None:
            raise error
        self.verified = True

    def abort(self) -> None:
        """Drop the connection."""
        self._connection.abort()

    async def _recv(self, tag: int, buffer: bytearray) -> None:
        try:
            await self._connection.recv(tag, buffer)
        except PeerLostError as error:
            raise _worker_lost(self._worker_id, self._rank, error) from error


def _worker_lost(worker_id: str, rank: int, error: Exception) -> WorkerLost:
    return WorkerLost(
        f"worker {worker_id!r} (rank {rank}) is gone from the data plane: {error}",
        worker_id=worker_id,
        rank=rank,
    )


async def _first_error(work: Sequence[Awaitable[_Result]]) -> list[_Result]:
    """Run `work` together; the first failure cancels the rest and is raised by itself.

    What a worker said of its own failure goes before the broken connections that follow from it.
    """

    async def wait_for(awaitable: Awaitable[_Result]) -> _Result:
        return await awaitable

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(wait_for(awaitable)) for awaitable in work]
    except BaseExceptionGroup as failed:
        errors = list(_leaves(failed))
        told = [
            error
            for error in errors
            if isinstance(error, LoaderError) and not isinstance(error, WorkerLost)
        ]
        raise (told or errors)[0] from None
    return [task.result() for task in tasks]


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return leaves
