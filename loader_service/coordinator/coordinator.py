"""The coordinator's state: workers, loads, and what happens to one when the other is lost."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Coroutine, Sequence

from loader_service.background import BackgroundThreads
from loader_service.checkpoint.catalog import Checkpoint
from loader_service.checkpoint.files import read_checkpoint, resolve_path
from loader_service.clock import Clock
from loader_service.coordinator.record import LoadRecord, is_terminal
from loader_service.coordinator.registry import WorkerRecord, WorkerRegistry
from loader_service.coordinator.runner import LoadRequest, LoadRunner, Stream
from loader_service.coordinator.settings import Settings
from loader_service.coordinator.worker_client import ConnectWorker
from loader_service.errors import (
    Conflict,
    InvalidRequest,
    LoadCancelled,
    LoaderError,
    LoadNotFound,
    QuotaExceeded,
    ServiceUnavailable,
    StreamerLost,
    WorkerLost,
    WorkersUnavailable,
    from_fields,
)
from loader_service.plan.planner import MAX_TP, PlanOptions
from loader_service.v1 import coordinator_pb2
from loader_service.v1.types_pb2 import LoadState, WeightSource, WorkerLoadState

__all__ = ["Coordinator"]

_log = logging.getLogger(__name__)

MOST_PATH_CHARACTERS = 4096
"""No file system takes longer paths, and loads carry theirs in every message."""

PLANS_AT_ONCE = 4
"""Loads that are planned at once; planning is work for the one interpreter."""

PATHS_AT_ONCE = 4
"""Paths of new loads that are looked for at once; plans, which take long, do not hold them up."""

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
        self._tasks: set[asyncio.Task[None]] = set()
        self._worker_freed = asyncio.Event()
        self._planners = BackgroundThreads(PLANS_AT_ONCE, "plan")
        self._finders = BackgroundThreads(PATHS_AT_ONCE, "find")
        self._closing = False

    # Workers

    async def register(self, request: coordinator_pb2.RegisterWorkerRequest) -> None:
        """Take a worker in; an earlier life of it is lost with its load.

        Raises:
            Conflict: WORKER_ID_TAKEN, another process answers under this name.
            LoaderError: see `WorkerRegistry.register`.
        """
        self.registry.check(request)
        rival = self.registry.rival(request)
        while rival is not None:
            if await self._answers(rival):
                raise Conflict(
                    f"the name {request.worker_id!r} belongs to another process, which answers at "
                    f"{rival.registration.address}; give this one its own --worker-id",
                    reason="WORKER_ID_TAKEN",
                    worker_id=request.worker_id,
                )
            asked, rival = rival, self.registry.rival(request)
            if rival is asked:
                break
            # Another process has taken the place meanwhile, and is asked in its turn.
        lost_load = self.registry.register(request, self._clock.monotonic(), self._clock.time())
        _log.info("worker %s registered at %s", request.worker_id, request.address)
        self._lose_rank(lost_load, request.worker_id, "was started again")
        self._regain_ranks(request.worker_id, request.loads)
        self._announce_worker()

    async def _answers(self, worker: WorkerRecord) -> bool:
        """Ask a worker whether it is still the process that registered."""
        client = self._connect(worker.worker_id, worker.registration.address)
        try:
            return await client.incarnation() == worker.registration.incarnation
        except LoaderError:
            return False
        finally:
            await client.close()

    def heartbeat(self, request: coordinator_pb2.HeartbeatRequest) -> list[str]:
        """Renew a lease; return the loads that the worker must give up."""
        record = self.registry.heartbeat(request, self._clock.monotonic(), self._clock.time())
        release = []
        for load in request.loads:
            runner = self._runners.get(load.load_id)
            if runner is None or is_terminal(runner.record.state):
                release.append(load.load_id)
            elif (
                load.state == WorkerLoadState.WORKER_LOAD_STATE_FAILED
                and record.load_id == load.load_id
            ):
                reported = load.failure
                failure = from_fields(reported.reason, reported.message, reported.metadata)
                # A worker that lost the streamer only sees what follows from the first cause.
                if not isinstance(failure, StreamerLost):
                    failure.metadata.setdefault("worker_id", request.worker_id)
                    runner.fail(failure)
        if not record.load_id:
            self._announce_worker()
        return release

    def deregister(self, worker_id: str, incarnation: str) -> None:
        """Forget a worker that stops; its load is lost with it."""
        lost_load = self.registry.deregister(worker_id, incarnation)
        _log.info("worker %s left", worker_id)
        self._lose_rank(lost_load, worker_id, "has stopped")

    def set_draining(self, worker_id: str, draining: bool) -> WorkerRecord:
        """Take a worker out of service for new loads, or back in.

        Raises:
            WorkerNotFound: there is none of this name.
        """
        worker = self.registry.set_draining(worker_id, draining)
        _log.info("worker %s is %s", worker_id, "drained" if draining else "in service again")
        self._announce_worker()
        return worker

    async def watch(self) -> None:
        """Find lost workers and stalled ranks, for ever."""
        pause = self.settings.heartbeat_seconds / 4
        while True:
            began = self._clock.monotonic()
            await asyncio.sleep(pause)
            stood_still = self._clock.monotonic() - began - pause
            if stood_still > self.settings.heartbeat_seconds:
                # This process has heard nobody meanwhile; that makes nobody late.
                _log.warning("the coordinator stood still for %.1f s", stood_still)
                self.registry.extend_leases(stood_still)
            for runner in self._runners.values():
                runner.record.check_stalled()
            for worker in self.registry.expire(self._clock.monotonic()):
                _log.warning("worker %s: the lease ran out", worker.worker_id)
                self._lose_rank(worker.load_id, worker.worker_id, "let its lease run out")

    def _lose_rank(self, load_id: str, worker_id: str, how: str) -> None:
        runner = self._runners.get(load_id)
        if runner is None:
            return
        if runner.record.is_answered:
            _log.warning("load %s has lost a rank: worker %s %s", load_id, worker_id, how)
            runner.record.lose_rank(worker_id)
            return
        runner.fail(WorkerLost(f"worker {worker_id!r} {how}", worker_id=worker_id))

    def _regain_ranks(self, worker_id: str, loads: Sequence[coordinator_pb2.WorkerLoad]) -> None:
        """Take back the ranks that a worker has kept while it could not be reached."""
        for load in loads:
            runner = self._runners.get(load.load_id)
            committed = load.state == WorkerLoadState.WORKER_LOAD_STATE_COMMITTED
            if runner is not None and committed and runner.record.has_lost(worker_id):
                _log.info("load %s: worker %s is back", load.load_id, worker_id)
                runner.record.regain_rank(worker_id)

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
            max_tensors=self.settings.max_tensors,
            allow_trailing_bytes=allow_trailing_bytes,
        )

    # Loads

    async def start(
        self,
        path: str,
        tp: int,
        worker_ids: Sequence[str],
        wait_seconds: float,
        options: PlanOptions,
        allow_trailing_bytes: bool,
        owner: str,
        source: WeightSource.ValueType,
    ) -> LoadRecord:
        """Accept a load and begin it.

        Raises:
            InvalidRequest: a field makes no sense.
            CheckpointNotFound: nothing is at the path.
            PathOutsideRoot: it leaves the model root.
            QuotaExceeded: `owner` has too many loads on their way.
            LoaderError: the workers cannot be had, and nobody wants to wait.
        """
        if not path:
            raise InvalidRequest("path is missing", field="path")
        if len(path) > MOST_PATH_CHARACTERS:
            raise InvalidRequest(
                f"path is longer than {MOST_PATH_CHARACTERS} characters", field="path"
            )
        if not 1 <= tp <= MAX_TP:
            raise InvalidRequest(f"tp must be between 1 and {MAX_TP}, not {tp}", field="tp")
        if wait_seconds < 0:
            raise InvalidRequest("the time to wait is negative", field="wait_for_workers_duration")
        # A slip in the path is told at once, not after a wait for workers. What stands in the files is
        # looked at when the load is planned.
        await self._finders.run(resolve_path, path, self.settings.model_root)
        # From here on without waiting, so that what is checked still holds when the load is there.
        if self._closing:
            raise ServiceUnavailable("the coordinator is shutting down", reason="SHUTTING_DOWN")
        self._check_quota(owner)
        load_id = f"load-{secrets.token_hex(4)}"
        group = None if wait_seconds else self.registry.reserve(load_id, tp, worker_ids)

        async def choose_group() -> Sequence[WorkerRecord]:
            return group or await self._wait_for_group(load_id, tp, worker_ids, wait_seconds)

        record = LoadRecord(load_id, path, tp, self._clock, owner, self.settings.stall_seconds)
        request = LoadRequest(
            read=lambda: self.read(path, allow_trailing_bytes),
            tp=tp,
            options=options,
            window_bytes=self.settings.window_bytes,
            lease_seconds=self.settings.lease_seconds,
            source=source,
        )
        runner = LoadRunner(
            record, request, choose_group, self._connect, self._stream, self._planners
        )
        self._runners[load_id] = runner
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

    def _check_quota(self, owner: str) -> None:
        on_their_way = sum(
            runner.record.owner == owner and not runner.record.is_answered
            for runner in self._runners.values()
        )
        if on_their_way >= self.settings.max_loads:
            raise QuotaExceeded(
                f"{owner!r} has {on_their_way} loads on their way, which is the most",
                identity=owner,
            )

    def abandon(self, load_id: str) -> None:
        """Begin to cancel a load whose owner has gone; one that is being committed stays."""
        runner = self._runners.get(load_id)
        if runner is not None and runner.record.can_cancel:
            runner.fail(LoadCancelled(f"whoever asked for load {load_id} has gone"))

    async def cancel(self, load_id: str) -> LoadRecord:
        """End a load that is not committed, and return when it has ended.

        Raises:
            LoadNotFound: there is none of this name.
            WrongState: it is committed, or has ended; also when it was failing already.
        """
        runner = self._require(load_id)
        record = runner.record
        record.check_can_cancel()
        runner.fail(LoadCancelled(f"load {load_id} was cancelled", load_id=load_id))
        await record.wait_until_settled()
        if record.state != LoadState.LOAD_STATE_CANCELLED:
            record.check_can_cancel()
        return record

    async def unload(self, load_id: str) -> LoadRecord:
        """Give a committed load back, and return when every worker has freed it or is lost.

        Repeating it is harmless.

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
        record = runner.record
        await runner.unload(
            lambda worker_id: self._closing or not self.registry.is_held(worker_id, record.load_id)
        )
        self._give_back(record)
        record.move_to(LoadState.LOAD_STATE_UNLOADED)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a fault in the coordinator", exc_info=error)

    async def close(self) -> None:
        """End the loads that are not committed; committed ones stay on their workers."""
        self._closing = True
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
            last.message += f"; that was waited for {wait_seconds:g} s"
            last.metadata["waited_seconds"] = f"{wait_seconds:g}"
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
