"""The coordinator's state: workers, loads, and what happens to one when the other is lost."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Coroutine, Sequence

from loader_service.checkpoint.catalog import Checkpoint
from loader_service.checkpoint.files import read_checkpoint
from loader_service.clock import Clock
from loader_service.coordinator.record import LoadRecord, is_terminal
from loader_service.coordinator.registry import WorkerRecord, WorkerRegistry
from loader_service.coordinator.runner import LoadRequest, LoadRunner, Stream
from loader_service.coordinator.settings import Settings
from loader_service.coordinator.worker_client import ConnectWorker
from loader_service.errors import (
    InvalidRequest,
    LoadCancelled,
    LoaderError,
    LoadNotFound,
    StreamerLost,
    WorkerLost,
    WorkersUnavailable,
    from_fields,
)
from loader_service.plan.planner import MAX_TP, PlanOptions
from loader_service.v1 import coordinator_pb2
from loader_service.v1.types_pb2 import LoadState, WorkerLoadState

__all__ = ["Coordinator"]

_log = logging.getLogger(__name__)

KEPT_LOADS = 1000
"""Ended loads that stay listed; older ones are forgotten."""


class Coordinator:
    """Registers workers, starts loads, and ends those whose workers are lost."""

    def __init__(
        self, settings: Settings, clock: Clock, connect: ConnectWorker, stream: Stream
    ) -> None:
        """Start without workers and loads.

        Args:
            settings: what the operator chose.
            clock: time.
            connect: opens a client for a worker.
            stream: runs a job in the streamer.
        """
        self.settings = settings
        self.registry = WorkerRegistry(settings.lease_seconds)
        self._clock = clock
        self._connect = connect
        self._stream = stream
        self._runners: OrderedDict[str, LoadRunner] = OrderedDict()
        self._requests: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._worker_freed = asyncio.Event()

    # Workers

    def register(self, request: coordinator_pb2.RegisterWorkerRequest) -> None:
        """Take a worker in; an earlier life of it is lost with its load."""
        lost_load = self.registry.register(request, self._clock.monotonic(), self._clock.time())
        _log.info("worker %s registered at %s", request.worker_id, request.address)
        self._lose_rank(lost_load, request.worker_id, "was started again")
        self._announce_worker()

    def heartbeat(self, request: coordinator_pb2.HeartbeatRequest) -> list[str]:
        """Renew a lease; return the loads that the worker must give up."""
        record = self.registry.heartbeat(request, self._clock.monotonic(), self._clock.time())
        release = []
        for load in request.loads:
            runner = self._runners.get(load.load_id)
            if runner is None or is_terminal(runner.record.state):
                release.append(load.load_id)
            elif load.state == WorkerLoadState.WORKER_LOAD_STATE_FAILED:
                reported = load.failure
                failure = from_fields(reported.reason, reported.message, reported.metadata)
                # A worker that lost the streamer only sees what follows from the first cause.
                if not isinstance(failure, StreamerLost):
                    runner.fail(failure)
        if not record.load_id:
            self._announce_worker()
        return release

    def deregister(self, worker_id: str, incarnation: str) -> None:
        """Forget a worker that stops; its load is lost with it."""
        lost_load = self.registry.deregister(worker_id, incarnation)
        _log.info("worker %s left", worker_id)
        self._lose_rank(lost_load, worker_id, "has stopped")

    async def watch_leases(self) -> None:
        """Find lost workers, for ever."""
        while True:
            await asyncio.sleep(self.settings.heartbeat_seconds / 4)
            for worker in self.registry.expire(self._clock.monotonic()):
                _log.warning("worker %s: the lease ran out", worker.worker_id)
                self._lose_rank(worker.load_id, worker.worker_id, "let its lease run out")

    def _lose_rank(self, load_id: str, worker_id: str, how: str) -> None:
        runner = self._runners.get(load_id)
        if runner is None:
            return
        if runner.record.state == LoadState.LOAD_STATE_SUCCEEDED:
            _log.warning("load %s is degraded: worker %s %s", load_id, worker_id, how)
            runner.record.move_to(LoadState.LOAD_STATE_DEGRADED)
            return
        runner.fail(WorkerLost(f"worker {worker_id!r} {how}", worker_id=worker_id))

    def _announce_worker(self) -> None:
        self._worker_freed.set()
        self._worker_freed = asyncio.Event()

    # Checkpoints

    def read(self, path: str, allow_trailing_bytes: bool) -> Checkpoint:
        """Read a checkpoint's metadata under the operator's limits; blocking."""
        return read_checkpoint(
            path,
            self.settings.model_root,
            max_header_bytes=self.settings.max_header_bytes,
            allow_trailing_bytes=allow_trailing_bytes,
        )

    # Loads

    def start(
        self,
        path: str,
        tp: int,
        worker_ids: Sequence[str],
        wait_seconds: float,
        options: PlanOptions,
        allow_trailing_bytes: bool,
        request_id: str,
    ) -> LoadRecord:
        """Accept a load and begin it.

        Raises:
            InvalidRequest: a field makes no sense.
            LoaderError: the workers cannot be had, and nobody wants to wait.
        """
        known = self._runners.get(self._requests.get(request_id, ""))
        if known is not None:
            return known.record
        if not path:
            raise InvalidRequest("path is missing", field="path")
        if not 1 <= tp <= MAX_TP:
            raise InvalidRequest(f"tp must be between 1 and {MAX_TP}, not {tp}", field="tp")
        if wait_seconds < 0:
            raise InvalidRequest("the time to wait is negative", field="wait_for_workers_duration")
        load_id = f"load-{secrets.token_hex(4)}"
        group = None if wait_seconds else self.registry.reserve(load_id, tp, worker_ids)

        async def choose_group() -> Sequence[WorkerRecord]:
            return group or await self._wait_for_group(load_id, tp, worker_ids, wait_seconds)

        record = LoadRecord(load_id, path, tp, self._clock)
        request = LoadRequest(
            read=lambda: self.read(path, allow_trailing_bytes),
            tp=tp,
            options=options,
            window_bytes=self.settings.window_bytes,
            lease_seconds=self.settings.lease_seconds,
        )
        runner = LoadRunner(record, request, choose_group, self._connect, self._stream)
        self._runners[load_id] = runner
        if request_id:
            self._requests[request_id] = load_id
        self._start(self._run(runner))
        return record

    def get(self, load_id: str) -> LoadRecord:
        """Return a load.

        Raises:
            LoadNotFound: there is none of this name.
        """
        return self._require(load_id).record

    def all(self) -> list[LoadRecord]:
        """Return the loads, newest first."""
        return [runner.record for runner in reversed(self._runners.values())]

    async def cancel(self, load_id: str) -> LoadRecord:
        """End a load that is not committed, and return when it has ended.

        Raises:
            LoadNotFound: there is none of this name.
            WrongState: it is committed, or has ended.
        """
        runner = self._require(load_id)
        runner.record.check_can_cancel()
        runner.fail(LoadCancelled(f"load {load_id} was cancelled", load_id=load_id))
        await runner.record.wait_until_settled()
        return runner.record

    async def unload(self, load_id: str) -> LoadRecord:
        """Give a committed load back, and return when it is done; repeating it is harmless.

        Raises:
            LoadNotFound: there is none of this name.
            WrongState: it is not committed, or has ended otherwise.
        """
        runner = self._require(load_id)
        record = runner.record
        if record.state not in (LoadState.LOAD_STATE_UNLOADING, LoadState.LOAD_STATE_UNLOADED):
            record.move_to(LoadState.LOAD_STATE_UNLOADING)
            # A task of its own: it is finished even when the caller goes away meanwhile.
            self._start(self._unload(runner))
        while record.state != LoadState.LOAD_STATE_UNLOADED:
            await record.wait_for_change(record.revision)
        return record

    async def _unload(self, runner: LoadRunner) -> None:
        await runner.release()
        self._give_back(runner.record)
        runner.record.move_to(LoadState.LOAD_STATE_UNLOADED)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End the loads that are not committed; committed ones stay on their workers."""
        error = LoadCancelled("the coordinator stops")
        for runner in self._runners.values():
            runner.fail(error)
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(self, runner: LoadRunner) -> None:
        await runner.run()
        failure = runner.record.failure
        if isinstance(failure, WorkerLost):
            self.registry.suspect(failure.metadata.get("worker_id", ""))
        if is_terminal(runner.record.state):
            self._give_back(runner.record)
        self._forget_old()

    def _give_back(self, record: LoadRecord) -> None:
        self.registry.give_back(record.load_id)
        self._announce_worker()

    async def _wait_for_group(
        self, load_id: str, tp: int, worker_ids: Sequence[str], wait_seconds: float
    ) -> Sequence[WorkerRecord]:
        last: LoaderError = WorkersUnavailable("no workers")
        try:
            async with asyncio.timeout(wait_seconds):
                while True:
                    try:
                        return self.registry.reserve(load_id, tp, worker_ids)
                    except InvalidRequest:
                        raise
                    except LoaderError as error:
                        last = error
                    await self._worker_freed.wait()
        except TimeoutError:
            raise last from None

    def _require(self, load_id: str) -> LoadRunner:
        runner = self._runners.get(load_id)
        if runner is None:
            raise LoadNotFound(f"there is no load {load_id!r}", load_id=load_id)
        return runner

    def _forget_old(self) -> None:
        ended = [
            load_id for load_id, runner in self._runners.items() if is_terminal(runner.record.state)
        ]
        for load_id in ended[: max(0, len(ended) - KEPT_LOADS)]:
            del self._runners[load_id]
        self._requests = {
            request_id: load_id
            for request_id, load_id in self._requests.items()
            if load_id in self._runners
        }
