"""The client for ordinary code. Made from `_async.py` by `make generate`; do not edit."""

from __future__ import annotations

import uuid
from collections.abc import Generator, Iterator, Sequence
from types import TracebackType
from typing import Any

import grpc

from loader_service.channel import SyncEndpoint
from loader_service.channel_security import ChannelSecurity
from loader_service.errors import LoaderError, ServiceUnavailable, WorkerLost, WrongState
from loader_service.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)

__all__ = ["LoaderClient"]

DEFAULT_TIMEOUT_SECONDS = 10.0
READING_TIMEOUT_SECONDS = 60.0
"""Deadline of calls that read a checkpoint's headers, which may lie on slow storage."""

SHA256_TIMEOUT_SECONDS = 300.0
"""Deadline of calls that hash tensors."""

_HOLDING = (types_pb2.LOAD_STATE_SUCCEEDED, types_pb2.LOAD_STATE_DEGRADED)
"""States in which workers hold a load for others to see."""

_MAX_PAGE = 10_000
_SHA256_PAGE = 16
"""Tensors a page when each has to be hashed first, so that a page stays within its deadline."""


class LoaderClient:
    """Calls one coordinator; threads may share it. A context manager.

    Every method raises the `LoaderError` that the server raised, `ServiceUnavailable` when it cannot
    be reached, `DeadlineExceeded` when it does not answer in time, and `Unauthenticated` when one
    side does not accept the other. Calls that fail because the server cannot be reached are tried
    again for about a second; what changes something carries a request id, so that it happens once.
    """

    def __init__(
        self,
        endpoint: str,
        timeout_seconds: float | None = None,
        security: ChannelSecurity | None = None,
    ) -> None:
        """Describe the coordinator; nothing is sent yet.

        Args:
            endpoint: `HOST:PORT` of the coordinator.
            timeout_seconds: deadline of a call; None is 10 s, and longer for calls that read or hash.
                Those that follow something have none.
            security: TLS and token; None is for a coordinator on this machine that wants neither.

        Raises:
            InvalidRequest: the endpoint is no address, or a token would travel in the clear.
        """
        self._timeout = timeout_seconds
        self._security = security or ChannelSecurity()
        self._coordinator = SyncEndpoint(
            endpoint, self._security, coordinator_pb2_grpc.CoordinatorServiceStub
        )

    def __enter__(self) -> LoaderClient:
        """Return the client; leaving the block closes it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the client."""
        self.close()

    def close(self) -> None:
        """Close the connection; repeating it is harmless."""
        self._coordinator.close()

    # Loads

    def load(
        self,
        path: str,
        tp: int = 1,
        *,
        worker_ids: Sequence[str] = (),
        wait_for_workers_seconds: float = 0.0,
        options: types_pb2.PlanOptions | None = None,
        source: types_pb2.WeightSource.ValueType = types_pb2.WEIGHT_SOURCE_AUTO,
        request_id: str = "",
    ) -> types_pb2.Load:
        """Start a load and return it as it was accepted; `watch` tells how it goes on.

        Args:
            path: checkpoint on the coordinator, relative to its model root or absolute inside it.
            tp: ranks of the tensor-parallel group.
            worker_ids: workers in rank order; empty lets the coordinator choose idle ones.
            wait_for_workers_seconds: how long the load may wait for idle workers.
            options: how to read and cut.
            source: where the bytes may come from, the coordinator or the workers' own reading.
            request_id: repeating a call with the same id returns the same load; empty makes one up.
        """
        request = coordinator_pb2.LoadRequest(
            path=path,
            tp=tp,
            worker_ids=worker_ids,
            options=options,
            request_id=request_id or _new_id(),
            source=source,
        )
        request.wait_for_workers_duration.FromNanoseconds(int(wait_for_workers_seconds * 1e9))
        answer: coordinator_pb2.LoadResponse = self._call(self._coordinator, "Load", request)
        return answer.load

    def get_load(self, load_id: str) -> types_pb2.Load:
        """Return one load."""
        request = coordinator_pb2.GetLoadRequest(load_id=load_id)
        answer: coordinator_pb2.GetLoadResponse = self._call(self._coordinator, "GetLoad", request)
        return answer.load

    def list_loads(self) -> list[types_pb2.Load]:
        """Return all loads, newest first."""
        request = coordinator_pb2.ListLoadsRequest()
        pages = self._pages(self._coordinator, "ListLoads", request)
        return [load for page in pages for load in page.loads]

    def watch(
        self, load_id: str, *, cancel_when_gone: bool = False
    ) -> Generator[types_pb2.Load, None, None]:
        """Yield the load as it is, then at every change, until it serves or has ended.

        A connection that breaks on the way is opened again. What was yielded before the break is not
        repeated, but for the last one: one that breaks before the end of the call arrives makes the
        coordinator tell again how the load has ended.

        Args:
            load_id: name of the load.
            cancel_when_gone: have the coordinator cancel the load when this caller goes away, however
                it goes, before the load serves or has ended.
        """
        request = coordinator_pb2.WatchLoadRequest(
            load_id=load_id, cancel_when_gone=cancel_when_gone
        )
        while True:
            advanced = False
            try:
                with self._coordinator.lend() as stub:
                    call = stub.WatchLoad(request, metadata=self._coordinator.metadata(_new_id()))
                    try:
                        for response in call:
                            request.after_revision = response.load.revision
                            advanced = True
                            yield response.load
                        return
                    finally:
                        call.cancel()
            except grpc.RpcError as error:
                failure = self._coordinator.translate(error)
                if not (advanced and isinstance(failure, ServiceUnavailable)):
                    raise failure from error

    def cancel(self, load_id: str, *, request_id: str = "") -> types_pb2.Load:
        """End a load that is not committed; return it after it has ended."""
        request = coordinator_pb2.CancelLoadRequest(
            load_id=load_id, request_id=request_id or _new_id()
        )
        answer: coordinator_pb2.CancelLoadResponse = self._call(
            self._coordinator, "CancelLoad", request
        )
        return answer.load

    def unload(self, load_id: str, *, request_id: str = "") -> types_pb2.Load:
        """Give a committed load back; return it after the memory is free."""
        request = coordinator_pb2.UnloadRequest(load_id=load_id, request_id=request_id or _new_id())
        answer: coordinator_pb2.UnloadResponse = self._call(self._coordinator, "Unload", request)
        return answer.load

    def list_tensors(
        self, load_id: str, *, include_sha256: bool = False
    ) -> dict[int, list[types_pb2.TensorSlice]]:
        """Return the slices of a committed load by rank, as the workers themselves report them.

        Raises:
            WrongState: the load is neither SUCCEEDED nor DEGRADED, so that nobody holds it.
            WorkerLost: a rank's worker does not answer.
        """
        load = self.get_load(load_id)
        if load.state not in _HOLDING:
            state = types_pb2.LoadState.Name(load.state).removeprefix("LOAD_STATE_")
            raise WrongState(
                f"load {load_id} is {state}; its tensors can be listed while it is SUCCEEDED or "
                "DEGRADED",
                load_id=load_id,
                state=state,
            )
        workers = {worker.worker_id: worker.address for worker in self.list_workers()}
        request = worker_pb2.ListTensorsRequest(
            load_id=load_id,
            include_sha256=include_sha256,
            page_size=_SHA256_PAGE if include_sha256 else _MAX_PAGE,
        )
        usual = SHA256_TIMEOUT_SECONDS if include_sha256 else DEFAULT_TIMEOUT_SECONDS
        slices: dict[int, list[types_pb2.TensorSlice]] = {}
        for rank in load.ranks:
            if rank.worker_id not in workers or rank.state == types_pb2.RANK_STATE_LOST:
                raise _lost(load_id, rank, "is lost")
            worker = SyncEndpoint(
                workers[rank.worker_id],
                self._security.for_other_servers(),
                worker_pb2_grpc.WorkerServiceStub,
            )
            try:
                pages = self._pages(worker, "ListTensors", request, usual)
                slices[rank.rank] = [tensor for page in pages for tensor in page.tensors]
            except ServiceUnavailable as error:
                raise _lost(load_id, rank, f"does not answer: {error.message}") from error
            except LoaderError as error:
                error.message = f"worker {rank.worker_id!r}: {error.message}"
                error.metadata.setdefault("worker_id", rank.worker_id)
                raise
            finally:
                worker.close()
        return slices

    # Workers

    def list_workers(self) -> list[types_pb2.Worker]:
        """Return all workers by id."""
        request = coordinator_pb2.ListWorkersRequest()
        pages = self._pages(self._coordinator, "ListWorkers", request)
        return [worker for page in pages for worker in page.workers]

    def get_worker(self, worker_id: str) -> types_pb2.Worker:
        """Return one worker."""
        request = coordinator_pb2.GetWorkerRequest(worker_id=worker_id)
        answer: coordinator_pb2.GetWorkerResponse = self._call(
            self._coordinator, "GetWorker", request
        )
        return answer.worker

    def drain_worker(self, worker_id: str, *, request_id: str = "") -> types_pb2.Worker:
        """Give a worker no new load; one that it holds stays."""
        request = coordinator_pb2.DrainWorkerRequest(
            worker_id=worker_id, request_id=request_id or _new_id()
        )
        answer: coordinator_pb2.DrainWorkerResponse = self._call(
            self._coordinator, "DrainWorker", request
        )
        return answer.worker

    def undrain_worker(self, worker_id: str, *, request_id: str = "") -> types_pb2.Worker:
        """Let a drained worker take loads again."""
        request = coordinator_pb2.UndrainWorkerRequest(
            worker_id=worker_id, request_id=request_id or _new_id()
        )
        answer: coordinator_pb2.UndrainWorkerResponse = self._call(
            self._coordinator, "UndrainWorker", request
        )
        return answer.worker

    # Checkpoints

    def inspect(
        self, path: str, *, allow_trailing_bytes: bool = False
    ) -> coordinator_pb2.InspectCheckpointResponse:
        """Return a checkpoint's headers with all tensors."""
        request = coordinator_pb2.InspectCheckpointRequest(
            path=path, allow_trailing_bytes=allow_trailing_bytes, page_size=_MAX_PAGE
        )
        joined = coordinator_pb2.InspectCheckpointResponse()
        for page in self._pages(
            self._coordinator, "InspectCheckpoint", request, READING_TIMEOUT_SECONDS
        ):
            _join(joined, page)
        return joined

    def plan(
        self,
        path: str,
        tp: int = 1,
        *,
        worker_ids: Sequence[str] = (),
        options: types_pb2.PlanOptions | None = None,
        include_tensors: bool = False,
    ) -> coordinator_pb2.PlanLoadResponse:
        """Return what a load would do and whether it would be admitted; nothing is allocated."""
        request = coordinator_pb2.PlanLoadRequest(
            path=path,
            tp=tp,
            worker_ids=worker_ids,
            options=options,
            include_tensors=include_tensors,
            page_size=_MAX_PAGE,
        )
        joined = coordinator_pb2.PlanLoadResponse()
        for page in self._pages(self._coordinator, "PlanLoad", request, READING_TIMEOUT_SECONDS):
            _join(joined, page)
        return joined

    # Calls

    def _call(
        self,
        endpoint: SyncEndpoint,
        method: str,
        request: Any,
        usual_timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> Any:
        """Make one call; its deadline is the client's, or the usual one where it has none."""
        timeout = usual_timeout if self._timeout is None else self._timeout
        # One id in the server's log and in the caller's hands, where the caller has chosen it.
        given = getattr(request, "request_id", "")
        # What a header cannot carry is for the request alone.
        name = given if given.isascii() and given.isprintable() else ""
        return endpoint.call(method, request, timeout, name or _new_id())

    def _pages(
        self,
        endpoint: SyncEndpoint,
        method: str,
        request: Any,
        usual_timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> Iterator[Any]:
        """Yield the pages of a list."""
        request = type(request).FromString(request.SerializeToString())
        while True:
            page = self._call(endpoint, method, request, usual_timeout)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token


def _lost(load_id: str, rank: types_pb2.RankProgress, how: str) -> WorkerLost:
    return WorkerLost(
        f"worker {rank.worker_id!r}, which holds rank {rank.rank} of load {load_id}, {how}",
        load_id=load_id,
        worker_id=rank.worker_id,
        rank=rank.rank,
    )


def _new_id() -> str:
    return uuid.uuid4().hex


def _join(joined: Any, page: Any) -> None:
    """Add a page's tensors to those of the pages before; everything else is the same on each."""
    if joined.ByteSize():
        joined.tensors.extend(page.tensors)
    else:
        joined.MergeFrom(page)
    joined.next_page_token = ""
