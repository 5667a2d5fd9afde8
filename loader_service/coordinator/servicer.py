"""The coordinator's gRPC service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio

from loader_service.checkpoint.catalog import TensorInfo
from loader_service.coordinator.coordinator import Coordinator
from loader_service.coordinator.record import LoadRecord, is_settled
from loader_service.plan.planner import PlanOptions, UnknownTensorPolicy, plan_load
from loader_service.plan.slices import LoadPlan, TensorPlan
from loader_service.plan.tied import TiedHeadPolicy
from loader_service.rpc import paginate
from loader_service.stream.chunks import chunk_bytes_for, plan_steps, rank_chunks, staging_bytes
from loader_service.v1 import coordinator_pb2, coordinator_pb2_grpc, types_pb2

__all__ = ["CoordinatorServicer"]

WATCH_SECONDS = 0.1
"""Least time between two updates of a watched load."""

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

    async def RegisterWorker(
        self, request: coordinator_pb2.RegisterWorkerRequest, context: _Context
    ) -> coordinator_pb2.RegisterWorkerResponse:
        """Take a worker in."""
        self._coordinator.register(request)
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
        checkpoint = await asyncio.to_thread(
            self._coordinator.read, request.path, request.allow_trailing_bytes
        )
        tensors, token = _page(list(checkpoint.catalog), lambda tensor: tensor.name, request)
        return coordinator_pb2.InspectCheckpointResponse(
            path=checkpoint.path,
            architecture=checkpoint.architecture,
            tensor_count=len(checkpoint.catalog),
            payload_bytes=checkpoint.catalog.payload_bytes,
            files=list(checkpoint.catalog.files),
            warnings=checkpoint.warnings,
            tensors=map(_catalog_tensor, tensors),
            next_page_token=token,
        )

    async def PlanLoad(
        self, request: coordinator_pb2.PlanLoadRequest, context: _Context
    ) -> coordinator_pb2.PlanLoadResponse:
        """Plan without allocating."""
        return await asyncio.to_thread(self._plan, request)

    def _plan(self, request: coordinator_pb2.PlanLoadRequest) -> coordinator_pb2.PlanLoadResponse:
        options = request.options
        checkpoint = self._coordinator.read(request.path, options.allow_trailing_bytes)
        plan = plan_load(checkpoint, request.tp, _plan_options(options))
        numbered = [(f"{number:012d}", tensor) for number, tensor in enumerate(plan.tensors)]
        page: Sequence[tuple[str, TensorPlan]] = ()
        token = ""
        if request.include_tensors:
            page, token = _page(numbered, lambda entry: entry[0], request)
        return coordinator_pb2.PlanLoadResponse(
            path=plan.path,
            architecture=plan.architecture,
            tp=plan.tp,
            source_bytes=plan.source_bytes,
            tied_head_present=plan.tied_head_present,
            warnings=plan.warnings,
            ranks=self._rank_plans(plan),
            tensors=(_tensor_plan(tensor) for _, tensor in page),
            next_page_token=token,
        )

    def _rank_plans(self, plan: LoadPlan) -> list[coordinator_pb2.RankPlan]:
        window_bytes = self._coordinator.settings.window_bytes
        steps = plan_steps(plan, chunk_bytes_for(window_bytes, plan.tp))
        plans = []
        for rank in range(plan.tp):
            totals = plan.totals(rank)
            plans.append(
                coordinator_pb2.RankPlan(
                    rank=rank,
                    source_bytes=totals.wire_bytes,
                    wire_bytes=totals.wire_bytes,
                    resident_bytes=totals.resident_bytes,
                    replicated_bytes=totals.replicated_bytes,
                    staging_peak_bytes=staging_bytes(rank_chunks(steps, rank)),
                    tensor_count=totals.tensor_count,
                )
            )
        return plans

    async def Load(
        self, request: coordinator_pb2.LoadRequest, context: _Context
    ) -> coordinator_pb2.LoadResponse:
        """Start a load."""
        record = self._coordinator.start(
            path=request.path,
            tp=request.tp,
            worker_ids=list(request.worker_ids),
            wait_seconds=request.wait_for_workers_duration.ToNanoseconds() / 1e9,
            options=_plan_options(request.options),
            allow_trailing_bytes=request.options.allow_trailing_bytes,
            request_id=request.request_id,
        )
        return coordinator_pb2.LoadResponse(load=record.message())

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
        records = self._coordinator.all()
        page, token = paginate(
            records,
            LoadRecord.order_key,
            request.page_size,
            request.page_token,
            default=100,
            maximum=1000,
        )
        return coordinator_pb2.ListLoadsResponse(
            loads=[record.message() for record in page], next_page_token=token
        )

    async def WatchLoad(
        self, request: coordinator_pb2.WatchLoadRequest, context: _Context
    ) -> AsyncIterator[coordinator_pb2.WatchLoadResponse]:
        """Send the load as it is, then changes, until it is settled."""
        record = self._coordinator.get(request.load_id)
        revision = request.after_revision
        while True:
            # A settled load is sent even to a client that has seen this revision: it ends the call.
            if not is_settled(record.state):
                await record.wait_for_change(revision)
            load = record.message()
            revision = load.revision
            yield coordinator_pb2.WatchLoadResponse(load=load)
            if is_settled(load.state):
                return
            await asyncio.sleep(WATCH_SECONDS)

    async def CancelLoad(
        self, request: coordinator_pb2.CancelLoadRequest, context: _Context
    ) -> coordinator_pb2.CancelLoadResponse:
        """End a load that is not committed."""
        record = await self._coordinator.cancel(request.load_id)
        return coordinator_pb2.CancelLoadResponse(load=record.message())

    async def Unload(
        self, request: coordinator_pb2.UnloadRequest, context: _Context
    ) -> coordinator_pb2.UnloadResponse:
        """Give a committed load back."""
        record = await self._coordinator.unload(request.load_id)
        return coordinator_pb2.UnloadResponse(load=record.message())

    async def ListWorkers(
        self, request: coordinator_pb2.ListWorkersRequest, context: _Context
    ) -> coordinator_pb2.ListWorkersResponse:
        """List workers by id."""
        page, token = paginate(
            self._coordinator.registry.all(),
            lambda worker: worker.worker_id,
            request.page_size,
            request.page_token,
            default=100,
            maximum=1000,
        )
        return coordinator_pb2.ListWorkersResponse(
            workers=[worker.message() for worker in page], next_page_token=token
        )


def _page(items: Sequence[Any], key: Any, request: Any) -> tuple[Sequence[Any], str]:
    return paginate(items, key, request.page_size, request.page_token, default=1000, maximum=10_000)


def _plan_options(options: types_pb2.PlanOptions) -> PlanOptions:
    return PlanOptions(
        tied_head=_TIED.get(options.tied_head, TiedHeadPolicy.VERIFY),
        unknown_tensors=_UNKNOWN.get(options.unknown_tensors, UnknownTensorPolicy.REFUSE),
    )


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
