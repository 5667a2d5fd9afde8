"""Workers as the coordinator meets them: registered, started again, away, drained."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest

from loader_service.channel import from_rpc_error
from loader_service.client import AsyncLoaderClient
from loader_service.errors import (
    Conflict,
    VersionSkew,
    WorkerBusy,
    WorkerNotFound,
    WorkerSuperseded,
)
from loader_service.v1 import coordinator_pb2, coordinator_pb2_grpc, types_pb2
from loader_service.version import PROTOCOL_VERSION
from tests.control_plane import (
    ControlPlane,
    begin,
    control_plane,
    last_of,
    registration,
    state_of,
    until,
)

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


async def test_of_two_processes_that_want_one_name_at_once_one_gets_it(plane: ControlPlane) -> None:
    """Both ask the dead owner; the second must ask the first, too."""
    del plane.alive["w0"]

    async def come(life: str) -> None:
        await plane.coordinator.register(registration("w0", life))
        plane.alive["w0"] = life

    results = await asyncio.gather(come("life-2"), come("life-3"), return_exceptions=True)
    (refused,) = (result for result in results if result is not None)
    assert isinstance(refused, Conflict)
    assert refused.reason == "WORKER_ID_TAKEN"
    assert plane.coordinator.registry.get("w0").registration.incarnation == plane.alive["w0"]


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
