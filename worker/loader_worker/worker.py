"""The worker's state: one device, one store, at most one load."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from loader_kernels.device import Device
from loader_service.errors import LoadNotFound, WorkerBusy
from loader_service.serving.status import failure_message
from loader_service.stream.threads import run_in_thread
from loader_service.stream.transport import Transport
from loader_service.v1 import coordinator_pb2, types_pb2, worker_pb2
from loader_service.v1.types_pb2 import WorkerLoadState
from loader_worker.manifest import Manifest
from loader_worker.session import LoadSession
from loader_worker.store import WeightStore

__all__ = ["Worker"]

_log = logging.getLogger(__name__)

_MAX_READERS = 16
"""Threads that read files: more bring nothing, see `stream/filling.py`."""


class Worker:
    """Prepares, commits and ends loads on one device. Used from one event loop."""

    def __init__(
        self,
        worker_id: str,
        device: Device,
        transport: Transport,
        model_root: Path | None = None,
    ) -> None:
        """Start empty.

        Args:
            worker_id: name of the worker, kept across restarts.
            device: device that the weights go to.
            transport: data plane.
            model_root: folder outside of which this worker reads no file, links resolved.
        """
        self.worker_id = worker_id
        self.incarnation = uuid.uuid4().hex
        self.device = device
        self.store = WeightStore(device)
        self._transport = transport
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="device")
        """Threads for blocking work on the device."""
        self._readers = ThreadPoolExecutor(
            min(_MAX_READERS, os.cpu_count() or 1), thread_name_prefix="reader"
        )
        self._model_root = model_root
        self._session: LoadSession | None = None
        self._registered_until = 0.0
        # Prepare, commit and abort change what the worker holds; one at a time.
        self._changing = asyncio.Lock()

    async def prepare(self, manifest: Manifest) -> LoadSession:
        """Get ready to receive `manifest`; repeating it before a chunk has landed is harmless.

        Returns:
            The session, whose `door` the streamer is to come through.

        Raises:
            WorkerBusy: another load is here.
            OutOfMemory: the slices do not fit.
            LocalSourceUnavailable: the worker must read for itself and cannot.
        """
        async with self._changing:
            await self._drop_failed()
            if self._session is not None and self._session.awaits(manifest):
                return self._session
            if self._session is not None:
                held = self._session.manifest.load_id
                raise WorkerBusy(
                    f"worker {self.worker_id!r} holds load {held}",
                    worker_id=self.worker_id,
                    load_id=held,
                )
            session = LoadSession(
                manifest,
                self.device,
                self._transport,
                self.threads,
                self._readers,
                self._model_root,
            )
            await session.prepare()
            self._session = session
            _log.info(
                "load %s: prepared %d bytes for rank %d of %d",
                manifest.load_id,
                manifest.resident_bytes,
                manifest.rank,
                manifest.tp,
            )
            return session

    async def commit(self, load_id: str) -> None:
        """Make a verified load visible; repeating it is harmless.

        Raises:
            LoadNotFound: the worker does not hold this load.
            WrongState: the load is not verified.
        """
        async with self._changing:
            session = self._require(load_id)
            session.commit(self.store)
            _log.info("load %s: committed", load_id)

    async def abort(self, load_id: str) -> None:
        """End a load in any state and free what it holds; a load that is not here is fine."""
        async with self._changing:
            if self._session is not None and self._session.manifest.load_id == load_id:
                await self._end(self._session)
                _log.info("load %s: released", load_id)

    async def abort_uncommitted(self) -> None:
        """End a load that is not committed; its coordinator is gone."""
        async with self._changing:
            session = self._session
            if session and session.state != WorkerLoadState.WORKER_LOAD_STATE_COMMITTED:
                await self._end(session)

    async def close(self) -> None:
        """End every load and free everything."""
        async with self._changing:
            if self._session is not None:
                await self._end(self._session)
        self.threads.shutdown()
        self._readers.shutdown()

    def committed(self, load_id: str) -> LoadSession:
        """Return the committed load.

        Raises:
            LoadNotFound: the worker does not hold it, or not committed.
        """
        session = self._require(load_id)
        if session.state != WorkerLoadState.WORKER_LOAD_STATE_COMMITTED:
            raise LoadNotFound(f"load {load_id} is not committed here", load_id=load_id)
        return session

    def contacted(self, lease_seconds: float) -> None:
        """Say that the coordinator has just answered; it counts as there for the time of a lease."""
        self._registered_until = time.monotonic() + lease_seconds

    async def status(self) -> worker_pb2.WorkerStatus:
        """Return what the worker says of itself."""
        return worker_pb2.WorkerStatus(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            device=self.device.name,
            memory=await self.memory(),
            loads=self.loads(),
            registered=time.monotonic() < self._registered_until,
        )

    async def memory(self) -> types_pb2.MemoryUsage:
        """Return the device's memory and the store's part in it."""
        # Asking the device can block; the worker's own threads may have much to do before this.
        memory = await asyncio.to_thread(self.device.memory)
        return types_pb2.MemoryUsage(
            resident_bytes=self.store.resident_bytes(),
            loaded_bytes=self.store.loaded_bytes,
            allocated_bytes=memory.allocated_bytes,
            free_bytes=memory.free_bytes,
            total_bytes=memory.total_bytes,
        )

    def loads(self) -> list[coordinator_pb2.WorkerLoad]:
        """Return what the worker holds or receives."""
        session = self._session
        if session is None:
            return []
        load = coordinator_pb2.WorkerLoad(
            load_id=session.manifest.load_id,
            rank=session.manifest.rank,
            tp=session.manifest.tp,
            state=session.state,
            done_bytes=session.done_bytes,
            transport=session.lanes,
        )
        if session.failure is not None:
            load.failure.CopyFrom(failure_message(session.failure))
        return [load]

    def _require(self, load_id: str) -> LoadSession:
        if self._session is None or self._session.manifest.load_id != load_id:
            raise LoadNotFound(
                f"worker {self.worker_id!r} does not hold load {load_id}",
                load_id=load_id,
                worker_id=self.worker_id,
            )
        return self._session

    async def _drop_failed(self) -> None:
        session = self._session
        if session and session.state == WorkerLoadState.WORKER_LOAD_STATE_FAILED:
            await self._end(session)

    async def _end(self, session: LoadSession) -> None:
        """End a session; a cancelled caller waits until it has ended, for halves are of no use."""
        ending = asyncio.create_task(self._end_uncancelled(session))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await asyncio.wait([ending])
            raise

    async def _end_uncancelled(self, session: LoadSession) -> None:
        await session.abort()
        self._session = None
        try:
            await run_in_thread(self.threads, self.store.release)
        except RuntimeError:
            _log.exception("load %s: a weight could not be freed", session.manifest.load_id)
