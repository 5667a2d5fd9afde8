"""One load on a worker: prepared, receiving, verified, committed, or failed."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from concurrent.futures import Executor
from pathlib import Path

from loader_kernels.device import Buffer, Device, DeviceOutOfMemoryError
from loader_service.checkpoint.catalog import CheckpointFile
from loader_service.errors import (
    InternalError,
    LoaderError,
    LocalSourceUnavailable,
    OutOfMemory,
    StreamerLost,
    WrongState,
)
from loader_service.stream import wire
from loader_service.stream.chunks import staging_bytes
from loader_service.stream.jobs import LOCAL_LANES
from loader_service.stream.proof import NotTheSameError, same_file
from loader_service.stream.threads import run_in_thread
from loader_service.stream.transport import Connection, Listener, PeerLostError, Transport
from loader_service.v1.types_pb2 import WorkerLoadState
from loader_worker.arrivals import LocalFiles, free_all
from loader_worker.manifest import Manifest
from loader_worker.receive import Receiver
from loader_worker.store import WeightStore, WeightTensor

__all__ = ["LoadSession"]

_log = logging.getLogger(__name__)

HELLO_SECONDS = 5.0
"""How long a new connection may take to say hello."""


class LoadSession:
    """Owns the buffers of one load until they are committed to the store or freed.

    The device can block, so it is called in `threads` only.
    """

    def __init__(
        self,
        manifest: Manifest,
        device: Device,
        transport: Transport,
        threads: Executor,
        readers: Executor,
        model_root: Path | None = None,
    ) -> None:
        """Describe the load; `prepare` allocates.

        Args:
            manifest: what to keep.
            device: where to keep it.
            transport: data plane.
            threads: threads for blocking work on the device.
            readers: threads that read files, should this worker read for itself.
            model_root: folder that such files must lie in; None allows every place.
        """
        self.manifest = manifest
        self.state = WorkerLoadState.WORKER_LOAD_STATE_PREPARED
        self.failure: LoaderError | None = None
        self.lanes = ""
        self._device = device
        self._transport = transport
        self._threads = threads
        self._readers = readers
        self._model_root = model_root
        self._files: dict[str, CheckpointFile] = {}
        self.not_local_because = ""
        self._buffers: list[Buffer] = []
        self._token = secrets.token_bytes(wire.TOKEN_BYTES)
        self._listener: Listener | None = None
        self._connected: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self._greetings: set[asyncio.Task[None]] = set()
        self._receiver: Receiver | None = None
        self._receiving: asyncio.Task[None] | None = None

    @property
    def done_bytes(self) -> int:
        """Payload bytes that have landed and been hashed."""
        return self._receiver.done_bytes if self._receiver else 0

    @property
    def reads_itself(self) -> bool:
        """Whether the slices are read here; if not, and it was asked for, `not_local_because` says why."""
        return bool(self._files)

    async def prepare(self) -> tuple[int, bytes]:
        """Look for the files, check the memory, allocate every buffer and open the listener.

        Returns:
            (port of the listener, token that the first message must carry).

        Raises:
            OutOfMemory: the slices do not fit; nothing is allocated then.
            LocalSourceUnavailable: the worker must read for itself and cannot.
        """
        if self.manifest.files:
            await run_in_thread(self._readers, self._find_files)
        try:
            await run_in_thread(self._threads, self._allocate)
            self._listener = await self._transport.listen(self._greet_later)
        except BaseException:
            await self._free()
            raise
        local = LocalFiles(self._files, self._readers) if self.reads_itself else None
        self._receiver = Receiver(self.manifest, self._buffers, self._device, self._threads, local)
        self._receiving = asyncio.create_task(self._receive(self._receiver))
        return self.door

    @property
    def door(self) -> tuple[int, bytes]:
        """Port of the listener and the token that opens it; only while the session is prepared."""
        assert self._listener is not None
        return self._listener.port, self._token

    def awaits(self, manifest: Manifest) -> bool:
        """Whether this very manifest is prepared and nobody has connected yet."""
        return (
            self.state == WorkerLoadState.WORKER_LOAD_STATE_PREPARED
            and self._listener is not None
            and self.manifest == manifest
        )

    def commit(self, store: WeightStore) -> None:
        """Hand the verified slices to `store`; repeating it is harmless.

        Raises:
            WrongState: the load is not verified.
        """
        if self.state == WorkerLoadState.WORKER_LOAD_STATE_COMMITTED:
            return
        if self.state != WorkerLoadState.WORKER_LOAD_STATE_VERIFIED:
            name = WorkerLoadState.Name(self.state).removeprefix("WORKER_LOAD_STATE_")
            raise WrongState(
                f"load {self.manifest.load_id} is {name} here, not VERIFIED",
                load_id=self.manifest.load_id,
                state=name,
            )
        tensors = [
            WeightTensor(
                piece.name, piece.dtype, piece.shape, buffer, piece.padding_rows, piece.aliases
            )
            for piece, buffer in zip(self.manifest.slices, self._buffers, strict=True)
        ]
        store.publish(tensors, self.manifest.rank, self.manifest.tp)
        self._buffers = []
        self.state = WorkerLoadState.WORKER_LOAD_STATE_COMMITTED
        self._disconnect()

    async def abort(self) -> None:
        """End the load unless it is committed, and free what it holds; raises nothing of its own."""
        if self._receiving is not None and not self._receiving.done():
            self._receiving.cancel()
            await asyncio.wait([self._receiving])
        self._disconnect()
        await self._free()

    def _find_files(self) -> None:
        """Decide whether to read the slices here: all of the files must be the ones that were planned."""
        try:
            self._files = {
                proof.name: same_file(proof, self._model_root) for proof in self.manifest.files
            }
        except NotTheSameError as error:
            if self.manifest.must_be_local:
                raise LocalSourceUnavailable(
                    f"rank {self.manifest.rank} is to read for itself, but {error}",
                    rank=self.manifest.rank,
                ) from error
            _log.info("load %s: not read here: %s", self.manifest.load_id, error)
            self.not_local_because = str(error)

    def _allocate(self) -> None:
        """Allocate every buffer, or raise; the caller frees."""
        wanted = self.manifest.resident_bytes
        if not self.reads_itself:
            wanted += staging_bytes(self.manifest.chunks)
        free = self._device.memory().free_bytes
        if wanted > free:
            raise self._out_of_memory(wanted, free)
        try:
            for piece in self.manifest.slices:
                buffer = self._device.allocate(piece.nbytes)
                self._buffers.append(buffer)
                self._device.zero(buffer, piece.wire_bytes, piece.nbytes - piece.wire_bytes)
        except DeviceOutOfMemoryError as error:
            raise self._out_of_memory(error.wanted_bytes, error.free_bytes) from error

    def _out_of_memory(self, wanted: int, free: int) -> OutOfMemory:
        return OutOfMemory(
            f"rank {self.manifest.rank} needs {wanted} bytes on {self._device.name}, {free} are free",
            rank=self.manifest.rank,
            wanted_bytes=wanted,
            free_bytes=free,
        )

    def _greet_later(self, connection: Connection) -> None:
        task = asyncio.create_task(self._greet(connection))
        self._greetings.add(task)
        task.add_done_callback(self._greetings.discard)

    async def _greet(self, connection: Connection) -> None:
        """Let the first connection in that knows the token; drop every other."""
        hello = bytearray(wire.HELLO_BYTES)
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                await connection.recv(wire.TAG_HELLO, hello)
            token = wire.decode_hello(bytes(hello))
        except (PeerLostError, TimeoutError, wire.ProtocolError) as error:
            _log.warning("load %s: dropped a connection: %s", self.manifest.load_id, error)
            connection.abort()
            return
        if not hmac.compare_digest(token, self._token) or self._connected.done():
            _log.warning("load %s: dropped a connection without the token", self.manifest.load_id)
            connection.abort()
            return
        self._connected.set_result(connection)

    async def _receive(self, receiver: Receiver) -> None:
        try:
            connection = await self._connected
            self._close_listener()
            self.state = WorkerLoadState.WORKER_LOAD_STATE_RECEIVING
            self.lanes = LOCAL_LANES if self.reads_itself else connection.lanes
            await receiver.run(connection)
            self.state = WorkerLoadState.WORKER_LOAD_STATE_VERIFIED
            # Who has read the verdict may hang up before we learn that it arrived. Who has not calls
            # the worker lost, and the coordinator ends the load here.
            with contextlib.suppress(PeerLostError):
                await connection.send(wire.TAG_VERDICT, bytearray(wire.encode_verdict(None)))
        except PeerLostError as error:
            await self._fail(StreamerLost(f"the connection to the streamer broke: {error}"))
        except LoaderError as error:
            await self._fail(error)
        except Exception as error:  # noqa: BLE001 - the boundary of a load: the worker itself goes on
            _log.exception("load %s failed", self.manifest.load_id)
            await self._fail(InternalError(f"receiving failed: {type(error).__name__}: {error}"))

    async def _fail(self, error: LoaderError) -> None:
        _log.warning("load %s failed: %s", self.manifest.load_id, error)
        self._disconnect()
        await self._free()
        self.failure = error
        self.state = WorkerLoadState.WORKER_LOAD_STATE_FAILED

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _disconnect(self) -> None:
        self._close_listener()
        for greeting in self._greetings:
            greeting.cancel()
        if self._connected.done() and not self._connected.cancelled():
            self._connected.result().abort()

    async def _free(self) -> None:
        await run_in_thread(self._threads, free_all, self._device, self._buffers)
