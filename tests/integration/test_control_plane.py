"""The coordinator's services as clients and workers meet them, over real gRPC.

Workers and streamer are played, so that a test decides what happens when. Names in brackets are those
of reported trouble, see the cases of the project.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from pathlib import Path

import grpc
import grpc.aio
import pytest

from loader_service.channel import from_rpc_error
from loader_service.client import AsyncLoaderClient
from loader_service.coordinator.planning import PlannedLoad
from loader_service.errors import (
    CheckpointNotFound,
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    PathOutsideRoot,
    QuotaExceeded,
    WorkerBusy,
    WorkerLost,
    WrongState,
)
from loader_service.v1 import coordinator_pb2, coordinator_pb2_grpc, types_pb2
from tests.checkpoints import random_tensor, write_file
from tests.control_plane import (
    MODEL_BYTES,
    ONE_RANK,
    ControlPlane,
    PlayedWorker,
    begin,
    control_plane,
    last_of,
    state_of,
    until,
)

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


async def test_a_load_is_unloaded_when_its_workers_say_so(
    plane: ControlPlane, client: AsyncLoaderClient
) -> None:
    load = await begin(client, worker_ids=["w0", "w1"])
    (await plane.next_stream()).finish()
    await last_of(client, load.load_id)
    life = plane.alive.pop("w1")
    unloading = asyncio.create_task(client.unload(load.load_id))
    await until(lambda: has_let_go(plane, "w0"))
    await asyncio.sleep(0.3)
    assert not unloading.done()
    assert await state_of(client, load.load_id) == "UNLOADING"
    plane.alive["w1"] = life
    unloaded = await unloading
    assert [rank.state for rank in unloaded.ranks] == [types_pb2.RANK_STATE_RELEASED] * 2
    assert not plane.holding


async def test_a_worker_that_is_lost_is_not_waited_for(model: Path) -> None:
    async with (
        control_plane(model.parent, workers=["w0"], lease_seconds=0.5) as plane,
        AsyncLoaderClient(plane.address) as client,
    ):
        load = await begin(client, tp=1)
        (await plane.next_stream()).finish()
        await last_of(client, load.load_id)
        plane.alive.clear()
        unloaded = await client.unload(load.load_id)
    assert unloaded.state == types_pb2.LOAD_STATE_UNLOADED
    assert [rank.state for rank in unloaded.ranks] == [types_pb2.RANK_STATE_LOST]


async def has_let_go(plane: ControlPlane, worker_id: str) -> bool:
    return worker_id not in plane.holding


async def test_a_load_that_fails_already_is_not_said_to_be_cancelled(
    plane: ControlPlane, client: AsyncLoaderClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = asyncio.Event()

    async def abort(self: PlayedWorker, load_id: str) -> None:
        await released.wait()

    monkeypatch.setattr(PlayedWorker, "abort", abort)
    load = await begin(client)
    (await plane.next_stream()).fail(WorkerLost("broken", worker_id="w0"))
    await asyncio.sleep(0.1)
    cancelling = asyncio.create_task(client.cancel(load.load_id))
    await asyncio.sleep(0.1)
    released.set()
    with pytest.raises(WrongState, match="FAILED"):
        await cancelling


# ---------------------------------------------------------------- admission


async def test_a_plan_says_which_workers_it_would_get_and_whether_it_fits(
    plane: ControlPlane, client: AsyncLoaderClient
) -> None:
    plan = await client.plan("model", 2, options=ONE_RANK)
    assert plan.admission.admitted
    assert [rank.worker_id for rank in plan.admission.ranks] == ["w0", "w1"]
    assert all(rank.needed_bytes >= MODEL_BYTES and rank.fits for rank in plan.admission.ranks)
    plane.coordinator.registry.get("w1").memory.free_bytes = MODEL_BYTES - 1
    plan = await client.plan("model", 2, options=ONE_RANK)
    assert not plan.admission.admitted
    assert [rank.fits for rank in plan.admission.ranks] == [True, False]
    refusal = plan.admission.refusal
    assert (refusal.reason, refusal.metadata["rank"]) == ("OUT_OF_MEMORY", "1")
    assert f"{MODEL_BYTES - 1} are free; idle worker" in refusal.message
    # Advice is worth something only about workers that can be had.
    for number, worker_id in enumerate(("w0", "w2", "w3")):
        plane.coordinator.registry.get(worker_id).memory.free_bytes = (1 << 40) + number
    await client.drain_worker("w3")
    plan = await client.plan("model", 1, options=ONE_RANK, worker_ids=["w1"])
    assert plan.admission.refusal.message.endswith(f"'w2' has the most free: {(1 << 40) + 1}")
    await client.undrain_worker("w3")
    named = await client.plan("model", 2, options=ONE_RANK, worker_ids=["w3", "w2"])
    assert [rank.worker_id for rank in named.admission.ranks] == ["w3", "w2"]
    many = await client.plan("model", 5, options=ONE_RANK)
    assert many.admission.refusal.reason == "NOT_ENOUGH_WORKERS"


async def test_a_wrong_path_is_refused_before_anybody_waits_for_workers(
    plane: ControlPlane, client: AsyncLoaderClient
) -> None:
    for waits in (0.0, 60.0):
        with pytest.raises(CheckpointNotFound):
            await client.load("nope", 99, wait_for_workers_seconds=waits)
        with pytest.raises(PathOutsideRoot):
            await client.load("..", 99, wait_for_workers_seconds=waits)
    assert await client.list_loads() == []


async def test_a_wait_for_workers_that_has_run_out_says_so(client: AsyncLoaderClient) -> None:
    load = await client.load("model", 5, wait_for_workers_seconds=0.1)
    failure = (await last_of(client, load.load_id)).failure
    assert (failure.reason, failure.metadata["workers"]) == ("NOT_ENOUGH_WORKERS", "4")
    assert failure.metadata["waited_seconds"] == "0.1"
    assert failure.message.endswith("4 idle (w0, w1, w2, w3); that was waited for 0.1 s")


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


async def test_a_load_that_is_being_unloaded_is_not_on_its_way(model: Path) -> None:
    async with (
        control_plane(model.parent, workers=["w0", "w1"], max_loads=1) as plane,
        AsyncLoaderClient(plane.address) as client,
    ):
        load = await begin(client, tp=1, worker_ids=["w0"])
        (await plane.next_stream()).finish()
        await last_of(client, load.load_id)
        life = plane.alive.pop("w0")
        unloading = asyncio.create_task(client.unload(load.load_id))
        await until(lambda: is_in(client, load.load_id, "UNLOADING"))
        await begin(client, tp=1, worker_ids=["w1"])
        plane.alive["w0"] = life
        await unloading


async def is_in(client: AsyncLoaderClient, load_id: str, state: str) -> bool:
    return await state_of(client, load_id) == state


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
