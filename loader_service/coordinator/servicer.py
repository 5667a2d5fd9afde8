"""The coordinator's gRPC service."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import Message

from loader_service.background import BackgroundThreads
from loader_service.checkpoint.catalog import Checkpoint, TensorInfo
from loader_service.coordinator.admission import admission
from loader_service.coordinator.coordinator import Coordinator
from loader_service.coordinator.latest_checkpoint import LatestCheckpoint
from loader_service.coordinator.planning import PlannedLoad, plan_chunks
from loader_service.coordinator.record import LoadRecord, is_settled
from loader_service.coordinator.registry import WorkerRecord
from loader_service.coordinator.replay import RequestReplay
from loader_service.errors import InvalidRequest
from loader_service.plan.planner import PlanOptions, UnknownTensorPolicy
from loader_service.plan.slices import TensorPlan
from loader_service.plan.tied import TiedHeadPolicy
from loader_service.serving.access import METHOD_ROLES, caller, require
from loader_service.serving.paging import paginate
from loader_service.texts import MOST_NAME_BYTES, cut, short_warnings
from loader_service.v1 import coordinator_pb2, coordinator_pb2_grpc, types_pb2
from loader_service.v1.types_pb2 import WeightSource

__all__ = ["CoordinatorServicer"]

WATCH_SECONDS = 0.1
"""Least time between two updates of a watched load."""

UPDATES_PER_SECOND = 100
"""Updates that all watchers together get at most; with many of them each hears less often."""

LOOKS_AT_ONCE = 2
"""Checkpoints that are read at once for callers who only look; loads do not wait for these."""

DEFAULT_TENSORS, MAX_TENSORS = 1000, 10_000
DEFAULT_RESOURCES, MAX_RESOURCES = 100, 1000
"""Entries of a page."""

_Response = TypeVar("_Response", bound=Message)
_Context = grpc.aio.ServicerContext[Any, Any]
_TIED = {
    types_pb2.TIED_HEAD_POLICY_OBEY_FILE: TiedHeadPolicy.OBEY_FILE,
    types_pb2.TIED_HEAD_POLICY_TRUST_CONFIG: TiedHeadPolicy.TRUST_CONFIG,
}
_UNKNOWN = {types_pb2.UNKNOWN_TENSOR_POLICY_REPLICATE: UnknownTensorPolicy.REPLICATE}


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Turns messages into calls of a `Coordinator` and back."""

    def __init__(self, coordinator: Coordinator) -> None:
        """Serve `coordinator`."""
        self._coordinator = coordinator
        self._latest = LatestCheckpoint(coordinator.settings.model_root, coordinator.read)
        self._replay = RequestReplay()
        self._lookers = BackgroundThreads(LOOKS_AT_ONCE, "look")
        self._latest_plan: tuple[tuple[Checkpoint, int, PlanOptions], PlannedLoad] | None = None
        self._watchers = 0

    async def RegisterWorker(
        self, request: coordinator_pb2.RegisterWorkerRequest, context: _Context
    ) -> coordinator_pb2.RegisterWorkerResponse:
        """Take a worker in."""
        await self._coordinator.register(request)
        response = coordinator_pb2.RegisterWorkerResponse()
        settings = self._coordinator.settings
        response.heartbeat_interval.FromNanoseconds(int(settings.heartbeat_seconds * 1e9))
        response.lease_duration.FromNanoseconds(int(settings.lease_seconds * 1e9))
        return response

    async def Heartbeat(
        self, request: coordinator_pb2.HeartbeatRequest, context: _Context
    ) -> coordinator_pb2.HeartbeatResponse:
        """Renew a lease."""
        return coordinator_pb2.HeartbeatResponse(
            release_load_ids=self._coordinator.heartbeat(request)
        )

    async def DeregisterWorker(
        self, request: coordinator_pb2.DeregisterWorkerRequest, context: _Context
    ) -> coordinator_pb2.DeregisterWorkerResponse:
        """Forget a worker that stops."""
        self._coordinator.deregister(request.worker_id, request.incarnation)
        return coordinator_pb2.DeregisterWorkerResponse()

    async def InspectCheckpoint(
        self, request: coordinator_pb2.InspectCheckpointRequest, context: _Context
    ) -> coordinator_pb2.InspectCheckpointResponse:
        """Read headers and list tensors."""
        return await self._lookers.run(self._inspect, request)

    def _inspect(
        self, request: coordinator_pb2.InspectCheckpointRequest
    ) -> coordinator_pb2.InspectCheckpointResponse:
        checkpoint = self._latest.read(request.path, request.allow_trailing_bytes)
        tensors, token = paginate(
            list(checkpoint.catalog),
            lambda tensor: tensor.name,
            _catalog_tensor,
            request,
            default=DEFAULT_TENSORS,
            maximum=MAX_TENSORS,
        )
        return coordinator_pb2.InspectCheckpointResponse(
            path=checkpoint.path,
            architecture=cut(checkpoint.architecture, MOST_NAME_BYTES),
            tensor_count=len(checkpoint.catalog),
            payload_bytes=checkpoint.catalog.payload_bytes,
            files=list(checkpoint.catalog.files),
            warnings=short_warnings(checkpoint.warnings),
            tensors=tensors,
            next_page_token=token,
        )

    async def PlanLoad(
        self, request: coordinator_pb2.PlanLoadRequest, context: _Context
    ) -> coordinator_pb2.PlanLoadResponse:
        """Plan without allocating."""
        planned, response = await self._lookers.run(self._plan, request)
        response.admission.CopyFrom(
            admission(planned, self._coordinator.registry, request.worker_ids)
        )
        return response

    def _plan(
        self, request: coordinator_pb2.PlanLoadRequest
    ) -> tuple[PlannedLoad, coordinator_pb2.PlanLoadResponse]:
        options = request.options
        checkpoint = self._latest.read(request.path, options.allow_trailing_bytes)
        asked = (checkpoint, request.tp, _plan_options(options))
        # The pages of one list come from one plan; a checkpoint that was read anew is another one.
        known = self._latest_plan
        if known is not None and known[0] == asked:
            planned = known[1]
        else:
            planned = plan_chunks(*asked, self._coordinator.settings.window_bytes)
            self._latest_plan = asked, planned
        plan = planned.plan
        tensors: Sequence[coordinator_pb2.TensorPlan] = ()
        token = ""
        if request.include_tensors:
            tensors, token = paginate(
                list(enumerate(plan.tensors)),
                lambda entry: f"{entry[0]:012d}",
                lambda entry: _tensor_plan(entry[1]),
                request,
                default=DEFAULT_TENSORS,
                maximum=MAX_TENSORS,
            )
        response = coordinator_pb2.PlanLoadResponse(
            path=plan.path,
            architecture=cut(plan.architecture, MOST_NAME_BYTES),
            tp=plan.tp,
            source_bytes=planned.source_bytes,
            tied_head_present=plan.tied_head_present,
            warnings=short_warnings(plan.warnings),
            ranks=_rank_plans(planned),
            tensors=tensors,
            next_page_token=token,
        )
        return planned, response

    async def Load(
        self, request: coordinator_pb2.LoadRequest, context: _Context
    ) -> coordinator_pb2.LoadResponse:
        """Start a load."""

        async def start() -> coordinator_pb2.LoadResponse:
            record = await self._coordinator.start(
                path=request.path,
                tp=request.tp,
                worker_ids=list(request.worker_ids),
                wait_seconds=request.wait_for_workers_duration.ToNanoseconds() / 1e9,
                options=_plan_options(request.options),
                allow_trailing_bytes=request.options.allow_trailing_bytes,
                owner=caller.get().name,
                source=_source(request.source),
            )
            return coordinator_pb2.LoadResponse(load=record.message())

        return await self._once(request, start)

    async def _once(self, request: Any, work: Callable[[], Awaitable[_Response]]) -> _Response:
        """Answer a request that changes something; its id makes it happen once."""
        return await self._replay.answer(caller.get().name, request, request.request_id, work)

    async def GetLoad(
        self, request: coordinator_pb2.GetLoadRequest, context: _Context
    ) -> coordinator_pb2.GetLoadResponse:
        """Return one load."""
        return coordinator_pb2.GetLoadResponse(
            load=self._coordinator.get(request.load_id).message()
        )

    async def ListLoads(
        self, request: coordinator_pb2.ListLoadsRequest, context: _Context
    ) -> coordinator_pb2.ListLoadsResponse:
        """List loads, newest first."""
        loads, token = paginate(
            self._coordinator.all(),
            LoadRecord.order_key,
            LoadRecord.message,
            request,
            default=DEFAULT_RESOURCES,
            maximum=MAX_RESOURCES,
        )
        return coordinator_pb2.ListLoadsResponse(loads=loads, next_page_token=token)

    async def WatchLoad(
        self, request: coordinator_pb2.WatchLoadRequest, context: _Context
    ) -> AsyncIterator[coordinator_pb2.WatchLoadResponse]:
        """Send the load as it is, then changes, until it is settled."""
        record = self._coordinator.get(request.load_id)
        if request.cancel_when_gone:
            cancel = f"{coordinator_pb2.DESCRIPTOR.package}.CoordinatorService/CancelLoad"
            require(caller.get(), METHOD_ROLES[f"/{cancel}"], "cancelling a load")
        self._watchers += 1
        try:
            async with contextlib.aclosing(self._follow(record, request.after_revision)) as loads:
                async for load in loads:
                    yield coordinator_pb2.WatchLoadResponse(load=load)
        finally:
            self._watchers -= 1
            if request.cancel_when_gone:
                self._coordinator.abandon(request.load_id)

    async def _follow(
        self, record: LoadRecord, after_revision: int
    ) -> AsyncGenerator[types_pb2.Load, None]:
        revision = after_revision
        while True:
            # A settled load is sent even to a client that has seen this revision: it ends the call.
            if not is_settled(record.state):
                await record.wait_for_change(revision)
            load = record.message()
            revision = load.revision
            yield load
            if is_settled(load.state):
                return
            pause = max(WATCH_SECONDS, self._watchers / UPDATES_PER_SECOND)
            # Watchers that came together would be served in bursts, and others would wait for these.
            pause *= random.uniform(0.75, 1.25)  # noqa: S311 - nothing secret
            # A settled load is told at once; everything before it can wait for its turn.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await record.wait_until_settled()

    async def CancelLoad(
        self, request: coordinator_pb2.CancelLoadRequest, context: _Context
    ) -> coordinator_pb2.CancelLoadResponse:
        """End a load that is not committed."""

        async def cancel() -> coordinator_pb2.CancelLoadResponse:
            record = await self._coordinator.cancel(request.load_id)
            return coordinator_pb2.CancelLoadResponse(load=record.message())

        return await self._once(request, cancel)

    async def Unload(
        self, request: coordinator_pb2.UnloadRequest, context: _Context
    ) -> coordinator_pb2.UnloadResponse:
        """Give a committed load back."""

        async def unload() -> coordinator_pb2.UnloadResponse:
            record = await self._coordinator.unload(request.load_id)
            return coordinator_pb2.UnloadResponse(load=record.message())

        return await self._once(request, unload)

    async def ListWorkers(
        self, request: coordinator_pb2.ListWorkersRequest, context: _Context
    ) -> coordinator_pb2.ListWorkersResponse:
        """List workers by id."""
        workers, token = paginate(
            self._coordinator.registry.all(),
            lambda worker: worker.worker_id,
            WorkerRecord.message,
            request,
            default=DEFAULT_RESOURCES,
            maximum=MAX_RESOURCES,
        )
        return coordinator_pb2.ListWorkersResponse(workers=workers, next_page_token=token)

    async def GetWorker(
        self, request: coordinator_pb2.GetWorkerRequest, context: _Context
    ) -> coordinator_pb2.GetWorkerResponse:
        """Return one worker."""
        worker = self._coordinator.registry.get(request.worker_id)
        return coordinator_pb2.GetWorkerResponse(worker=worker.message())

    async def DrainWorker(
        self, request: coordinator_pb2.DrainWorkerRequest, context: _Context
    ) -> coordinator_pb2.DrainWorkerResponse:
        """Give a worker no new load."""

        async def drain() -> coordinator_pb2.DrainWorkerResponse:
            worker = self._coordinator.set_draining(request.worker_id, True)
            return coordinator_pb2.DrainWorkerResponse(worker=worker.message())

        return await self._once(request, drain)

    async def UndrainWorker(
        self, request: coordinator_pb2.UndrainWorkerRequest, context: _Context
    ) -> coordinator_pb2.UndrainWorkerResponse:
        """Let a drained worker take loads again."""

        async def undrain() -> coordinator_pb2.UndrainWorkerResponse:
            worker = self._coordinator.set_draining(request.worker_id, False)
            return coordinator_pb2.UndrainWorkerResponse(worker=worker.message())

        return await self._once(request, undrain)


