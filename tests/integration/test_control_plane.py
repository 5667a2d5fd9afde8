"""The coordinator's services as clients and workers meet them, over real gRPC.

Workers and streamer are played, so that a test decides what happens when. Names in brackets are those
of reported trouble, see the cases of the project.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from loader_service.channel import from_rpc_error
from loader_service.client import AsyncLoaderClient, LoaderClient
from loader_service.coordinator.planning import PlannedLoad
from loader_service.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    LoadNotFound,
    OutOfMemory,
    QuotaExceeded,
    ServiceUnavailable,
    VersionSkew,
    WorkerBusy,
    WorkerLost,
    WorkerNotFound,
    WorkerSuperseded,
)
from loader_service.v1 import coordinator_pb2, coordinator_pb2_grpc, types_pb2
from loader_service.version import PROTOCOL_VERSION
from tests.checkpoints import random_tensor, write_file
from tests.control_plane import ControlPlane, control_plane, last_of, registration

ONE_RANK = types_pb2.PlanOptions(unknown_tensors=types_pb2.UNKNOWN_TENSOR_POLICY_REPLICATE)
SIZE = 100_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_file(folder / "model.safetensors", [random_tensor("t", "U8", (SIZE,))])
    return folder


@pytest.fixture
async def plane(model: Path) -> AsyncIterator[ControlPlane]:
    async with control_plane(
        model.parent, workers=["w0", "w1", "w2", "w3"], stall_seconds=0.3
    ) as running:
        yield running


@pytest.fixture
async def client(plane: ControlPlane) -> AsyncIterator[AsyncLoaderClient]:
    async with AsyncLoaderClient(plane.address) as connected:
        yield connected


async def begin(client: AsyncLoaderClient, tp: int = 2, **arguments: Any) -> types_pb2.Load:
    return await client.load("model", tp, options=ONE_RANK, **arguments)


async def state_of(client: AsyncLoaderClient, load_id: str) -> str:
    load = await client.get_load(load_id)
    return types_pb2.LoadState.Name(load.state).removeprefix("LOAD_STATE_")


async def until(ready: Any, seconds: float = 3.0) -> None:
    async with asyncio.timeout(seconds):
        while not await ready():  # noqa: ASYNC110 - what is awaited lies behind a call
            await asyncio.sleep(0.01)


# ---------------------------------------------------------------- progress


async def test_a_rank_that_stands_still_is_stalled_until_it_moves_again(
    plane: ControlPlane, client: AsyncLoaderClient
) -> None:
    """Progress is that of the slowest rank, and 1 is sent once, last (F02)."""
    load = await begin(client)
    stream = await plane.next_stream()
    seen: list[types_pb2.Load] = []

    async def follow() -> None:
        async for now in client.watch(load.load_id):
            seen[len(seen) :] = [now]

    watching = asyncio.create_task(follow())
    stream.land(0.5, 0.2)
    await asyncio.sleep(0.2)
    stream.land(1.0, 0.9)

    async def stalled() -> bool:
        return any(rank.stalled for load in seen for rank in load.ranks)

    await until(stalled)
    (late,) = {rank.rank for rank in seen[-1].ranks if rank.stalled}
    assert late == 1
    assert seen[-1].slowest_rank == 1
    assert seen[-1].ranks[1].idle_duration.ToNanoseconds() >= 0.3e9
    assert 0.8 < seen[-1].progress <= 0.9
    stream.land(1.0, 0.95)

    async def moving() -> bool:
        return not any(rank.stalled for rank in seen[-1].ranks)

    await until(moving)
    stream.finish()
    await watching
    assert [load.progress for load in seen].count(1.0) == 1
    assert seen[-1].progress == 1.0
    assert seen[-1].state == types_pb2.LOAD_STATE_SUCCEEDED
    assert [load.revision for load in seen] == sorted({load.revision for load in seen})
    assert [rank.state for rank in seen[-1].ranks] == [types_pb2.RANK_STATE_COMMITTED] * 2


async def test_the_time_left_is_estimated_from_the_rate_of_the_last_rank(
    plane: ControlPlane, client: AsyncLoaderClient
) -> None:
    load = await begin(client)
    stream = await plane.next_stream()
    # A tenth in a tenth of a second: the rest needs about as long as there is left of it.
    for step in range(1, 6):
        stream.land(1.0, step / 10)
        await asyncio.sleep(0.1)
    now = await client.get_load(load.load_id)
    assert now.HasField("eta_duration")
    assert 0.2 < now.eta_duration.ToNanoseconds() / 1e9 < 1.5
    stream.finish()
    done = await last_of(client, load.load_id)
    assert not done.HasField("eta_duration")
    assert not done.HasField("slowest_rank")


# ---------------------------------------------------------------- failures


async def test_the_first_failure_ends_every_watch_and_blames_its_rank(
    plane: ControlPlane, client: AsyncLoaderClient
) -> None:
    """One worker dies: the others are cancelled and give back, the cause is kept (F01)."""
    load = await begin(client, 4)
    stream = await plane.next_stream()
    stream.land(0.3, 0.3, 0.3, 0.3)
    watches = [asyncio.create_task(last_of(client, load.load_id)) for _ in range(5)]
    await asyncio.sleep(0.1)
    stream.fail(WorkerLost("the connection to 'w2' broke", worker_id="w2"))
    for ended in await asyncio.gather(*watches):
        assert ended.state == types_pb2.LOAD_STATE_FAILED
        assert ended.failure.reason == "WORKER_LOST"
        assert ended.failure.metadata["rank"] == "2"
        failed, cancelled = types_pb2.RANK_STATE_FAILED, types_pb2.RANK_STATE_CANCELLED
        assert [rank.state for rank in ended.ranks] == [cancelled, cancelled, failed, cancelled]
    assert plane.holding == {}


@pytest.mark.parametrize("end", ["failed", "cancelled"])
async def test_a_load_that_ended_keeps_its_plan_no_longer(
    plane: ControlPlane, client: AsyncLoaderClient, model: Path, end: str
) -> None:
    """An error would hold on to the frames that it was raised in, and they to the plan."""
    load = await begin(client)
    stream = await plane.next_stream()
    if end == "failed":
        stream.fail(WorkerLost("the connection to 'w1' broke", worker_id="w1"))
        await last_of(client, load.load_id)
    else:
        await client.cancel(load.load_id)
    gc.collect()
    # By type(): isinstance() asks some of the objects, which do not like it.
    plans = [each.plan.path for each in gc.get_objects() if type(each) is PlannedLoad]
    assert str(model) not in plans


async def test_what_a_worker_raises_is_the_failure_that_clients_read(
    plane: ControlPlane, client: AsyncLoaderClient
) -> None:
    """A worker that raises while it receives says so with its heartbeat (F01)."""
    load = await begin(client)
    await plane.next_stream()
    report = coordinator_pb2.WorkerLoad(
        load_id=load.load_id, rank=1, state=types_pb2.WORKER_LOAD_STATE_FAILED
    )
    report.failure.reason, report.failure.message = "INTERNAL", "ZeroDivisionError: binder"
    await plane.heartbeat("w1", report)
    ended = await last_of(client, load.load_id)
    assert ended.failure.message == "ZeroDivisionError: binder"
    assert ended.ranks[1].state == types_pb2.RANK_STATE_FAILED


async def test_a_worker_cannot_fail_a_load_that_it_has_no_part_in(
    plane: ControlPlane, client: AsyncLoaderClient
) -> None:
    load = await begin(client, 1, worker_ids=["w0"])
    stream = await plane.next_stream()
    report = coordinator_pb2.WorkerLoad(
        load_id=load.load_id, state=types_pb2.WORKER_LOAD_STATE_FAILED
    )
    report.failure.reason = "DIGEST_MISMATCH"
    await plane.heartbeat("w3", report)
    stream.finish()
    assert (await last_of(client, load.load_id)).state == types_pb2.LOAD_STATE_SUCCEEDED


async def test_two_loads_cannot_have_one_worker(
    plane: ControlPlane, client: AsyncLoaderClient
) -> None:
    first = await begin(client, 1, worker_ids=["w0"])
    with pytest.raises(WorkerBusy, match=first.load_id):
        await begin(client, 1, worker_ids=["w0"])
    (await plane.next_stream()).finish()
    assert (await last_of(client, first.load_id)).state == types_pb2.LOAD_STATE_SUCCEEDED


# ---------------------------------------------------------------- lives of a worker


async def test_the_same_registration_again_is_fine_and_another_process_is_refused(
    plane: ControlPlane, client: AsyncLoaderClient
) -> None:
    """Registering again is harmless; the name of a process that answers is taken (F07)."""
    await plane.register("w0", "life-1")
    with pytest.raises(Conflict) as caught:
        await plane.coordinator.register(registration("w0", "life-2"))
    assert caught.value.reason == "WORKER_ID_TAKEN"
    assert "w0:1" in caught.value.message
    # Nor can the same life be said to be elsewhere while it answers where it was.
    with pytest.raises(Conflict):
        await plane.coordinator.register(registration("w0", "life-1", address="elsewhere:1"))
    assert (await client.get_worker("w0")).incarnation == "life-1"


async def test_a_new_life_takes_over_from_one_that_does_not_answer(
    plane: ControlPlane, client: AsyncLoaderClient
) -> None:
    load = await begin(client, 1, worker_ids=["w0"])
    await plane.next_stream()
    plane.alive["w0"] = "life-2"
    await plane.coordinator.register(registration("w0", "life-2"))
    assert (await client.get_worker("w0")).incarnation == "life-2"
    ended = await last_of(client, load.load_id)
    assert ended.failure.reason == "WORKER_LOST"
    assert "started again" in ended.failure.message


async def test_an_old_life_that_returns_is_turned_away(plane: ControlPlane) -> None:
    """A stopped process wakes up after its successor has registered."""
    plane.alive["w0"] = "life-2"
    await plane.coordinator.register(registration("w0", "life-2"))
    with pytest.raises(WorkerNotFound):
        await plane.heartbeat("w0", incarnation="life-1")
    with pytest.raises(WorkerSuperseded) as caught:
        await plane.coordinator.register(registration("w0", "life-1"))
    assert caught.value.reason == "WORKER_SUPERSEDED"


async def test_another_protocol_is_refused_with_both_numbers(plane: ControlPlane) -> None:
    """Mixed fleets are told apart before anything is transferred (F17)."""
    async with grpc.aio.insecure_channel(plane.address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        request = registration("new", protocol_version=PROTOCOL_VERSION + 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.RegisterWorker(request)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    failure = from_rpc_error(caught.value)
    assert isinstance(failure, VersionSkew)
    assert f"protocol {PROTOCOL_VERSION + 1} " in failure.message
    assert f"speaks {PROTOCOL_VERSION}" in failure.message


async def test_a_committed_rank_that_comes_back_is_taken_back(
    plane: ControlPlane, client: AsyncLoaderClient
) -> None:
    """A cut network makes a load degraded; the same process with the same slices makes it whole."""
    load = await begin(client, 2, worker_ids=["w0", "w1"])
    (await plane.next_stream()).finish()
    await last_of(client, load.load_id)
    plane.coordinator.registry.get("w1").lease_end = 0.0

    async def degraded() -> bool:
        return await state_of(client, load.load_id) == "DEGRADED"

    await until(degraded)
    lost = await client.get_load(load.load_id)
    assert [rank.state for rank in lost.ranks] == [
        types_pb2.RANK_STATE_COMMITTED,
        types_pb2.RANK_STATE_LOST,
    ]
    held = coordinator_pb2.WorkerLoad(
        load_id=load.load_id, rank=1, state=types_pb2.WORKER_LOAD_STATE_COMMITTED
    )
    await plane.coordinator.register(registration("w1", loads=[held]))
    assert await state_of(client, load.load_id) == "SUCCEEDED"
    assert (await client.unload(load.load_id)).state == types_pb2.LOAD_STATE_UNLOADED


async def test_a_coordinator_that_stood_still_loses_nobody_for_it(model: Path) -> None:
    """A paused machine hears no heartbeats; leases run on afterwards, and only then run out."""
    async with (
        control_plane(model.parent, workers=["w0"], lease_seconds=0.6) as plane,
        AsyncLoaderClient(plane.address) as client,
    ):
        await client.list_workers()
        await asyncio.sleep(0.1)
        time.sleep(1.5)
        await asyncio.sleep(0.2)
        assert (await client.get_worker("w0")).state == types_pb2.WORKER_STATE_READY

        async def lost() -> bool:
            return (await client.get_worker("w0")).state == types_pb2.WORKER_STATE_LOST

        await until(lost)


# ---------------------------------------------------------------- drain


async def test_a_drained_worker_keeps_its_load_and_takes_no_other(
    plane: ControlPlane, client: AsyncLoaderClient
) -> None:
    load = await begin(client, 1, worker_ids=["w0"])
    (await plane.next_stream()).finish()
    await last_of(client, load.load_id)
    drained = await client.drain_worker("w0")
    assert drained.state == types_pb2.WORKER_STATE_DRAINING
    assert drained.load_id == load.load_id
    assert await state_of(client, load.load_id) == "SUCCEEDED"
    await client.unload(load.load_id)
    with pytest.raises(WorkerBusy) as caught:
        await begin(client, 1, worker_ids=["w0"])
    assert caught.value.reason == "WORKER_DRAINING"
    chosen = await begin(client, 3)
    assert "w0" not in {rank.worker_id for rank in (await client.get_load(chosen.load_id)).ranks}
    (await plane.next_stream()).finish()
    await last_of(client, chosen.load_id)
    # A restart of the worker does not put it into service again.
    plane.alive.pop("w0")
    await plane.register("w0", "life-2")
    assert (await client.get_worker("w0")).state == types_pb2.WORKER_STATE_DRAINING
    assert (await client.undrain_worker("w0")).state == types_pb2.WORKER_STATE_READY


@pytest.mark.parametrize("verb", ["get_worker", "drain_worker", "undrain_worker"])
async def test_an_unknown_worker_is_named(client: AsyncLoaderClient, verb: str) -> None:
    with pytest.raises(WorkerNotFound, match="'nobody'"):
        await getattr(client, verb)("nobody")


# ---------------------------------------------------------------- admission


async def test_a_plan_says_which_workers_it_would_get_and_whether_it_fits(
    plane: ControlPlane, client: AsyncLoaderClient
) -> None:
    plan = await client.plan("model", 2, options=ONE_RANK)
    assert plan.admission.admitted
    assert [rank.worker_id for rank in plan.admission.ranks] == ["w0", "w1"]
    assert all(rank.needed_bytes >= SIZE and rank.fits for rank in plan.admission.ranks)
    plane.coordinator.registry.get("w1").memory.free_bytes = SIZE - 1
    plan = await client.plan("model", 2, options=ONE_RANK)
    assert not plan.admission.admitted
    assert [rank.fits for rank in plan.admission.ranks] == [True, False]
    refusal = plan.admission.refusal
    assert (refusal.reason, refusal.metadata["rank"]) == ("OUT_OF_MEMORY", "1")
    assert str(SIZE - 1) in refusal.message
    named = await client.plan("model", 2, options=ONE_RANK, worker_ids=["w3", "w2"])
    assert [rank.worker_id for rank in named.admission.ranks] == ["w3", "w2"]
    many = await client.plan("model", 5, options=ONE_RANK)
    assert many.admission.refusal.reason == "NOT_ENOUGH_WORKERS"
    assert OutOfMemory.default_reason == refusal.reason


# ---------------------------------------------------------------- repeated requests


async def test_the_same_request_id_gives_the_same_answer(
    plane: ControlPlane, client: AsyncLoaderClient
) -> None:
    first, second = await asyncio.gather(
        begin(client, 1, request_id="once"), begin(client, 1, request_id="once")
    )
    assert first.load_id == second.load_id
    assert len(await client.list_loads()) == 1
    (await plane.next_stream()).finish()
    await last_of(client, first.load_id)
    unloaded = [await client.unload(first.load_id, request_id="give-back") for _ in range(2)]
    assert unloaded[0] == unloaded[1]
    with pytest.raises(Conflict) as caught:
        await begin(client, 2, request_id="once")
    assert caught.value.reason == "REQUEST_ID_REUSED"


async def test_a_refused_request_may_be_tried_again_with_its_id(
    plane: ControlPlane, client: AsyncLoaderClient
) -> None:
    await client.drain_worker("w0", request_id="a")
    with pytest.raises(WorkerBusy):
        await begin(client, 1, worker_ids=["w0"], request_id="b")
    await client.undrain_worker("w0", request_id="c")
    assert (await begin(client, 1, worker_ids=["w0"], request_id="b")).load_id
    (await plane.next_stream()).finish()


# ---------------------------------------------------------------- callers that go away


async def test_a_watcher_that_leaves_stops_nothing(
    plane: ControlPlane, client: AsyncLoaderClient
) -> None:
    """The watch's clean-up runs at once, and the load goes on (H05)."""
    load = await begin(client)
    stream = await plane.next_stream()
    watch = client.watch(load.load_id)
    stream.land(0.1, 0.1)
    await anext(watch)
    assert open_streams(plane) == 1
    await watch.aclose()

    async def closed() -> bool:
        return open_streams(plane) == 0

    await until(closed, 1.0)
    stream.finish()
    assert (await last_of(client, load.load_id)).state == types_pb2.LOAD_STATE_SUCCEEDED


