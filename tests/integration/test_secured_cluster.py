"""A whole cluster of processes under mTLS, with roles, and with new certificates on the way."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest

from loader_service import demo
from loader_service.channel_security import ChannelSecurity
from loader_service.errors import Unauthenticated
from loader_service.v1 import types_pb2
from tests.certificates import Authority, identity, write_access
from tests.cluster import WORKER, Cluster, wait_for
from tests.oracle import expected_slices


def test_a_cluster_loads_under_mtls_before_and_after_a_rotation(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    access = write_access(
        tmp_path,
        identity("coordinator", "coordinator", certificate="coordinator.example"),
        identity("workers", "worker", certificate="worker.example"),
        identity("ops", "operator", certificate="ops.example"),
    )

    def options(name: str) -> list[str]:
        cert, key = authority.issue(name, f"{name}.example", "127.0.0.1", "localhost")
        return [
            f"--tls-cert={cert}",
            f"--tls-key={key}",
            f"--tls-client-ca={authority.cert}",
            f"--tls-ca-cert={authority.cert}",
            f"--access={access}",
        ]

    running = Cluster(Path("/"), tmp_path, None)
    # The name is the coordinator's only; workers are asked for their own.
    running.security = dataclasses.replace(
        authority.client("ops", "ops.example"), server_name="coordinator.example"
    )
    try:
        # Secured, the servers may be reached from other machines.
        running.start_coordinator(*options("coordinator"), "--listen=0.0.0.0:0")
        port = running.endpoint.rpartition(":")[2]
        running.endpoint = f"localhost:{port}"
        for number in range(2):
            running.start_worker(f"w{number}", *options("worker"))
        running.wait_for_workers(2)
        assert_loads(running)
        before = running.security
        for name in ("coordinator", "worker"):
            options(name)
        running.security = authority.client("ops", "ops.example")
        assert_loads(running)
        # A restarted coordinator shows its new certificate to everybody at once.
        assert running.coordinator is not None
        running.coordinator.kill()
        running.coordinator.wait()
        assert running.coordinator.stdout is not None
        running.coordinator.stdout.close()
        running.start_coordinator(*options("coordinator"), f"--listen=127.0.0.1:{port}")
        running.endpoint = f"localhost:{port}"
        running.wait_for_workers(2)
        assert_loads(running)
        assert_others_are_refused(running, before)
    finally:
        running.close()


def assert_loads(running: Cluster) -> None:
    """Load, and compare what the workers hold, which they tell over TLS too."""
    load = running.load(demo.model_folder(), 2, wait_for_workers_seconds=5.0)
    assert load.state == types_pb2.LOAD_STATE_SUCCEEDED, load.failure
    assert load.owner == "ops"
    held = running.call(lambda client: client.list_tensors(load.load_id, include_sha256=True))
    for rank, expected in enumerate(expected_slices(demo.model_folder(), 2)):
        ours = {tensor.name: tensor.sha256 for tensor in held[rank]}
        assert ours == {name: piece.sha256 for name, piece in expected.items()}
    running.unload(load.load_id)


def assert_others_are_refused(running: Cluster, security: ChannelSecurity) -> None:
    running.security = dataclasses.replace(security, cert="", key="")
    with pytest.raises(Unauthenticated):
        running.call(lambda client: client.list_workers())
    running.security = security


def test_a_worker_that_is_not_let_in_says_so_and_goes_on_trying(tmp_path: Path) -> None:
    """Its access may be granted later; nothing has to be restarted then."""
    authority = Authority(tmp_path)
    access = write_access(tmp_path, identity("other", "worker", certificate="other.example"))
    cert, key = authority.issue("coordinator", "127.0.0.1")
    running = Cluster(Path("/"), tmp_path, None)
    try:
        running.start_coordinator(
            f"--tls-cert={cert}",
            f"--tls-key={key}",
            f"--tls-client-ca={authority.cert}",
            f"--access={access}",
        )
        cert, key = authority.issue("worker", "worker.example", "127.0.0.1")
        tls = [f"--tls-cert={cert}", f"--tls-key={key}", f"--tls-ca-cert={authority.cert}"]
        running.start_worker("w0", *tls)
        wait_for(lambda: "worker.example" in running.log("w0") or None)
        write_access(
            tmp_path,
            identity("workers", "worker", certificate="worker.example"),
            identity("ops", "viewer", certificate="ops.example"),
        )
        running.security = authority.client("ops", "ops.example")
        running.wait_for_workers(1)
    finally:
        running.close()


def test_servers_that_are_not_secured_do_not_listen_for_others(tmp_path: Path) -> None:
    command = [*WORKER, "--coordinator=127.0.0.1:1", "--listen=0.0.0.0:0"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert result.returncode == 1
    assert "can be reached from other machines" in result.stderr
    assert "--insecure" in result.stderr
