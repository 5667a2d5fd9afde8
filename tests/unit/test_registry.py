"""The registry: leases, lives of a worker, and all-or-nothing choice of a group."""

from __future__ import annotations

import itertools

import pytest

from loader_service.coordinator import registry as registry_module
from loader_service.coordinator.registry import WorkerRecord, WorkerRegistry
from loader_service.errors import (
    InvalidRequest,
    LoaderError,
    VersionSkew,
    WorkerBusy,
    WorkerNotFound,
    WorkersUnavailable,
)
from loader_service.v1 import coordinator_pb2, types_pb2
from loader_service.version import PROTOCOL_VERSION

LEASE = 10.0
READY = types_pb2.WORKER_STATE_READY
BUSY = types_pb2.WORKER_STATE_BUSY
LOST = types_pb2.WORKER_STATE_LOST


def registration(
    worker_id: str, incarnation: str = "1", host: str = "h"
) -> coordinator_pb2.RegisterWorkerRequest:
    return coordinator_pb2.RegisterWorkerRequest(
        worker_id=worker_id,
        incarnation=incarnation,
        address=f"{worker_id}:1",
        host=host,
        device="numpy",
        protocol_version=PROTOCOL_VERSION,
        package_version="0.1.0",
        memory=types_pb2.MemoryUsage(free_bytes=7),
    )


def heartbeat(
    worker_id: str,
    incarnation: str = "1",
    loads: dict[str, types_pb2.WorkerLoadState.ValueType] | None = None,
) -> coordinator_pb2.HeartbeatRequest:
    return coordinator_pb2.HeartbeatRequest(
        worker_id=worker_id,
        incarnation=incarnation,
        memory=types_pb2.MemoryUsage(free_bytes=9),
        loads=[
            coordinator_pb2.WorkerLoad(load_id=load_id, state=state)
            for load_id, state in (loads or {}).items()
        ],
    )


def registry_of(**hosts: str) -> WorkerRegistry:
    """A registry with the workers named by the keys, each on its host."""
    registry = WorkerRegistry(LEASE)
    for worker_id, host in hosts.items():
        registry.register(registration(worker_id, host=host), 0.0, 100.0)
    return registry


def ids(workers: list[WorkerRecord]) -> list[str]:
    return [worker.worker_id for worker in workers]


def states(registry: WorkerRegistry) -> dict[str, types_pb2.WorkerState.ValueType]:
    return {worker.worker_id: worker.state for worker in registry.all()}


# ---------------------------------------------------------------- registering


def test_a_registered_worker_is_ready_and_shows_what_it_said() -> None:
    registry = WorkerRegistry(LEASE)
    assert registry.register(registration("a", "life", "host"), 5.0, 1_000.5) == ""
    (worker,) = registry.all()
    message = worker.message()
    assert message.heartbeat_time.ToMilliseconds() == 1_000_500
    message.ClearField("heartbeat_time")
    assert message == types_pb2.Worker(
        worker_id="a",
        address="a:1",
        host="host",
        device="numpy",
        state=READY,
        incarnation="life",
        memory=types_pb2.MemoryUsage(free_bytes=7),
        package_version="0.1.0",
    )


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_another_version_of_the_protocol_is_refused(version: int) -> None:
    registry = WorkerRegistry(LEASE)
    request = registration("a")
    request.protocol_version = version
    with pytest.raises(VersionSkew, match=f"speaks protocol {version}"):
        registry.register(request, 0.0, 0.0)
    assert registry.all() == []


@pytest.mark.parametrize("field", ["worker_id", "incarnation", "address"])
def test_a_registration_without_a_field_is_refused(field: str) -> None:
    registry = WorkerRegistry(LEASE)
    request = registration("a")
    request.ClearField(field)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=field):
        registry.register(request, 0.0, 0.0)
    assert registry.all() == []


def test_the_same_life_registered_again_keeps_its_reservation() -> None:
    registry = registry_of(a="h")
    registry.reserve("load-1", 1, [])
    assert registry.register(registration("a"), 1.0, 1.0) == ""
    (worker,) = registry.all()
    assert (worker.load_id, worker.rank, worker.state) == ("load-1", 0, BUSY)


def test_a_new_life_reports_the_load_that_died_with_the_old_one() -> None:
    registry = registry_of(a="h", b="h")
    registry.reserve("load-1", 2, ["b", "a"])
    assert registry.register(registration("a", "2"), 1.0, 1.0) == "load-1"
    assert states(registry) == {"a": READY, "b": BUSY}
    with pytest.raises(WorkerNotFound):
        registry.heartbeat(heartbeat("a", "1"), 1.0, 1.0)
    registry.heartbeat(heartbeat("a", "2"), 1.0, 1.0)


