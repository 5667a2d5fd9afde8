"""Carrying one load through its states, and cleaning up after it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence

from loader_service.background import BackgroundThreads
from loader_service.checkpoint.catalog import Checkpoint
from loader_service.coordinator.planning import PlannedLoad, plan_chunks
from loader_service.coordinator.record import LoadRecord
from loader_service.coordinator.registry import WorkerRecord
from loader_service.coordinator.worker_client import ConnectWorker, WorkerClient
from loader_service.errors import InternalError, LoadCancelled, LoaderError, WorkerLost
from loader_service.plan.planner import PlanOptions
from loader_service.stream.jobs import (
    Event,
    RankEndpoint,
    StartStream,
    StreamConnected,
    StreamProgress,
)
from loader_service.stream.manifests import manifest_pages
from loader_service.stream.proof import FileProof, prove
from loader_service.v1.types_pb2 import LoadState, RankState, WeightSource

__all__ = ["LoadRequest", "LoadRunner", "Stream"]

_log = logging.getLogger(__name__)

CLEANUP_SECONDS = 1.5
"""How long ending a failed load waits for its workers; a late one is told by its next heartbeat."""

MOST_READ_ALONE = 1.5
"""A rank that would read more than so many times what it keeps is sent it, unless it must read itself:
columns of all ranks are read together for less."""

RETRY_SECONDS = 0.2
"""Pause before a worker that did not answer is asked again to commit or to free."""

Stream = Callable[[StartStream, Callable[[Event], None]], Awaitable[None]]
"""Runs a job in the streamer; raises why it ended, if it was not success."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadRequest:
    """What a client asked for.

    Attributes:
        read: reads the checkpoint's metadata; blocking.
        tp: ranks of the group.
        options: how to plan.
        window_bytes: host memory of the streamer that all ranks share.
        lease_seconds: how long a commit that has begun is retried.
        source: where the bytes may come from.
    """

    read: Callable[[], Checkpoint]
    tp: int
    options: PlanOptions
    window_bytes: int
    lease_seconds: float
    source: WeightSource.ValueType = WeightSource.WEIGHT_SOURCE_COORDINATOR


