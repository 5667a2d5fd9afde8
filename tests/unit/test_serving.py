"""What a server does around every call, over real servers on a loopback port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loader_service import errors
from loader_service.channel import from_rpc_error
from loader_service.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    LoaderError,
    ServiceUnavailable,
)
from loader_service.serving.options import ServingOptions
from loader_service.serving.server import Server
from loader_service.v1 import coordinator_pb2, coordinator_pb2_grpc, worker_pb2, worker_pb2_grpc

CLASSES = [
    getattr(errors, name)
    for name in errors.__all__
    if isinstance(getattr(errors, name), type) and name != "LoaderError"
]

Stub = coordinator_pb2_grpc.CoordinatorServiceStub


class Raising(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Raises what a test says; `WatchLoad` first sends one answer."""

    def __init__(self) -> None:
        self.error: BaseException = RuntimeError()

    async def GetLoad(self, request: Any, context: Any) -> Any:
        if request.load_id == "slow":
            await asyncio.sleep(5)
        raise self.error

    async def WatchLoad(self, request: Any, context: Any) -> Any:
        yield coordinator_pb2.WatchLoadResponse()
        raise self.error

    async def ListLoads(self, request: Any, context: Any) -> Any:
        return coordinator_pb2.ListLoadsResponse(next_page_token="fine")


class RaisingWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Reads a manifest and raises."""

    def __init__(self, other: Raising) -> None:
        self._other = other

    async def PrepareLoad(self, request_iterator: Any, context: Any) -> Any:
        async for _ in request_iterator:
            raise self._other.error


class Served:
    """A server with its channel."""

    def __init__(
        self, server: Server, servicer: Raising, address: str, channel: grpc.aio.Channel
    ) -> None:
        self.server = server
        self.servicer = servicer
        self.address = address
        self.coordinator = Stub(channel)
        self.worker = worker_pb2_grpc.WorkerServiceStub(channel)

    async def call(self, verb: str) -> None:
        """Call a method with one answer, with many, or with many requests."""
        match verb:
            case "unary":
                await self.coordinator.GetLoad(coordinator_pb2.GetLoadRequest(), timeout=5)
            case "answers":
                request = coordinator_pb2.WatchLoadRequest()
                async for _ in self.coordinator.WatchLoad(request, timeout=5):
                    pass
            case "requests":
                page = worker_pb2.PrepareLoadRequest()
                await self.worker.PrepareLoad(iter([page]), timeout=5)

    async def failure(self, verb: str) -> LoaderError:
        """Call and return what comes back."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.call(verb)
        return from_rpc_error(caught.value)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    server = Server(["loader_service.v1.CoordinatorService"], ServingOptions())
    servicer = Raising()  # type: ignore[abstract] # only the tested methods are there
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, server.grpc)
    worker = RaisingWorker(servicer)  # type: ignore[abstract]
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server.grpc)
    address = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(address) as channel:
        yield Served(server, servicer, address, channel)
    await server.grpc.stop(None)


VERBS = ("unary", "answers", "requests")


# ---------------------------------------------------------------- errors


async def test_every_class_arrives_with_reason_message_and_facts(served: Served) -> None:
    for kind in CLASSES:
        sent = kind("wörds about it", tensor="ä", rank=2)
        served.servicer.error = sent
        for verb in VERBS:
            told = await served.failure(verb)
            assert type(told) is kind
            assert (told.reason, told.message) == (sent.reason, "wörds about it")
            assert told.metadata == {"tensor": "ä", "rank": "2"}


@pytest.mark.parametrize("verb", VERBS)
async def test_a_reason_of_its_own_arrives(verb: str, served: Served) -> None:
    served.servicer.error = InvalidRequest("bad", reason="INVALID_MANIFEST")
    told = await served.failure(verb)
    assert (type(told), told.reason) == (InvalidRequest, "INVALID_MANIFEST")


async def test_the_status_code_is_that_of_the_class(served: Served) -> None:
    for kind in CLASSES:
        served.servicer.error = kind("x")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.coordinator.GetLoad(coordinator_pb2.GetLoadRequest(), timeout=5)
        assert caught.value.code() == kind.status


@pytest.mark.parametrize("verb", VERBS)
async def test_any_other_exception_is_internal_and_named(verb: str, served: Served) -> None:
    served.servicer.error = ZeroDivisionError("oops")
    told = await served.failure(verb)
    assert (type(told), told.reason) == (InternalError, "INTERNAL")
    assert told.message == "ZeroDivisionError: oops"


async def test_an_answer_passes_through_unchanged(served: Served) -> None:
    answer = await served.coordinator.ListLoads(coordinator_pb2.ListLoadsRequest(), timeout=5)
    assert answer.next_page_token == "fine"


async def test_a_method_without_an_implementation_is_a_fault(served: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.coordinator.Unload(coordinator_pb2.UnloadRequest(), timeout=5)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert isinstance(from_rpc_error(caught.value), InternalError)


@pytest.mark.parametrize("verb", VERBS)
async def test_a_file_system_that_times_out_is_no_deadline(verb: str, served: Served) -> None:
    served.servicer.error = TimeoutError(110, "Connection timed out")
    told = await served.failure(verb)
    assert (type(told), told.message) == (
        InternalError,
        "TimeoutError: [Errno 110] Connection timed out",
    )


async def test_an_answer_that_does_not_come_in_time_is_a_deadline(served: Served) -> None:
    request = coordinator_pb2.GetLoadRequest(load_id="slow")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.coordinator.GetLoad(request, timeout=0.1)
    assert type(from_rpc_error(caught.value)) is DeadlineExceeded


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Stub(channel).GetLoad(coordinator_pb2.GetLoadRequest(), timeout=5)
    assert type(from_rpc_error(caught.value)) is ServiceUnavailable


async def test_a_port_that_is_taken_is_refused_by_its_address(served: Served) -> None:
    with pytest.raises(ServiceUnavailable, match=served.address) as caught:
        await Server([], ServingOptions()).start(served.address)
    assert caught.value.reason == "CANNOT_LISTEN"


async def test_a_service_serves_when_its_owner_says_so(served: Served) -> None:
    name = "loader_service.v1.CoordinatorService"
    async with grpc.aio.insecure_channel(served.address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)

        async def status(service: str) -> str:
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

        assert [await status(""), await status(name)] == ["SERVING", "NOT_SERVING"]
        await served.server.report(name, serving=True)
        assert await status(name) == "SERVING"
