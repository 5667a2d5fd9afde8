"""A coordinator's gRPC side in this process; its workers and its streamer are played by the test."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from loader_service.channel_security import ChannelSecurity
from loader_service.client import AsyncLoaderClient
from loader_service.clock import SystemClock
from loader_service.coordinator.coordinator import Coordinator
from loader_service.coordinator.servicer import CoordinatorServicer
from loader_service.coordinator.settings import Settings
from loader_service.errors import LoaderError, WorkerLost
from loader_service.serving.options import ServingOptions
from loader_service.serving.server import Server
from loader_service.stream.jobs import Event, StartStream, StreamConnected, StreamProgress
from loader_service.v1 import coordinator_pb2, coordinator_pb2_grpc, types_pb2, worker_pb2
from loader_service.version import PROTOCOL_VERSION

SERVICE = "loader_service.v1.CoordinatorService"
ONE_RANK = types_pb2.PlanOptions(unknown_tensors=types_pb2.UNKNOWN_TENSOR_POLICY_REPLICATE)
MODEL_BYTES = 100_000


class PlayedWorker:
    """A worker as the coordinator's calls see it."""

    def __init__(self, plane: ControlPlane, worker_id: str) -> None:
        self._plane = plane
        self._worker_id = worker_id

    async def incarnation(self) -> str:
        # As a call does: others may come in between.
        await asyncio.sleep(0)
        life = self._plane.alive.get(self._worker_id)
        if life is None:
            raise WorkerLost("nobody answers", worker_id=self._worker_id)
        return life

    async def prepare(
        self, pages: Iterable[worker_pb2.PrepareLoadRequest]
    ) -> worker_pb2.PrepareLoadResponse:
        header, *_ = pages
        self._plane.holding[self._worker_id] = header.header.load_id
        return worker_pb2.PrepareLoadResponse(data_host="host", data_port=1, token=b"t")

    async def commit(self, load_id: str) -> None:
        assert self._plane.holding[self._worker_id] == load_id

    async def abort(self, load_id: str) -> None:
        if self._worker_id not in self._plane.alive:
            raise WorkerLost("nobody answers", worker_id=self._worker_id)
        if self._plane.holding.get(self._worker_id) == load_id:
            del self._plane.holding[self._worker_id]

    async def close(self) -> None:
        pass


class PlayedStream:
    """One load in the streamer; the test says what arrives."""

    def __init__(self, job: StartStream, on_event: Callable[[Event], None]) -> None:
        self.job = job
        self.totals = [job.plan.totals(rank).wire_bytes for rank in range(job.plan.tp)]
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_event = on_event

    def connect(self) -> None:
        self._on_event(StreamConnected(self.job.load_id, ("tcp",) * self.job.plan.tp))

    def land(self, *shares: float) -> None:
        """Say which share of each rank has landed."""
        done = [int(share * total) for share, total in zip(shares, self.totals, strict=True)]
        verified = tuple(share == 1.0 for share in shares)
        self._on_event(StreamProgress(self.job.load_id, tuple(done), verified))

    def finish(self) -> None:
        self.land(*(1.0 for _ in self.totals))
        self.ended.set_result(None)

    def fail(self, error: LoaderError) -> None:
        self.ended.set_exception(error)


class ControlPlane:
    """A served coordinator.

    Attributes:
        alive: incarnation of every worker that answers, by worker id.
        holding: load that a worker holds something of, by worker id.
    """

    def __init__(self, server: Server, coordinator: Coordinator) -> None:
        self.server = server
        self.coordinator = coordinator
        self.address = ""
        self.alive: dict[str, str] = {}
        self.holding: dict[str, str] = {}
        self._streams: asyncio.Queue[PlayedStream] = asyncio.Queue()

    def connect(self, worker_id: str, address: str) -> PlayedWorker:
        return PlayedWorker(self, worker_id)

    async def stream(self, job: StartStream, on_event: Callable[[Event], None]) -> None:
        played = PlayedStream(job, on_event)
        self._streams.put_nowait(played)
        await played.ended

    async def next_stream(self) -> PlayedStream:
        """Return the next load that reaches the streamer, with all ranks connected."""
        async with asyncio.timeout(5):
            stream = await self._streams.get()
        stream.connect()
        return stream

    async def register(self, worker_id: str, incarnation: str = "life-1", **fields: Any) -> None:
        """Register an idle worker with plenty of memory."""
        request = registration(worker_id, incarnation, **fields)
        self.alive[worker_id] = incarnation
        await self.coordinator.register(request)

    async def heartbeat(
        self, worker_id: str, *loads: coordinator_pb2.WorkerLoad, incarnation: str = "life-1"
    ) -> list[str]:
        """Send a heartbeat, and return the loads to release."""
        return self.coordinator.heartbeat(
            coordinator_pb2.HeartbeatRequest(
                worker_id=worker_id,
                incarnation=incarnation,
                memory=types_pb2.MemoryUsage(free_bytes=1 << 40),
                loads=loads,
            )
        )


