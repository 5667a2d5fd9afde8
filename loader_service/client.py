"""The client of the service: typed calls, the server's own errors, pages joined.

```python
async with LoaderClient("coordinator:50051") as client:
    load = await client.load("llama-8b", tp=4)
    async for load in client.watch(load.load_id):
        print(load.state, [rank.done_bytes for rank in load.ranks])
```
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import grpc.aio

from loader_service.errors import WorkerNotFound
from loader_service.rpc import from_rpc_error, open_channel
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

_MAX_PAGE = 10_000
_SHA256_PAGE = 16
"""Tensors a page when each has to be hashed first, so that a page stays within its deadline."""

_SHA256_TIMEOUT_SECONDS = 300.0

_Response = TypeVar("_Response")


class LoaderClient:
    """Calls one coordinator. Use it as an async context manager, from one event loop.

    Every method raises the `LoaderError` that the server raised, `ServiceUnavailable` when it cannot
    be reached and `DeadlineExceeded` when it does not answer in time.
    """

    def __init__(self, endpoint: str, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        """Open a channel; nothing is sent yet.

        Args:
            endpoint: `HOST:PORT` of the coordinator.
            timeout_seconds: deadline of a call; calls that read or hash have longer ones, `watch` none.
        """
        self._timeout = timeout_seconds
        self._channel = open_channel(endpoint)
        self._stub = coordinator_pb2_grpc.CoordinatorServiceStub(self._channel)

    async def __aenter__(self) -> LoaderClient:
        """Return the client; leaving the block closes it."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the channel."""
        await self.close()

    async def close(self) -> None:
        """Close the channel; repeating it is harmless."""
        await self._channel.close()

    async def load(
        self,
        path: str,
        tp: int = 1,
        *,
        worker_ids: Sequence[str] = (),
        wait_for_workers_seconds: float = 0.0,
        options: types_pb2.PlanOptions | None = None,
        request_id: str = "",
    ) -> types_pb2.Load:
        """Start a load and return it as it was accepted; `watch` tells how it goes on.

        Args:
            path: checkpoint on the coordinator, relative to its model root or absolute inside it.
            tp: ranks of the tensor-parallel group.
            worker_ids: workers in rank order; empty lets the coordinator choose idle ones.
            wait_for_workers_seconds: how long the load may wait for idle workers.
            options: how to read and cut.
            request_id: repeating a call with the same id returns the same load.
        """
        request = coordinator_pb2.LoadRequest(
            path=path, tp=tp, worker_ids=worker_ids, options=options, request_id=request_id
        )
        request.wait_for_workers_duration.FromNanoseconds(int(wait_for_workers_seconds * 1e9))
        return (await self._call(self._stub.Load, request)).load

    async def get_load(self, load_id: str) -> types_pb2.Load:
        """Return one load."""
        request = coordinator_pb2.GetLoadRequest(load_id=load_id)
        return (await self._call(self._stub.GetLoad, request)).load

    async def list_loads(self) -> list[types_pb2.Load]:
        """Return all loads, newest first."""
        request = coordinator_pb2.ListLoadsRequest()
        return [
            load async for page in self._pages(self._stub.ListLoads, request) for load in page.loads
        ]

    async def watch(self, load_id: str) -> AsyncIterator[types_pb2.Load]:
        """Yield the load as it is, then at every change, until it serves or has ended."""
        request = coordinator_pb2.WatchLoadRequest(load_id=load_id)
        try:
            async for response in self._stub.WatchLoad(request):
                yield response.load
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def cancel(self, load_id: str) -> types_pb2.Load:
        """End a load that is not committed; return it after it has ended."""
        request = coordinator_pb2.CancelLoadRequest(load_id=load_id)
        return (await self._call(self._stub.CancelLoad, request)).load

    async def unload(self, load_id: str) -> types_pb2.Load:
        """Give a committed load back; return it after the memory is free."""
        request = coordinator_pb2.UnloadRequest(load_id=load_id)
        return (await self._call(self._stub.Unload, request)).load

    async def list_workers(self) -> list[types_pb2.Worker]:
        """Return all workers by id."""
        request = coordinator_pb2.ListWorkersRequest()
        return [
            worker
            async for page in self._pages(self._stub.ListWorkers, request)
            for worker in page.workers
        ]

    async def inspect(
        self, path: str, *, allow_trailing_bytes: bool = False
    ) -> coordinator_pb2.InspectCheckpointResponse:
        """Return a checkpoint's headers with all tensors."""
        request = coordinator_pb2.InspectCheckpointRequest(
            path=path, allow_trailing_bytes=allow_trailing_bytes, page_size=_MAX_PAGE
        )
        return await self._joined(self._stub.InspectCheckpoint, request, READING_TIMEOUT_SECONDS)

    async def plan(
        self,
        path: str,
        tp: int = 1,
        *,
        options: types_pb2.PlanOptions | None = None,
        include_tensors: bool = False,
    ) -> coordinator_pb2.PlanLoadResponse:
        """Return what a load would do, with the tensors on demand; nothing is allocated."""
        request = coordinator_pb2.PlanLoadRequest(
            path=path,
            tp=tp,
            options=options,
            include_tensors=include_tensors,
            page_size=_MAX_PAGE,
        )
        return await self._joined(self._stub.PlanLoad, request, READING_TIMEOUT_SECONDS)

    async def list_tensors(
        self, load_id: str, *, include_sha256: bool = False
    ) -> dict[int, list[types_pb2.TensorSlice]]:
        """Return the slices of a committed load by rank, as the workers themselves report them."""
        load = await self.get_load(load_id)
        workers = {worker.worker_id: worker.address for worker in await self.list_workers()}
        request = worker_pb2.ListTensorsRequest(
            load_id=load_id,
            include_sha256=include_sha256,
            page_size=_SHA256_PAGE if include_sha256 else _MAX_PAGE,
        )
        timeout = max(self._timeout, _SHA256_TIMEOUT_SECONDS) if include_sha256 else self._timeout
        slices: dict[int, list[types_pb2.TensorSlice]] = {}
        for rank in load.ranks:
            if rank.worker_id not in workers:
                raise WorkerNotFound(
                    f"worker {rank.worker_id!r} of load {load_id} has left",
                    worker_id=rank.worker_id,
                )
            async with open_channel(workers[rank.worker_id]) as channel:
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                slices[rank.rank] = [
                    tensor
                    async for page in self._pages(stub.ListTensors, request, timeout)
                    for tensor in page.tensors
                ]
        return slices

    async def _call(
        self,
        method: Callable[..., Awaitable[_Response]],
        request: Any,
        timeout: float | None = None,
    ) -> _Response:
        try:
            return await method(request, timeout=timeout or self._timeout)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def _pages(
        self, method: Callable[..., Awaitable[Any]], request: Any, timeout: float | None = None
    ) -> AsyncIterator[Any]:
        """Yield the pages of a list."""
        request = type(request).FromString(request.SerializeToString())
        while True:
            page = await self._call(method, request, timeout)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def _joined(
        self, method: Callable[..., Awaitable[_Response]], request: Any, timeout: float
    ) -> _Response:
        """Return the first page with the tensors of all others."""
        first: Any = None
        async for page in self._pages(method, request, max(self._timeout, timeout)):
            if first is None:
                first = page
            else:
                first.tensors.extend(page.tensors)
        first.next_page_token = ""
        joined: _Response = first
        return joined
