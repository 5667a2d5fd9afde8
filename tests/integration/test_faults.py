"""A lost worker, a lost streamer and a cancel in the middle of a load end it in time, and cleanly."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from loader_service import demo
from loader_service.client import AsyncLoaderClient
from loader_service.v1 import types_pb2
from tests.checkpoints import write_sparse_llama
from tests.cluster import Cluster, cluster, wait_for

END_SECONDS = 2.0
"""A reset connection, a cancel and a lost streamer end a load within this."""

MEMORY_SECONDS = 2.0
"""The others' memory is back within this after the end."""

REPORT_SECONDS = 1.5
"""A heartbeat interval, and slack for a busy machine."""

_TERMINAL = (types_pb2.LOAD_STATE_FAILED, types_pb2.LOAD_STATE_CANCELLED)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 GiB of zeros that take no disk: enough to be in the middle of for a while."""
    return write_sparse_llama(tmp_path_factory.mktemp("model"), layers=8)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(Path("/"), tmp_path_factory.mktemp("logs"), workers=2) as started:
        yield started


@pytest.fixture
def running(shared: Cluster) -> Cluster:
    """A coordinator and two idle workers, `w0` and `w1`, whatever the test before did to them."""
    shared.repair(2)
    return shared


@pytest.fixture(params=["COORDINATOR", "LOCAL"])
def source(request: pytest.FixtureRequest) -> types_pb2.WeightSource.ValueType:
    """Who reads: the coordinator for all, or each worker for itself."""
    return types_pb2.WeightSource.Value(f"WEIGHT_SOURCE_{request.param}")


def begin(
    running: Cluster,
    checkpoint: Path,
    source: types_pb2.WeightSource.ValueType = types_pb2.WEIGHT_SOURCE_COORDINATOR,
) -> str:
    """Start a load and return when bytes have landed on both ranks."""

    async def work(client: AsyncLoaderClient) -> str:
        started = await client.load(str(checkpoint), 2, source=source)
        async for load in client.watch(started.load_id):
            if load.ranks and all(0 < rank.done_bytes < rank.total_bytes for rank in load.ranks):
                return load.load_id
        raise AssertionError(f"the load was over before it could be disturbed: {load}")

    return running.call(work)


def end_of(running: Cluster, load_id: str) -> tuple[types_pb2.Load, float]:
    """Return the load when it has ended, and how long that took."""
    start = time.monotonic()

    def ended() -> types_pb2.Load | None:
        load = running.call(lambda client: client.get_load(load_id))
        return load if load.state in _TERMINAL else None

    load = wait_for(ended)
    return load, time.monotonic() - start


def assert_memory_is_back(running: Cluster, *worker_ids: str) -> None:
    for worker_id in worker_ids:
        running.wait_for_empty(worker_id, MEMORY_SECONDS + REPORT_SECONDS)
        # The process's own memory, not only what it counts.
        process = psutil.Process(running.workers[worker_id].pid)
        assert process.memory_info().rss < 300 << 20


def assert_loads_work(running: Cluster) -> None:
    """What was lost is started again, and the next load is as good as any."""
    running.repair(2)
    load = running.load(demo.model_folder(), 2)
    assert load.state == types_pb2.LOAD_STATE_SUCCEEDED, load.failure
    running.unload(load.load_id)


def test_a_killed_worker_fails_the_load_and_frees_the_others(
    running: Cluster, checkpoint: Path, source: types_pb2.WeightSource.ValueType
) -> None:
    load_id = begin(running, checkpoint, source)
    running.workers["w1"].kill()
    load, seconds = end_of(running, load_id)
    assert seconds < END_SECONDS
    assert load.state == types_pb2.LOAD_STATE_FAILED
    assert load.failure.reason == "WORKER_LOST"
    assert load.failure.metadata["worker_id"] == "w1"
    assert_memory_is_back(running, "w0")
    assert_loads_work(running)


def test_a_killed_streamer_fails_its_load_only_and_is_started_again(
    running: Cluster, checkpoint: Path, source: types_pb2.WeightSource.ValueType
) -> None:
    """The failure tells the signal, not a time-out (A25)."""
    load_id = begin(running, checkpoint, source)
    streamer = running.streamer()
    os.kill(streamer.pid, signal.SIGBUS)
    load, seconds = end_of(running, load_id)
    assert seconds < END_SECONDS
    assert load.state == types_pb2.LOAD_STATE_FAILED
    assert load.failure.reason == "STREAMER_LOST"
    assert "signal 7 (SIGBUS)" in load.failure.message
    assert "signal 7" in running.log("coordinator")
    assert_memory_is_back(running, "w0", "w1")
    assert_loads_work(running)
    assert running.streamer().pid != streamer.pid


def test_a_cancelled_load_ends_and_gives_its_memory_back(
    running: Cluster, checkpoint: Path, source: types_pb2.WeightSource.ValueType
) -> None:
    load_id = begin(running, checkpoint, source)
    start = time.monotonic()
    result = running.loaderctl_json("cancel", load_id)
    assert result["state"] == "CANCELLED"
    load, _ = end_of(running, load_id)
    assert time.monotonic() - start < END_SECONDS + 1.0  # the command itself needs a moment
    assert load.state == types_pb2.LOAD_STATE_CANCELLED
    assert_memory_is_back(running, "w0", "w1")
    assert_loads_work(running)


def test_a_stopped_worker_fails_the_load_when_its_lease_ends(
    running: Cluster, checkpoint: Path
) -> None:
    load_id = begin(running, checkpoint)
    running.workers["w1"].send_signal(signal.SIGSTOP)
    load, seconds = end_of(running, load_id)
    assert seconds < 3.0 + 2 * END_SECONDS
    assert load.failure.reason == "WORKER_LOST"
    assert load.failure.metadata["worker_id"] == "w1"
    assert_memory_is_back(running, "w0")


def test_a_killed_coordinator_takes_its_streamer_along_and_frees_the_workers(
    running: Cluster, checkpoint: Path
) -> None:
    begin(running, checkpoint)
    streamer = running.streamer()
    assert running.coordinator is not None
    running.coordinator.kill()
    wait_for(lambda: None if streamer.is_running() and _alive(streamer) else True, END_SECONDS)
    for worker in running.workers.values():
        wait_for_small(psutil.Process(worker.pid))


def wait_for_small(process: psutil.Process) -> None:
    wait_for(lambda: process.memory_info().rss < 300 << 20 or None, 5.0)


def _alive(process: psutil.Process) -> bool:
    return process.status() != psutil.STATUS_ZOMBIE


def test_a_stopped_streamer_ends_with_its_coordinator(tmp_path: Path) -> None:
    """It cannot see that its socket is closed, so it is killed."""
    with cluster(Path("/"), tmp_path, workers=0) as alone:
        assert alone.coordinator is not None
        streamer = alone.streamer()
        streamer.suspend()
        alone.coordinator.terminate()
        assert alone.coordinator.wait(10) == 0
        assert not streamer.is_running()
