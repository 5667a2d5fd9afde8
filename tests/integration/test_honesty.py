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


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A sound worker, one whose device changes a byte after landing, one that does on SIGUSR1."""
    with cluster(Path("/"), tmp_path_factory.mktemp("logs"), workers=0) as running:
        for moment in ("landed", "committed"):
            running.start_worker(moment, program=[sys.executable, str(FAULTY_WORKER), moment])
        running.start_worker("sound")
        running.wait_for_workers(3)
        yield running


def test_a_byte_changed_before_commit_fails_the_load_and_names_the_slice(faulty: Cluster) -> None:
    load = faulty.load(demo.model_folder(), 2, worker_ids=["sound", "landed"])
    assert load.state == types_pb2.LOAD_STATE_FAILED
    assert load.failure.reason == "DIGEST_MISMATCH"
    assert load.failure.metadata["tensor"] == LARGEST
    assert load.failure.metadata["rank"] == "1"
    assert LARGEST in load.failure.message
    for worker_id in ("sound", "landed"):
        faulty.wait_for_empty(worker_id, 2.5)


def test_a_byte_changed_after_commit_changes_the_listed_digest(faulty: Cluster) -> None:
    load = faulty.load(
        demo.model_folder(), 2, worker_ids=["sound", "committed"], wait_for_workers_seconds=5.0
    )
    assert load.state == types_pb2.LOAD_STATE_SUCCEEDED

    def digests() -> dict[tuple[int, str], str]:
        listed = faulty.loaderctl_json("tensors", load.load_id, "--digest")
        return {(tensor["rank"], tensor["name"]): tensor["sha256"] for tensor in listed}

    before = digests()
    faulty.workers["committed"].send_signal(signal.SIGUSR1)
    after = wait_for(lambda: now if (now := digests()) != before else None)
    assert {key for key in before if before[key] != after[key]} == {(1, LARGEST)}


def test_the_reported_transport_is_what_ucx_uses(shared_cluster: Cluster, tmp_path: Path) -> None:
    """Shared memory between processes of one host; TCP alone where the operator says so."""
    load = shared_cluster.load(demo.model_folder(), 1)
    shared_cluster.unload(load.load_id)
    assert lanes_of(load.ranks[0].transport) == {"posix", "cma", "tcp"}
    with cluster(Path("/"), tmp_path, workers=1, environment={"UCX_TLS": "tcp"}) as running:
        load = running.load(demo.model_folder(), 1)
        assert lanes_of(load.ranks[0].transport) == {"tcp"}
        # The worker reports its own end of the connection.
        (worker,) = wait_for(
            lambda: (
                [
                    worker
                    for worker in running.call(lambda client: client.list_workers())
                    if worker.transport
                ]
                or None
            )
        )
        assert lanes_of(worker.transport) == {"tcp"}


def lanes_of(transport: str) -> set[str]:
    return {lane.split("/")[0] for lane in transport.split(",")}


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
