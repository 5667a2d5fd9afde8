"""Workers that read for themselves, as processes: who reads is reported, and the bytes are the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from loader_service import demo
from loader_service.v1 import types_pb2
from tests.cluster import Cluster, cluster

AUTO = types_pb2.WEIGHT_SOURCE_AUTO
LOCAL = types_pb2.WEIGHT_SOURCE_LOCAL


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Workers `w0` and `w1`, which may read everything, and `fenced`, which may not read the model."""
    with cluster(Path("/"), tmp_path_factory.mktemp("logs"), workers=2) as started:
        started.start_worker("fenced", "--model-root", str(tmp_path_factory.mktemp("elsewhere")))
        started.wait_for_workers(3)
        yield started


def digests(running: Cluster, load: types_pb2.Load) -> dict[tuple[int, str], str]:
    listed = running.loaderctl_json("tensors", load.load_id, "--digest")
    return {(tensor["rank"], tensor["name"]): tensor["sha256"] for tensor in listed}


@pytest.mark.parametrize("tp", [1, 2])
def test_workers_read_what_they_keep_and_the_streamer_reads_nothing(
    tp: int, running: Cluster
) -> None:
    names = ["w0", "w1"][:tp]
    sent = running.load(demo.model_folder(), tp, worker_ids=names)
    expected = digests(running, sent)
    running.unload(sent.load_id)
    streamer = running.streamer()
    workers = [psutil.Process(running.workers[name].pid) for name in names]
    before = [each.io_counters().read_chars for each in (streamer, *workers)]
    load = running.load(demo.model_folder(), tp, worker_ids=names, source=AUTO)
    after = [each.io_counters().read_chars for each in (streamer, *workers)]
    assert load.state == types_pb2.LOAD_STATE_SUCCEEDED, load.failure
    assert digests(running, load) == expected
    running.unload(load.load_id)
    by_streamer, *by_workers = (late - early for early, late in zip(before, after, strict=True))
    assert by_streamer < 1 << 20
    # Beside the payload: headers and samples of the proof, messages and timers.
    assert 1.0 <= sum(by_workers) / load.source_bytes < 1.01
    assert load.source_bytes >= load.wire_bytes
    for rank in load.ranks:
        assert rank.transport == "local"
        assert rank.verified
        assert rank.bytes_by_source.local_bytes == rank.total_bytes == rank.done_bytes
        assert rank.bytes_by_source.coordinator_bytes == 0


def test_what_a_worker_cannot_read_is_sent_and_said(running: Cluster) -> None:
    load = running.load(demo.model_folder(), 2, worker_ids=["w0", "fenced"], source=AUTO)
    assert load.state == types_pb2.LOAD_STATE_SUCCEEDED, load.failure
    reading, sent = load.ranks
    assert reading.bytes_by_source.local_bytes == reading.total_bytes
    assert sent.bytes_by_source.coordinator_bytes == sent.total_bytes
    assert (reading.transport, "cma" in sent.transport) == ("local", True)
    mixed = digests(running, load)
    running.unload(load.load_id)
    sent_load = running.load(demo.model_folder(), 2, worker_ids=["w0", "fenced"])
    assert digests(running, sent_load) == mixed
    running.unload(sent_load.load_id)
    assert "lies outside of" in running.log("fenced")


def test_a_worker_that_must_read_and_cannot_refuses(running: Cluster) -> None:
    path = str(demo.model_folder())
    answer = running.loaderctl(
        "load", path, "--tp", "2", "--workers", "w0,fenced", "--source", "local", "-o", "json"
    )
    failure = json.loads(answer.stdout)["failure"]
    assert failure["reason"] == "LOCAL_SOURCE_UNAVAILABLE"
    assert failure["metadata"]["worker_id"] == "fenced"
    assert failure["metadata"]["rank"] == "1"
    assert answer.returncode not in (0, 1, 2)
    assert "--source auto" in answer.stderr
    for name in ("w0", "fenced"):
        running.wait_for_empty(name, 2.5)


def test_the_coordinator_alone_reads_when_told_so(running: Cluster) -> None:
    load = running.loaderctl_json(
        "load", str(demo.model_folder()), "--workers", "w1", "--source", "coordinator"
    )
    (rank,) = load["ranks"]
    assert rank["bytesBySource"] == {"coordinator": rank["wireBytes"], "local": 0, "peer": 0}
    assert load["sourceBytes"] == 90_856_960
    running.unload(load["loadId"])