def _rank_plans(planned: PlannedLoad) -> list[coordinator_pb2.RankPlan]:
    return [
        coordinator_pb2.RankPlan(
            rank=totals.rank,
            source_bytes=totals.wire_bytes,
            wire_bytes=totals.wire_bytes,
            resident_bytes=totals.resident_bytes,
            replicated_bytes=totals.replicated_bytes,
            staging_peak_bytes=staging,
            tensor_count=totals.tensor_count,
        )
        for totals, staging in zip(planned.totals, planned.staging_bytes, strict=True)
    ]


def _plan_options(options: types_pb2.PlanOptions) -> PlanOptions:
    return PlanOptions(
        tied_head=_TIED.get(options.tied_head, TiedHeadPolicy.VERIFY),
        unknown_tensors=_UNKNOWN.get(options.unknown_tensors, UnknownTensorPolicy.REFUSE),
    )


def _source(source: WeightSource.ValueType) -> WeightSource.ValueType:
    if source == WeightSource.WEIGHT_SOURCE_UNSPECIFIED:
        return WeightSource.WEIGHT_SOURCE_AUTO
    if source not in WeightSource.values():
        raise InvalidRequest(f"source {source} is not known", field="source")
    return source


def _catalog_tensor(tensor: TensorInfo) -> coordinator_pb2.CatalogTensor:
    return coordinator_pb2.CatalogTensor(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        bytes=tensor.nbytes,
        file=tensor.file,
        offset_bytes=tensor.offset,
    )


def _tensor_plan(tensor: TensorPlan) -> coordinator_pb2.TensorPlan:
    return coordinator_pb2.TensorPlan(
        name=tensor.source.name,
        role=tensor.role,
        storage=tensor.storage,
        cut=tensor.cut,
        reason=tensor.reason,
    )