def registration(
    worker_id: str, incarnation: str = "life-1", **fields: Any
) -> coordinator_pb2.RegisterWorkerRequest:
    """Return what an idle worker registers with."""
    defaults: dict[str, Any] = {
        "address": f"{worker_id}:1",
        "host": "host",
        "device": "numpy",
        "protocol_version": PROTOCOL_VERSION,
        "package_version": "0",
        "memory": types_pb2.MemoryUsage(free_bytes=1 << 40),
    }
    return coordinator_pb2.RegisterWorkerRequest(
        worker_id=worker_id, incarnation=incarnation, **{**defaults, **fields}
    )


@contextlib.asynccontextmanager
async def control_plane(
    model_root: Path,
    *,
    workers: Sequence[str] = (),
    serving: ServingOptions | None = None,
    listen: str = "127.0.0.1:0",
    **settings: Any,
) -> AsyncIterator[ControlPlane]:
    """Serve a coordinator, on a free port unless one is named, until the block ends."""
    server = Server([SERVICE], serving or ServingOptions())

    # The coordinator calls back into what is made around it.
    def connect(worker_id: str, address: str) -> PlayedWorker:
        return plane.connect(worker_id, address)

    async def stream(job: StartStream, on_event: Callable[[Event], None]) -> None:
        await plane.stream(job, on_event)

    defaults: dict[str, Any] = {"lease_seconds": 60.0, "heartbeat_seconds": 0.2}
    coordinator = Coordinator(
        Settings(model_root=str(model_root), **{**defaults, **settings}),
        SystemClock(),
        connect,
        stream,
    )
    plane = ControlPlane(server, coordinator)
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(
        CoordinatorServicer(coordinator), server.grpc
    )
    plane.address = await server.start(listen)
    watching = asyncio.create_task(coordinator.watch())
    try:
        for worker_id in workers:
            await plane.register(worker_id)
        yield plane
    finally:
        watching.cancel()
        await coordinator.close()
        await server.stop()


async def last_of(client: AsyncLoaderClient, load_id: str) -> types_pb2.Load:
    """Follow a load to its end."""
    return [load async for load in client.watch(load_id)][-1]


async def refusal(address: str, security: ChannelSecurity) -> LoaderError:
    """Return why a call is refused; it takes less than 3 s to know."""
    started = time.monotonic()
    async with AsyncLoaderClient(address, security=security) as client:
        with pytest.raises(LoaderError) as caught:
            await client.list_workers()
    assert time.monotonic() - started < 3.0
    return caught.value


async def succeeds(address: str, security: ChannelSecurity) -> bool:
    """Whether a call is answered."""
    async with AsyncLoaderClient(address, security=security) as client:
        return len(await client.list_workers()) == 1


async def reflected_services(channel: grpc.aio.Channel) -> set[str]:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async for answer in stub.ServerReflectionInfo(iter([request])):
        return {service.name for service in answer.list_services_response.service}
    return set()


async def begin(client: AsyncLoaderClient, tp: int = 2, **arguments: Any) -> types_pb2.Load:
    """Begin to load the fixture's model."""
    return await client.load("model", tp, options=ONE_RANK, **arguments)


async def state_of(client: AsyncLoaderClient, load_id: str) -> str:
    """Return the state of a load, without its prefix."""
    load = await client.get_load(load_id)
    return types_pb2.LoadState.Name(load.state).removeprefix("LOAD_STATE_")


async def until(ready: Any, seconds: float = 3.0) -> None:
    """Return once awaiting `ready()` gives something true."""
    async with asyncio.timeout(seconds):
        while not await ready():  # noqa: ASYNC110 - what is awaited lies behind a call
            await asyncio.sleep(0.01)