async def test_a_load_ends_with_the_owner_who_watches_it(
    plane: ControlPlane, client: AsyncLoaderClient
) -> None:
    """Who asked to be missed is missed: the load is cancelled, and nothing is left (H05)."""
    load = await begin(client)
    stream = await plane.next_stream()
    stream.land(0.4, 0.4)
    owner = AsyncLoaderClient(plane.address)
    watch = owner.watch(load.load_id, cancel_when_gone=True)
    await anext(watch)
    # The process of the owner dies: its connection closes, nobody says good-bye.
    await owner.close()
    ended = await last_of(client, load.load_id)
    assert ended.state == types_pb2.LOAD_STATE_CANCELLED
    assert plane.holding == {}
    assert open_streams(plane) == 0
    await watch.aclose()


def open_streams(plane: ControlPlane) -> int:
    interceptor = plane.server.interceptor
    return sum(interceptor.open_streams.values())


# ---------------------------------------------------------------- limits and deadlines


async def test_one_caller_may_have_so_many_loads_on_their_way(model: Path) -> None:
    async with (
        control_plane(model.parent, workers=["a", "b", "c"], max_loads=2) as plane,
        AsyncLoaderClient(plane.address) as client,
    ):
        loads = [await begin(client, 1) for _ in range(2)]
        with pytest.raises(QuotaExceeded, match="2 loads"):
            await begin(client, 1)
        (await plane.next_stream()).finish()
        await last_of(client, loads[0].load_id)
        assert (await begin(client, 1)).load_id


