"""The coordinator's calls to one worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from loader_service.channel import AsyncEndpoint
from loader_service.channel_security import ChannelSecurity
from loader_service.errors import (
    AccessDenied,
    DeadlineExceeded,
    LoaderError,
    ServiceUnavailable,
    Unauthenticated,
    WorkerLost,
)
from loader_service.v1 import worker_pb2, worker_pb2_grpc

__all__ = ["ConnectWorker", "GrpcWorkerClient", "WorkerClient"]


class WorkerClient(Protocol):
    """What the coordinator asks of a worker. Errors are those of the worker, or `WorkerLost`."""

    async def incarnation(self) -> str:
        """Ask which life of a worker process answers."""
        ...

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
PROBE_SECONDS = 1.0


class GrpcWorkerClient:
    """Calls over gRPC."""

    def __init__(self, worker_id: str, address: str, security: ChannelSecurity) -> None:
        """Describe the worker; nothing is sent yet.

        Raises:
            InvalidRequest: the address is none, or a token would travel in the clear.
        """
        self._worker_id = worker_id
        self._endpoint = AsyncEndpoint(address, security, worker_pb2_grpc.WorkerServiceStub)

    async def incarnation(self) -> str:
        """Ask which life of a worker process answers."""
        answer = await self._call("GetStatus", worker_pb2.GetStatusRequest(), PROBE_SECONDS)
        return str(answer.status.incarnation)

    async def prepare(
        self, pages: Iterable[worker_pb2.PrepareLoadRequest]
    ) -> worker_pb2.PrepareLoadResponse:
        """Send a manifest; the worker allocates and listens."""
        answer: worker_pb2.PrepareLoadResponse = await self._call(
            "PrepareLoad", pages, PREPARE_SECONDS
        )
        return answer

    async def commit(self, load_id: str) -> None:
        """Make a verified load visible."""
        await self._call("CommitLoad", worker_pb2.CommitLoadRequest(load_id=load_id), CALL_SECONDS)

    async def abort(self, load_id: str) -> None:
        """End a load and free what it holds."""
        await self._call("AbortLoad", worker_pb2.AbortLoadRequest(load_id=load_id), CALL_SECONDS)

    async def close(self) -> None:
        """Give the channel back."""
        await self._endpoint.close()

    async def _call(self, method: str, request: object, timeout: float) -> Any:
        try:
            return await self._endpoint.call(method, request, timeout)
        except LoaderError as error:
            raise self._translated(error) from error

    def _translated(self, failure: LoaderError) -> LoaderError:
        if isinstance(failure, ServiceUnavailable | DeadlineExceeded):
            return WorkerLost(
                f"worker {self._worker_id!r} does not answer: {failure.message}",
                worker_id=self._worker_id,
            )
        if isinstance(failure, Unauthenticated | AccessDenied):
            failure.message = f"worker {self._worker_id!r}: {failure.message}"
        failure.metadata.setdefault("worker_id", self._worker_id)
        return failure
