"""Nothing is pretended: digests come from the device, lanes from UCX, reads from the kernel."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loader_service import demo
from loader_service.v1 import types_pb2
from tests.cluster import Cluster, cluster, wait_for

FAULTY_WORKER = Path(__file__).with_name("faulty_worker.py")
LARGEST = "embeddings.word_embeddings.weight"


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(Path("/"), tmp_path, workers=0) as running:
        yield running


def start_faulty_worker(running: Cluster, moment: str) -> None:
    running.start_worker("faulty", program=[sys.executable, str(FAULTY_WORKER), moment])
    running.start_worker("sound")
    running.wait_for_workers(2)


def test_a_byte_changed_before_commit_fails_the_load_and_names_the_slice(
    coordinator: Cluster,
) -> None:
    start_faulty_worker(coordinator, "landed")
    load = coordinator.load(demo.model_folder(), 2, worker_ids=["sound", "faulty"])
    assert load.state == types_pb2.LOAD_STATE_FAILED
    assert load.failure.reason == "DIGEST_MISMATCH"
    assert load.failure.metadata["tensor"] == LARGEST
    assert load.failure.metadata["rank"] == "1"
    assert LARGEST in load.failure.message
    for worker_id in ("sound", "faulty"):
        wait_for(lambda w=worker_id: coordinator.memory(w).allocated_bytes == 0 or None, 2.5)


def test_a_byte_changed_after_commit_changes_the_listed_digest(coordinator: Cluster) -> None:
    start_faulty_worker(coordinator, "committed")
    load = coordinator.load(demo.model_folder(), 2, worker_ids=["sound", "faulty"])
    assert load.state == types_pb2.LOAD_STATE_SUCCEEDED

    def digests() -> dict[tuple[int, str], str]:
        listed = coordinator.loaderctl_json("tensors", load.load_id, "--digest")
        return {(tensor["rank"], tensor["name"]): tensor["sha256"] for tensor in listed}

    before = digests()
    coordinator.workers["faulty"].send_signal(signal.SIGUSR1)
    after = wait_for(lambda: now if (now := digests()) != before else None)
    assert {key for key in before if before[key] != after[key]} == {(1, LARGEST)}


@pytest.mark.parametrize("tls", ["tcp", "posix,cma,tcp"])
def test_the_reported_transport_is_what_ucx_uses(tmp_path: Path, tls: str) -> None:
    with cluster(Path("/"), tmp_path, workers=1, environment={"UCX_TLS": tls}) as running:
        load = running.load(demo.model_folder(), 1)
        (rank,) = load.ranks
        lanes = {lane.split("/")[0] for lane in rank.transport.split(",")}
        assert lanes == set(tls.split(","))
        workers = wait_for(
            lambda: (
                [
                    worker
                    for worker in running.call(lambda client: client.list_workers())
                    if worker.transport
                ]
                or None
            )
        )
        assert {lane.split("/")[0] for lane in workers[0].transport.split(",")} == lanes


def test_each_source_byte_is_read_once(shared_cluster: Cluster) -> None:
    """Counted by the kernel for the streamer, the only process that reads payload."""
    streamer = shared_cluster.streamer()
    for tp in (2, 3):
        before = streamer.io_counters().read_chars
        load = shared_cluster.load(demo.model_folder(), tp)
        read = streamer.io_counters().read_chars - before
        shared_cluster.unload(load.load_id)
        assert load.source_bytes == 90_856_960
        # Beside the payload the streamer reads a few bytes to wake its event loop.
        assert 1.0 <= read / load.source_bytes < 1.005