def test_a_worker_that_left_is_forgotten_with_its_load() -> None:
    registry = registry_of(a="h")
    registry.reserve("load-1", 1, [])
    with pytest.raises(WorkerNotFound):
        registry.deregister("a", "0")
    assert registry.deregister("a", "1") == "load-1"
    assert registry.all() == []
    with pytest.raises(WorkerNotFound):
        registry.deregister("a", "1")


# ---------------------------------------------------------------- leases


def test_heartbeats_renew_the_lease() -> None:
    registry = registry_of(a="h", b="h")
    registry.heartbeat(heartbeat("a"), 9.0, 109.0)
    assert ids(registry.expire(9.999)) == []
    assert ids(registry.expire(10.0)) == ["b"]
    assert ids(registry.expire(18.999)) == []
    assert ids(registry.expire(19.0)) == ["a"]


def test_a_lost_worker_is_reported_once_and_must_register_again() -> None:
    registry = registry_of(a="h")
    assert ids(registry.expire(LEASE)) == ["a"]
    assert registry.expire(LEASE + 5) == []
    assert states(registry) == {"a": LOST}
    with pytest.raises(WorkerNotFound, match="ran out"):
        registry.heartbeat(heartbeat("a"), 11.0, 11.0)
    registry.register(registration("a"), 11.0, 11.0)
    assert states(registry) == {"a": READY}
    assert registry.expire(11.0 + LEASE - 0.001) == []


