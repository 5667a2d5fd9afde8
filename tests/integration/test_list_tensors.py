"""What listing tensors says of loads that hold nothing, and of workers that do not answer."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from loader_service.client import LoaderClient
from loader_service.errors import WorkerLost, WrongState
from loader_service.v1 import types_pb2
from loader_service.v1.types_pb2 import LoadState
from tests import messages
from tests.fake_coordinator import FakeCoordinator, fake_coordinator


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeCoordinator]:
    with fake_coordinator() as fake:
        yield fake


def put(fake: FakeCoordinator, state: LoadState.ValueType) -> types_pb2.Load:
    load = messages.succeeded()
    load.load_id, load.state = "load-x", state
    fake.loads = [load]
    return load


@pytest.mark.parametrize("name", ["STREAMING", "UNLOADING", "UNLOADED", "FAILED", "CANCELLED"])
def test_a_load_that_holds_nothing_is_refused_by_its_state(
    fake: FakeCoordinator, name: str
) -> None:
    put(fake, LoadState.Value(f"LOAD_STATE_{name}"))
    with LoaderClient(fake.endpoint) as client, pytest.raises(WrongState) as caught:
        client.list_tensors("load-x")
    assert caught.value.metadata == {"load_id": "load-x", "state": name}


def test_a_lost_rank_is_named(fake: FakeCoordinator) -> None:
    load = put(fake, types_pb2.LOAD_STATE_DEGRADED)
    load.ranks[0].state = types_pb2.RANK_STATE_LOST
    assert_names_the_worker(fake, load)


def test_a_worker_that_does_not_answer_is_named(
    fake: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = put(fake, types_pb2.LOAD_STATE_SUCCEEDED)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    away = types_pb2.Worker(worker_id=load.ranks[0].worker_id, address=address)
    monkeypatch.setattr(fake, "_workers", lambda: [away])
    assert_names_the_worker(fake, load)


def assert_names_the_worker(fake: FakeCoordinator, load: types_pb2.Load) -> None:
    with LoaderClient(fake.endpoint) as client, pytest.raises(WorkerLost) as caught:
        client.list_tensors("load-x")
    worker_id = load.ranks[0].worker_id
    assert caught.value.metadata == {"load_id": "load-x", "worker_id": worker_id, "rank": "0"}
    assert f"worker {worker_id!r}, which holds rank 0 of load load-x" in caught.value.message
