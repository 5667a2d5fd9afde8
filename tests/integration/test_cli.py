"""`loaderctl` as people and scripts use it: documents on stdout, stable exit codes, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from loader_service import demo
from loader_service.v1 import types_pb2
from tests.checkpoints import write_sparse_llama
from tests.cluster import BIN, Cluster, wait_for


@pytest.fixture
def loaded(shared_cluster: Cluster) -> Iterator[dict[str, object]]:
    result = shared_cluster.loaderctl(
        "load", str(demo.model_folder()), "--tp", "2", "--wait", "-o", "json"
    )
    assert result.returncode == 0, result.stderr
    document: dict[str, object] = json.loads(result.stdout)
    yield document
    shared_cluster.loaderctl("unload", str(document["loadId"]))


def test_a_load_is_followed_listed_and_given_back(
    shared_cluster: Cluster, loaded: dict[str, object]
) -> None:
    assert loaded["state"] == "SUCCEEDED"
    # Each worker reads the rows whole of which both keep columns: 19 MB more than the coordinator would.
    assert loaded["sourceBytes"] == 109_995_008
    ranks = loaded["ranks"]
    assert isinstance(ranks, list)
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert all(rank["bytesBySource"]["local"] == rank["wireBytes"] for rank in ranks)
    load_id = str(loaded["loadId"])
    listed = shared_cluster.loaderctl_json("get", "loads")["loads"]
    assert listed[0]["loadId"] == load_id
    workers = shared_cluster.loaderctl_json("get", "workers")["workers"]
    assert sum(worker["loadId"] == load_id for worker in workers) == 2
    table = shared_cluster.loaderctl("watch", load_id)
    assert table.returncode == 0
    assert table.stdout.count("verified") == 2
    # A committed load cannot be cancelled, and unloading it twice is as good as once.
    assert shared_cluster.loaderctl("cancel", load_id).returncode == 4
    for _ in range(2):
        assert shared_cluster.loaderctl_json("unload", load_id)["state"] == "UNLOADED"


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["load", "/nowhere"], 3, "CHECKPOINT_NOT_FOUND"),
        (["watch", "load-none"], 3, "LOAD_NOT_FOUND"),
        (["load", "MODEL", "--tp", "5"], 4, "NOT_ENOUGH_WORKERS"),
        (["plan", "MODEL", "--tp", "5"], 4, "TP_NOT_DIVISIBLE"),
        (["load", "MODEL", "--workers", "w0,w0", "--tp", "2"], 4, "INVALID_REQUEST"),
        (["load", "MODEL", "--tp", "0"], 2, ""),
    ],
)
def test_refusals_have_stable_exit_codes_and_reasons(
    shared_cluster: Cluster, arguments: list[str], code: int, reason: str
) -> None:
    words = [str(demo.model_folder()) if word == "MODEL" else word for word in arguments]
    result = shared_cluster.loaderctl(*words, "-o", "json")
    assert result.returncode == code
    document = json.loads(result.stdout) if reason else {}
    if reason:
        told = document.get("failure") or document
        assert told["reason"] == reason
    if "plan" in words:
        assert document["validTp"] == [1, 2, 3, 4, 6, 12]


def test_workers_are_asked_for_their_health_and_taken_out_of_service(
    shared_cluster: Cluster,
) -> None:
    health = shared_cluster.loaderctl_json("health", "--all")
    assert health["serving"]
    assert [server["name"] for server in health["servers"]] == [
        "coordinator",
        "w0",
        "w1",
        "w2",
        "w3",
    ]
    address = shared_cluster.loaderctl_json("describe", "worker", "w0")["address"]
    assert shared_cluster.loaderctl("health", "--worker", address).returncode == 0
    plan = ("plan", str(demo.model_folder()), "--tp", "2", "--workers", "w1,w0")
    try:
        assert shared_cluster.loaderctl_json("drain", "worker", "w0")["state"] == "DRAINING"
        refused = shared_cluster.loaderctl_json(*plan)["admission"]
        assert (refused["admitted"], refused["refusal"]["reason"]) == (False, "WORKER_DRAINING")
    finally:
        assert shared_cluster.loaderctl_json("undrain", "worker", "w0")["state"] == "READY"
    admitted = shared_cluster.loaderctl_json(*plan)["admission"]
    assert admitted["admitted"]
    assert [(rank["workerId"], rank["fits"]) for rank in admitted["ranks"]] == [
        ("w1", True),
        ("w0", True),
    ]


@pytest.mark.parametrize(
    ("how", "cancel"), [(signal.SIGINT, False), (signal.SIGINT, True), (signal.SIGKILL, True)]
)
def test_the_end_of_the_follower_leaves_the_load_running_unless_told_to_cancel(
    shared_cluster: Cluster, tmp_path: Path, how: signal.Signals, cancel: bool
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    checkpoint = write_sparse_llama(folder, layers=5)
    option = ["--cancel-on-interrupt"] if cancel else []
    process = subprocess.Popen(
        [str(BIN / "loaderctl"), "load", str(checkpoint), "--tp", "2", *option],
        env={**os.environ, "LOADER_ENDPOINT": shared_cluster.endpoint},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    (load,) = wait_for(
        lambda: (
            [
                load
                for load in shared_cluster.call(lambda client: client.list_loads())
                if load.state == types_pb2.LOAD_STATE_STREAMING
            ]
            or None
        )
    )
    process.send_signal(how)
    _, complaint = process.communicate(timeout=20)
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    if not cancel:
        command = f"loaderctl cancel {load.load_id}"
        assert command in complaint
        # What is refused for a load that has ended is done for one that goes on.
        assert shared_cluster.loaderctl(*command.split()[1:]).returncode == 0
    assert shared_cluster.loaderctl_json("watch", load.load_id)["state"] == "CANCELLED"
    shared_cluster.wait_for_workers(4)
