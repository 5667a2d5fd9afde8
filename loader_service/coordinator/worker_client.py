"""The coordinator's calls to one worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import grpc.aio

from loader_service.errors import DeadlineExceeded, LoaderError, ServiceUnavailable, WorkerLost
from loader_service.rpc import from_rpc_error, open_channel
from loader_service.v1 import worker_pb2, worker_pb2_grpc

__all__ = ["ConnectWorker", "GrpcWorkerClient", "WorkerClient"]


class WorkerClient(Protocol):
    """What the coordinator asks of a worker. Errors are those of the worker, or `WorkerLost`."""

    async def prepare(
        self, pages: Iterable[worker_pb2.PrepareLoadRequest]
    ) -> worker_pb2.PrepareLoadResponse:
        """Send a manifest; the worker allocates and listens."""
        ...

    async def commit(self, load_id: str) -> None:
        """Make a verified load visible."""
        ...

    async def abort(self, load_id: str) -> None:
        """End a load and free what it holds."""
        ...

    async def close(self) -> None:
        """Give the channel back."""
        ...


ConnectWorker = Callable[[str, str], WorkerClient]
"""(worker id, address) -> client."""

PREPARE_SECONDS = 60.0
CALL_SECONDS = 2.0


class GrpcWorkerClient:
    """Calls over gRPC."""

    def __init__(self, worker_id: str, address: str) -> None:
        """Open a channel; nothing is sent yet."""
        self._worker_id = worker_id
        self._channel = open_channel(address)
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)

    async def prepare(
        self, pages: Iterable[worker_pb2.PrepareLoadRequest]
    ) -> worker_pb2.PrepareLoadResponse:
        """Send a manifest; the worker allocates and listens."""
        try:
            return await self._stub.PrepareLoad(_iterate(pages), timeout=PREPARE_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error

    async def commit(self, load_id: str) -> None:
        """Make a verified load visible."""
        request = worker_pb2.CommitLoadRequest(load_id=load_id)
        try:
            await self._stub.CommitLoad(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error

    async def abort(self, load_id: str) -> None:
        """End a load and free what it holds."""
        request = worker_pb2.AbortLoadRequest(load_id=load_id)
        try:
            await self._stub.AbortLoad(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error

    async def close(self) -> None:
        """Give the channel back."""
        await self._channel.close()

    def _translate(self, error: grpc.aio.AioRpcError) -> LoaderError:
        failure = from_rpc_error(error)
        if isinstance(failure, ServiceUnavailable | DeadlineExceeded):
            return WorkerLost(
                f"worker {self._worker_id!r} does not answer: {failure.message}",
                worker_id=self._worker_id,
            )
        return failure


def _iterate(
    pages: Iterable[worker_pb2.PrepareLoadRequest],
) -> Iterator[worker_pb2.PrepareLoadRequest]:
    yield from pages
