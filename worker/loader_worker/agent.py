"""The worker's side of membership: register, keep the lease, obey releases."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable

import grpc

from loader_service.channel import AsyncEndpoint
from loader_service.errors import LoaderError, WorkerNotFound
from loader_service.v1 import coordinator_pb2
from loader_service.version import PROTOCOL_VERSION, __version__
from loader_worker.worker import Worker

__all__ = ["Agent"]

_log = logging.getLogger(__name__)

CALL_SECONDS = 5.0
_RETRY_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0)

_PERMANENT = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ALREADY_EXISTS,
}
"""What the same process would be told for ever. UNAUTHENTICATED and PERMISSION_DENIED are not here:
tokens rotate, and access may be granted later."""

_OWN_FILES = {"FILE_UNREADABLE", "TLS_FILES_INVALID", "TOKEN_INVALID"}
"""Reasons of an INVALID_ARGUMENT that this side raises while its files are being exchanged."""


class Agent:
    """Registers one worker with one coordinator and sends its heartbeats.

    When the coordinator stays away for a whole lease, uncommitted loads end and their memory is
    freed; committed ones stay.
    """

    def __init__(
        self,
        worker: Worker,
        coordinator: AsyncEndpoint,
        address: str,
        on_contact: Callable[[bool], None],
    ) -> None:
        """Speak for `worker`.

        Args:
            worker: whom to speak for.
            coordinator: whom to speak to.
            address: where others reach the worker.
            on_contact: called with True when the worker has become registered, and with False when
                the coordinator does not know it any more or was away for a whole lease.
        """
        self._worker = worker
        self._coordinator = coordinator
        self._address = address
        self._on_contact = on_contact
        self._has_contact = False
        self._is_refused = False
        self._lease_seconds = 0.0
        self._interval_seconds = 0.0

    async def run(self) -> None:
        """Register and send heartbeats until cancelled.

        Raises:
            LoaderError: the coordinator refuses this worker for good, for its version, name or address.
        """
        while True:
            await self._register()
            await self._send_heartbeats()

    async def deregister(self) -> None:
        """Tell the coordinator that the worker stops; an unreachable one does not matter.

        One that has refused this worker does not know it.
        """
        if self._is_refused:
            return
        request = coordinator_pb2.DeregisterWorkerRequest(
            worker_id=self._worker.worker_id, incarnation=self._worker.incarnation
        )
        try:
            await self._coordinator.call("DeregisterWorker", request, 1.0)
        except LoaderError as error:
            _log.info("deregistering: %s", error)

    async def _register(self) -> None:
        request = coordinator_pb2.RegisterWorkerRequest(
            worker_id=self._worker.worker_id,
            incarnation=self._worker.incarnation,
            address=self._address,
            host=socket.gethostname(),
            device=self._worker.device.name,
            protocol_version=PROTOCOL_VERSION,
            package_version=__version__,
        )
        attempt = 0
        last_contact = time.monotonic()
        while True:
            request.memory.CopyFrom(await self._worker.memory())
            del request.loads[:]
            request.loads.extend(self._worker.loads())
            try:
                terms = await self._coordinator.call("RegisterWorker", request, CALL_SECONDS)
                self._interval_seconds = terms.heartbeat_interval.ToTimedelta().total_seconds()
                self._lease_seconds = terms.lease_duration.ToTimedelta().total_seconds()
                _log.info("registered as %s", self._worker.worker_id)
                self._contacted()
                return
            except LoaderError as error:
                if error.status in _PERMANENT and error.reason not in _OWN_FILES:
                    self._is_refused = True
                    raise
                _log.warning("registering: %s", error)
            await self._end_orphans(last_contact)
            await asyncio.sleep(_RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS) - 1)])
            attempt += 1

    async def _send_heartbeats(self) -> None:
        """Send heartbeats until the coordinator does not know this worker any more."""
        last_contact = time.monotonic()
        while True:
            started = time.monotonic()
            try:
                answer = await self._coordinator.call(
                    "Heartbeat", await self._heartbeat(), self._interval_seconds * 2
                )
                last_contact = time.monotonic()
                self._contacted()
            except WorkerNotFound as error:
                _log.info("heartbeat: %s", error)
                self._set_contact(False)
                return
            except LoaderError as error:
                _log.warning("heartbeat: %s", error)
                await self._end_orphans(last_contact)
            else:
                for load_id in answer.release_load_ids:
                    await self._worker.abort(load_id)
            pause = self._interval_seconds - (time.monotonic() - started)
            await asyncio.sleep(max(0.0, pause))

    def _contacted(self) -> None:
        self._worker.contacted(self._lease_seconds)
        self._set_contact(True)

    def _set_contact(self, has_contact: bool) -> None:
        if has_contact != self._has_contact:
            self._has_contact = has_contact
            self._on_contact(has_contact)

    async def _end_orphans(self, last_contact: float) -> None:
        if self._lease_seconds and time.monotonic() - last_contact > self._lease_seconds:
            self._set_contact(False)
            await self._worker.abort_uncommitted()

    async def _heartbeat(self) -> coordinator_pb2.HeartbeatRequest:
        return coordinator_pb2.HeartbeatRequest(
            worker_id=self._worker.worker_id,
            incarnation=self._worker.incarnation,
            memory=await self._worker.memory(),
            loads=self._worker.loads(),
        )