async def test_a_call_without_time_is_refused_before_it_changes_anything(
    plane: ControlPlane,
) -> None:
    async with grpc.aio.insecure_channel(plane.address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        request = coordinator_pb2.LoadRequest(path="model", tp=1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Load(request, timeout=0.002)
    assert type(from_rpc_error(caught.value)) is DeadlineExceeded
    assert plane.coordinator.all() == []


async def test_a_wrong_field_is_named_in_the_standard_way(plane: ControlPlane) -> None:
    """Tools that know google.rpc read the field without this project's client."""
    from google.rpc import error_details_pb2
    from grpc_status import rpc_status

    async with grpc.aio.insecure_channel(plane.address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Load(coordinator_pb2.LoadRequest(path="model", tp=0))
    status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
    assert status is not None
    request, info = error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(request)
    assert (info.domain, info.reason) == ("loader-service", "INVALID_REQUEST")
    assert [violation.field for violation in request.field_violations] == ["tp"]
    assert isinstance(from_rpc_error(caught.value), InvalidRequest)


# ---------------------------------------------------------------- sizes


async def test_long_lists_never_near_the_message_limit(tmp_path: Path) -> None:
    """60,000 long names and a tensor of 5 MiB, with a client of default options (H01)."""
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = [random_tensor("big", "U8", (5 << 20,))]
    tensors += [random_tensor(f"{number:05d}.{'x' * 74}", "U8", (1,)) for number in range(60_000)]
    write_file(folder / "model.safetensors", tensors)
    async with control_plane(tmp_path, workers=["w0"]) as plane:
        largest = 0
        names = []
        async with grpc.aio.insecure_channel(plane.address) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            inspect = coordinator_pb2.InspectCheckpointRequest(path="model", page_size=10_000)
            while True:
                # The handler on the other channel must not keep everybody waiting (H04).
                page = await stub.InspectCheckpoint(inspect)
                largest = max(largest, page.ByteSize())
                names += [tensor.name for tensor in page.tensors]
                if not page.next_page_token:
                    break
                inspect.page_token = page.next_page_token
            plan = coordinator_pb2.PlanLoadRequest(
                path="model", tp=1, include_tensors=True, page_size=10_000
            )
            answer = await stub.PlanLoad(plan)
            largest = max(largest, answer.ByteSize())
        assert sorted(names) == sorted(tensor.name for tensor in tensors)
        assert largest < 2 << 20


@pytest.mark.slow
def test_two_hundred_watchers_and_calls_leave_a_transfer_its_rate() -> None:
    """p99 of a call below 100 ms, three quarters of the rate kept; the bench says both."""
    bench = Path(__file__).resolve().parents[1] / "bench" / "control_plane_bench.py"
    done = subprocess.run([sys.executable, str(bench)], check=False)
    assert done.returncode == 0


# ---------------------------------------------------------------- the two clients


async def test_the_sync_client_does_what_the_async_one_does(plane: ControlPlane) -> None:
    with LoaderClient(plane.address) as client:

        def work() -> list[types_pb2.Load]:
            load = client.load("model", 2, options=ONE_RANK)
            return list(client.watch(load.load_id))

        loading = asyncio.create_task(asyncio.to_thread(work))
        stream = await plane.next_stream()
        stream.land(0.5, 0.5)
        stream.finish()
        seen = await loading
        assert seen[-1].state == types_pb2.LOAD_STATE_SUCCEEDED
        with pytest.raises(LoadNotFound):
            await asyncio.to_thread(client.get_load, "load-none")
        workers = await asyncio.to_thread(client.list_workers)
        assert [worker.worker_id for worker in workers] == ["w0", "w1", "w2", "w3"]


async def test_a_call_waits_a_moment_for_a_coordinator_that_is_being_restarted(
    model: Path,
) -> None:
    """The retries of the channel, not of the caller."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    async with AsyncLoaderClient(address) as client:
        calling = asyncio.create_task(client.list_workers())
        await asyncio.sleep(0.2)
        assert not calling.done()
        async with control_plane(model.parent, workers=["w0"], listen=address):
            assert [worker.worker_id for worker in await calling] == ["w0"]


async def test_a_watch_goes_on_after_its_connection_broke(
    plane: ControlPlane, client: AsyncLoaderClient
) -> None:
    """Nothing is told twice, and nothing is missed."""
    load = await begin(client)
    stream = await plane.next_stream()
    gate = await Gate.open(plane.address)
    try:
        async with AsyncLoaderClient(gate.address) as distant:
            seen: list[types_pb2.Load] = []
            async for now in distant.watch(load.load_id):
                seen.append(now)
                if len(seen) == 1:
                    gate.cut()
                    stream.land(0.5, 0.5)
                    stream.finish()
        assert seen[-1].state == types_pb2.LOAD_STATE_SUCCEEDED
        revisions = [now.revision for now in seen]
        assert revisions == sorted(set(revisions))
    finally:
        await gate.close()


async def test_a_coordinator_that_is_gone_ends_a_watch(model: Path) -> None:
    async with control_plane(model.parent, workers=["w0"]) as plane:
        gate = await Gate.open(plane.address)
        async with AsyncLoaderClient(gate.address) as client:
            load = await client.load("model")
            watch = client.watch(load.load_id)
            await anext(watch)
            await gate.close()
            with pytest.raises(ServiceUnavailable):
                async for _ in watch:
                    pass


class Gate:
    """A TCP relay whose connections a test can cut."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self.address = ""

    @classmethod
    async def open(cls, target: str) -> Gate:
        gate = cls(target)
        gate._server = await asyncio.start_server(gate._relay, "127.0.0.1", 0)
        gate.address = f"127.0.0.1:{gate._server.sockets[0].getsockname()[1]}"
        return gate

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, int(self._port))
        self._writers += [writer, back]
        for source, sink in ((reader, back), (there, writer)):
            self._tasks.append(asyncio.create_task(_copy(source, sink)))


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
    except ConnectionError:
        pass
    finally:
        sink.close()