class LoadRunner:
    """Runs one load. `run` ends with the record in a settled state, whatever happens."""

    def __init__(
        self,
        record: LoadRecord,
        request: LoadRequest,
        choose_group: Callable[[], Awaitable[Sequence[WorkerRecord]]],
        connect: ConnectWorker,
        stream: Stream,
        planners: BackgroundThreads,
    ) -> None:
        """Describe the load.

        Args:
            record: state and progress, written by this runner only.
            request: what to load.
            choose_group: reserves the workers, in rank order; may wait.
            connect: opens a client for a worker.
            stream: runs a job in the streamer.
            planners: threads to plan in, shared by all loads.
        """
        self.record = record
        self._request = request
        self._choose_group = choose_group
        self._connect = connect
        self._stream = stream
        self._planners = planners
        self._clients: list[WorkerClient] = []
        self._work: asyncio.Task[None] | None = None
        self._ended = False
        self._cause: LoaderError | None = None

    async def run(self) -> None:
        """Carry the load to SUCCEEDED, or to FAILED or CANCELLED with nothing left behind."""
        self._work = asyncio.create_task(self._load())
        if self._cause is not None:
            self._work.cancel()
        await asyncio.wait([self._work])
        # A finished task keeps its frames alive through its exception, and they the whole plan.
        work, self._work, self._ended = self._work, None, True
        if work.cancelled():
            error = self._cause or LoadCancelled(f"load {self.record.load_id} was cancelled")
        elif (raised := work.exception()) is None:
            return
        elif isinstance(raised, LoaderError):
            error = self._cause or raised
        else:
            _log.error("load %s failed", self.record.load_id, exc_info=raised)
            error = InternalError(f"{type(raised).__name__}: {raised}")
        _log.warning("load %s: %s", self.record.load_id, error)
        await self.release()
        cancelled = isinstance(error, LoadCancelled)
        state = LoadState.LOAD_STATE_CANCELLED if cancelled else LoadState.LOAD_STATE_FAILED
        # The record keeps the error for long; where it was raised is of no use there.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        self.record.end(state, None if cancelled else error)

    def fail(self, cause: LoaderError) -> None:
        """End the load because of something that happened elsewhere; the first cause is kept."""
        if self._cause is not None or self._ended:
            return
        self._cause = cause
        if self._work is not None:
            self._work.cancel()

    async def unload(self, is_gone: Callable[[str], bool]) -> None:
        """Make the workers free a committed load, and return when each has done so or is gone.

        Args:
            is_gone: says of a worker id that its worker is not to be waited for.
        """

        async def abort(worker_id: str, client: WorkerClient) -> None:
            while not is_gone(worker_id):
                try:
                    await client.abort(self.record.load_id)
                    break
                except LoaderError as error:
                    _log.info("load %s: releasing: %s", self.record.load_id, error)
                await asyncio.sleep(RETRY_SECONDS)

        clients, self._clients = self._clients, []
        await asyncio.gather(
            *itertools.starmap(abort, zip(self.record.worker_ids, clients, strict=True))
        )
        for client in clients:
            await client.close()

    async def release(self) -> None:
        """Make the workers give back what they hold of a failed load; late ones are not waited for."""
        clients, self._clients = self._clients, []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLEANUP_SECONDS):
                results = await asyncio.gather(
                    *(client.abort(self.record.load_id) for client in clients),
                    return_exceptions=True,
                )
                for result in results:
                    if isinstance(result, BaseException):
                        _log.info("load %s: releasing: %s", self.record.load_id, result)
        for client in clients:
            await client.close()

    async def _load(self) -> None:
        group = await self._choose_group()
        self.record.set_group([worker.worker_id for worker in group])
        self.record.move_to(LoadState.LOAD_STATE_PLANNING)
        planned = await self._planners.run(self._plan)
        proofs = await self._planners.run(self._prove, planned)
        self.record.set_plan(planned)
        self.record.move_to(LoadState.LOAD_STATE_PREPARING)
        endpoints = await self._prepare(group, planned, proofs)
        alone = [rank for rank, endpoint in enumerate(endpoints) if endpoint.reads_itself]
        self.record.set_sources(alone, planned.bytes_read(alone))
        self.record.move_to(LoadState.LOAD_STATE_STREAMING)
        job = StartStream(self.record.load_id, planned.plan, planned.chunk_bytes, endpoints)
        await self._stream(job, self._on_event)
        if self.record.state == LoadState.LOAD_STATE_STREAMING:
            self.record.move_to(LoadState.LOAD_STATE_VERIFYING)
        self.record.move_to(LoadState.LOAD_STATE_COMMITTING)
        await self._commit()
        self.record.move_to(LoadState.LOAD_STATE_SUCCEEDED)

    def _plan(self) -> PlannedLoad:
        request = self._request
        return plan_chunks(request.read(), request.tp, request.options, request.window_bytes)

    def _prove(self, planned: PlannedLoad) -> list[FileProof]:
        """Make what workers need to read for themselves; nothing where none of them is to."""
        if not any(self._may_read_itself(planned, rank) for rank in range(planned.plan.tp)):
            return []
        return [prove(file) for file in planned.plan.files.values()]

    def _may_read_itself(self, planned: PlannedLoad, rank: int) -> bool:
        if self._request.source == WeightSource.WEIGHT_SOURCE_AUTO:
            most = planned.totals[rank].wire_bytes * MOST_READ_ALONE
            return planned.read_alone_bytes[rank] <= most
        return self._request.source == WeightSource.WEIGHT_SOURCE_LOCAL

    async def _prepare(
        self,
        group: Sequence[WorkerRecord],
        planned: PlannedLoad,
        proofs: Sequence[FileProof],
    ) -> tuple[RankEndpoint, ...]:
        self._clients = [
            self._connect(worker.worker_id, worker.registration.address) for worker in group
        ]

        async def prepare(rank: int) -> RankEndpoint:
            itself = self._may_read_itself(planned, rank)
            pages = manifest_pages(
                self.record.load_id,
                planned.plan,
                rank,
                planned.chunks[rank],
                self._request.source if itself else WeightSource.WEIGHT_SOURCE_COORDINATOR,
                proofs if itself else (),
            )
            answer = await self._clients[rank].prepare(pages)
            self.record.set_rank(rank, RankState.RANK_STATE_PREPARED)
            registration = group[rank].registration
            return RankEndpoint(
                registration.worker_id,
                answer.data_host,
                answer.data_port,
                answer.token,
                registration.device,
                registration.host,
                answer.source == WeightSource.WEIGHT_SOURCE_LOCAL,
            )

        # One refusal does not cut the others short: their answers say what they hold.
        results = await asyncio.gather(
            *(prepare(rank) for rank in range(len(group))), return_exceptions=True
        )
        endpoints = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            endpoints.append(result)
        return tuple(endpoints)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, StreamConnected):
            self.record.set_lanes(event.lanes)
        elif isinstance(event, StreamProgress):
            self.record.set_progress(event.done_bytes, event.verified)
            if self.record.state == LoadState.LOAD_STATE_STREAMING and self.record.all_landed:
                self.record.move_to(LoadState.LOAD_STATE_VERIFYING)

    async def _commit(self) -> None:
        """Commit every rank; a rank that does not answer is asked again for the time of a lease."""
        deadline = asyncio.get_running_loop().time() + self._request.lease_seconds

        async def commit(rank: int, client: WorkerClient) -> None:
            while True:
                try:
                    await client.commit(self.record.load_id)
                    return self.record.set_rank(rank, RankState.RANK_STATE_COMMITTED)
                except WorkerLost:
                    if asyncio.get_running_loop().time() > deadline:
                        raise
                await asyncio.sleep(RETRY_SECONDS)

        results = await asyncio.gather(
            *itertools.starmap(commit, enumerate(self._clients)), return_exceptions=True
        )
        failed = [result for result in results if isinstance(result, BaseException)]
        if failed:
            raise failed[0]