def test_workers_lost_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that never return, of pods for example, must not pile up; loads keep their workers."""
    monkeypatch.setattr(registry_module, "KEPT_LOST", 2)
    registry = WorkerRegistry(LEASE)
    for number in range(5):
        registry.register(registration(f"w{number}"), float(number), 100.0)
    registry.reserve("load-1", 1, ["w0"])
    registry.expire(100.0)
    assert ids(registry.all()) == ["w0", "w3", "w4"]


def test_a_heartbeat_of_an_unknown_worker_asks_it_to_register() -> None:
    with pytest.raises(WorkerNotFound, match="'a'"):
        WorkerRegistry(LEASE).heartbeat(heartbeat("a"), 0.0, 0.0)


def test_a_heartbeat_updates_memory_time_and_loads() -> None:
    registry = registry_of(a="h")
    request = heartbeat("a", loads={"load-1": types_pb2.WORKER_LOAD_STATE_COMMITTED})
    request.loads[0].transport = "tcp/lo"
    message = registry.heartbeat(request, 3.0, 103.0).message()
    assert (message.memory.free_bytes, message.heartbeat_time.seconds) == (9, 103)
    assert message.transport == "tcp/lo"


@pytest.mark.parametrize(
    ("load_state", "state"),
    [
        (types_pb2.WORKER_LOAD_STATE_PREPARED, BUSY),
        (types_pb2.WORKER_LOAD_STATE_RECEIVING, BUSY),
        (types_pb2.WORKER_LOAD_STATE_VERIFIED, BUSY),
        (types_pb2.WORKER_LOAD_STATE_COMMITTED, BUSY),
        (types_pb2.WORKER_LOAD_STATE_FAILED, READY),
    ],
)
def test_a_worker_that_still_holds_a_load_is_not_idle(
    load_state: types_pb2.WorkerLoadState.ValueType, state: types_pb2.WorkerState.ValueType
) -> None:
    registry = registry_of(a="h")
    registry.heartbeat(heartbeat("a", loads={"old": load_state}), 1.0, 1.0)
    assert states(registry) == {"a": state}


def test_a_suspect_worker_is_chosen_again_after_its_next_heartbeat() -> None:
    registry = registry_of(a="h")
    registry.suspect("a")
    registry.suspect("nobody")
    with pytest.raises(WorkersUnavailable):
        registry.reserve("load-1", 1, [])
    registry.heartbeat(heartbeat("a"), 1.0, 1.0)
    assert ids(registry.reserve("load-1", 1, [])) == ["a"]


# ---------------------------------------------------------------- choosing a group


def test_named_workers_are_taken_in_the_order_of_their_names_given() -> None:
    registry = registry_of(a="h", b="h", c="h")
    assert ids(registry.reserve("load-1", 2, ["c", "a"])) == ["c", "a"]
    taken = {worker.worker_id: (worker.load_id, worker.rank) for worker in registry.all()}
    assert taken == {"a": ("load-1", 1), "b": ("", 0), "c": ("load-1", 0)}
    assert states(registry) == {"a": BUSY, "b": READY, "c": BUSY}


@pytest.mark.parametrize("order", list(itertools.permutations("abcd")))
def test_idle_workers_are_taken_by_id_whatever_the_order_of_registration(
    order: tuple[str, ...],
) -> None:
    registry = registry_of(**dict.fromkeys(order, "h"))
    assert ids(registry.reserve("load-1", 3, [])) == ["a", "b", "c"]


def test_the_smallest_host_that_takes_the_whole_group_is_preferred() -> None:
    registry = registry_of(a="big", b="big", c="big", d="fit", e="fit", f="small")
    assert ids(registry.reserve("load-1", 2, [])) == ["d", "e"]


def test_a_group_larger_than_every_host_fills_the_fullest_hosts_first() -> None:
    registry = registry_of(a="one", b="two", c="two", d="three", e="three", f="three")
    assert ids(registry.reserve("load-1", 5, [])) == ["d", "e", "f", "b", "c"]


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (["a"], InvalidRequest),
        (["a", "b", "c"], InvalidRequest),
        (["a", "a"], InvalidRequest),
        (["a", "nobody"], WorkerNotFound),
        (["a", "lost"], WorkerNotFound),
        (["busy", "nobody"], WorkerNotFound),
        (["a", "busy"], WorkerBusy),
        (["a", "held"], WorkerBusy),
    ],
)
def test_a_group_that_cannot_be_had_reserves_nobody(
    names: list[str], error: type[LoaderError]
) -> None:
    registry = registry_of(a="h", b="h", c="h", lost="h", busy="h", held="h")
    for worker_id in ("a", "b", "c", "busy", "held"):
        registry.heartbeat(heartbeat(worker_id), 5.0, 5.0)
    registry.expire(LEASE)
    registry.reserve("other", 1, ["busy"])
    committed = {"old": types_pb2.WORKER_LOAD_STATE_COMMITTED}
    registry.heartbeat(heartbeat("held", loads=committed), 5.0, 5.0)
    with pytest.raises(error):
        registry.reserve("load-1", 2, names)
    assert [worker.worker_id for worker in registry.all() if worker.load_id] == ["busy"]


def test_a_busy_worker_is_refused_with_the_load_that_it_holds() -> None:
    registry = registry_of(a="h")
    registry.reserve("load-1", 1, [])
    with pytest.raises(WorkerBusy) as caught:
        registry.reserve("load-2", 1, ["a"])
    assert caught.value.metadata == {"worker_id": "a", "load_id": "load-1"}


def test_too_few_idle_workers_are_told_with_what_the_others_are() -> None:
    registry = registry_of(a="h", b="h", c="h", d="h", e="h")
    for worker_id in "abcd":
        registry.heartbeat(heartbeat(worker_id), 5.0, 5.0)
    registry.expire(LEASE)
    registry.reserve("load-1", 1, ["b"])
    registry.set_draining("d", True)
    with pytest.raises(WorkersUnavailable) as caught:
        registry.reserve("load-2", 3, [])
    assert caught.value.message == (
        "3 idle workers are needed; registered: 2 idle (a, c); 1 busy (b); 1 drained (d); 1 lost (e)"
    )
    assert caught.value.metadata == {
        "needed": "3", "workers": "4", "idle": "a,c", "busy": "b", "drained": "d",
    }  # fmt: skip


def test_without_workers_that_is_what_is_said() -> None:
    with pytest.raises(WorkersUnavailable, match="1 idle workers are needed; registered: none"):
        registry_of().reserve("load-1", 1, [])


def test_giving_a_load_back_frees_exactly_its_workers() -> None:
    registry = registry_of(a="h", b="h", c="h")
    registry.reserve("load-1", 2, ["b", "a"])
    registry.reserve("load-2", 1, ["c"])
    registry.give_back("load-1")
    registry.give_back("load-1")
    assert states(registry) == {"a": READY, "b": READY, "c": BUSY}
    assert [(worker.load_id, worker.rank) for worker in registry.all()[:2]] == [("", 0)] * 2


def test_a_worker_given_back_is_idle_until_it_reports_that_it_still_holds_the_load() -> None:
    registry = registry_of(a="h")
    registry.reserve("load-1", 1, [])
    receiving = {"load-1": types_pb2.WORKER_LOAD_STATE_RECEIVING}
    registry.heartbeat(heartbeat("a", loads=receiving), 1.0, 1.0)
    registry.give_back("load-1")
    assert states(registry) == {"a": READY}
    registry.heartbeat(heartbeat("a", loads=receiving), 2.0, 2.0)
    assert states(registry) == {"a": BUSY}
    registry.heartbeat(heartbeat("a"), 3.0, 3.0)
    assert states(registry) == {"a": READY}
