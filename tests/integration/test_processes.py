"""Processes beside gRPC: children are executed, never forked, and two lives of a worker do not mix."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import loader_kernels
import loader_service
import loader_worker
from loader_service import demo
from loader_service.client import AsyncLoaderClient
from loader_service.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from tests.checkpoints import random_tensor, write_file
from tests.cluster import BIN, COORDINATOR, WORKER, Cluster, cluster, wait_for
from tests.control_plane import control_plane

CHILD = """
import sys
from loader_service.client import LoaderClient
with LoaderClient(sys.argv[1]) as client:
    print([worker.worker_id for worker in client.list_workers()])
"""
CHILDREN, CALLERS = 20, 4


async def test_children_started_while_calls_run_can_call_themselves(tmp_path: Path) -> None:
    """The way in which the streamer is started: 20 of 20 answer within 5 s (H02)."""
    async with (
        control_plane(tmp_path, workers=["w0"]) as plane,
        AsyncLoaderClient(plane.address) as client,
    ):
        stopping = asyncio.Event()

        async def call() -> None:
            while not stopping.is_set():
                await client.list_workers()
                await asyncio.sleep(0.005)

        callers = [asyncio.create_task(call()) for _ in range(CALLERS)]
        slots = asyncio.Semaphore(4)

        async def child() -> str:
            async with slots, asyncio.timeout(5):
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-c", CHILD, plane.address, stdout=subprocess.PIPE
                )
                printed, _ = await process.communicate()
                return printed.decode().strip()

        answers = await asyncio.gather(*(child() for _ in range(CHILDREN)))
        stopping.set()
        await asyncio.gather(*callers)
    assert answers == ["['w0']"] * CHILDREN


def library_sources() -> Iterator[tuple[Path, str]]:
    for package in (loader_kernels, loader_service, loader_worker):
        for path in Path(package.__path__[0]).rglob("*.py"):
            yield path, path.read_text(encoding="utf-8")


def test_no_code_forks() -> None:
    """A fork after gRPC or UCX has started hangs the child sooner or later (H02)."""
    forking = re.compile(r"\bos\.fork|\bmultiprocessing\b|ProcessPoolExecutor|preexec_fn")
    assert [path.name for path, text in library_sources() if forking.search(text)] == []


def test_no_endpoint_goes_without_error_handling() -> None:
    """Without it the death of a peer is an abort, or is never seen (F11)."""
    disabled = re.compile(r"endpoint_error_handling\s*=\s*False")
    assert [path.name for path, text in library_sources() if disabled.search(text)] == []


def test_a_port_in_use_is_said_and_nothing_is_left_running(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        coordinator = [str(BIN / "loader-coordinator"), f"--model-root={tmp_path}"]
        worker = [str(BIN / "loader-worker"), "--coordinator=127.0.0.1:1"]
        for command in (coordinator, worker):
            result = subprocess.run(
                [*command, f"--listen={address}"],
                capture_output=True,
                text=True,
                check=False,
                timeout=20,
            )
            assert result.returncode == 1
            assert f"cannot listen at {address}" in result.stderr


@pytest.mark.parametrize(
    "option",
    ["--max-loads=0", "--max-tensors=-1", "--stall-seconds=nan", "--lease-seconds=0.5"],
)
def test_options_that_make_no_sense_are_usage_errors(option: str, tmp_path: Path) -> None:
    command = [*COORDINATOR, f"--model-root={tmp_path}", option]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert result.returncode == 2
    assert option.partition("=")[0] in result.stderr


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(Path("/"), tmp_path_factory.mktemp("logs"), workers=1) as started:
        yield started


def start_second_life(running: Cluster, log: Path) -> subprocess.Popen[str]:
    """Start another process with the name of `w0`."""
    command = [str(BIN / "loader-worker"), f"--coordinator={running.endpoint}", "--worker-id=w0"]
    with log.open("w") as errors:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, text=True)


def test_a_second_process_with_a_taken_name_ends_and_says_why(
    running: Cluster, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    second = start_second_life(running, log)
    assert second.wait(20) == 1
    assert "give this one its own --worker-id" in log.read_text()
    running.wait_for_workers(1)


def test_a_worker_whose_name_is_refused_ends_and_says_why(running: Cluster, tmp_path: Path) -> None:
    command = [*WORKER, f"--coordinator={running.endpoint}", f"--worker-id={'w' * 300}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert result.returncode == 1
    assert "loader-worker: worker_id must be printable and at most 256" in result.stderr


def test_a_worker_serves_when_it_is_registered_and_not_before(
    running: Cluster, tmp_path: Path
) -> None:
    registered = running.call(lambda client: client.get_worker("w0")).address
    with (tmp_path / "log").open("w") as log:
        alone = subprocess.Popen(
            [*WORKER, "--coordinator=127.0.0.1:1"], stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert alone.stdout is not None
        lonely = alone.stdout.readline().split()[-1]
        for address, code, status in (registered, 0, "SERVING"), (lonely, 7, "NOT_SERVING"):
            health = running.loaderctl("health", "--worker", address, "-o", "json")
            assert (health.returncode, f'"status": "{status}"' in health.stdout) == (code, True)
    finally:
        alone.terminate()
        assert alone.wait(20) == 0
        if alone.stdout is not None:
            alone.stdout.close()


def test_a_process_that_wakes_up_after_its_successor_registered_ends(
    running: Cluster, tmp_path: Path
) -> None:
    old = running.workers["w0"]
    before = running.call(lambda client: client.get_worker("w0")).incarnation
    old.send_signal(signal.SIGSTOP)
    successor = start_second_life(running, tmp_path / "log")
    try:

        def replaced() -> bool | None:
            worker = running.call(lambda client: client.get_worker("w0"))
            fresh = worker.incarnation != before and worker.state == types_pb2.WORKER_STATE_READY
            return fresh or None

        wait_for(replaced)
        old.send_signal(signal.SIGCONT)
        assert old.wait(20) == 1
        assert "a newer process has taken the place" in running.log("w0")
        assert replaced()
    finally:
        successor.terminate()
        successor.wait(20)


def test_ten_thousand_tensors_are_listed(shared_cluster: Cluster, tmp_path: Path) -> None:
    """The list comes in pages that stay far below the message limit."""
    names = [f"{number:05d}.{'x' * 80}" for number in range(10_000)]
    write_file(tmp_path / "model.safetensors", [random_tensor(name, "U8", (1,)) for name in names])
    load = shared_cluster.load(tmp_path, 1)
    assert load.state == types_pb2.LOAD_STATE_SUCCEEDED, load.failure
    listed = shared_cluster.call(lambda client: client.list_tensors(load.load_id))
    shared_cluster.unload(load.load_id)
    assert [tensor.name for tensor in listed[0]] == names


def test_planning_keeps_nobody_waiting(shared_cluster: Cluster, tmp_path: Path) -> None:
    """Health answers while the coordinator works on a large checkpoint (H04)."""
    tensors = [random_tensor(f"{number:06d}", "U8", (1,)) for number in range(30_000)]
    write_file(tmp_path / "model.safetensors", tensors)
    waits = []

    async def ask(client: AsyncLoaderClient) -> None:
        async with grpc.aio.insecure_channel(shared_cluster.endpoint) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest())
            planning = asyncio.create_task(client.plan(str(tmp_path)))
            while not planning.done():
                started = time.monotonic()
                await health.Check(health_pb2.HealthCheckRequest())
                waits.append(time.monotonic() - started)
                await asyncio.sleep(0.02)
            await planning

    shared_cluster.call(ask)
    assert len(waits) > 5
    # Nine of ten: this machine does other things too.
    assert sorted(waits)[int(len(waits) * 0.9)] < 0.1


def test_people_who_look_delay_neither_a_load_nor_the_end(tmp_path: Path) -> None:
    """A dozen long plans: a load goes past them, and the process does not wait for what they ask."""
    tensors = [random_tensor(f"{number:06d}", "U8", (1,)) for number in range(60_000)]
    many = tmp_path / "many"
    many.mkdir()
    write_file(many / "model.safetensors", tensors)
    with cluster(Path("/"), tmp_path, workers=1) as running:
        coordinator = running.coordinator
        assert coordinator is not None

        async def look(client: AsyncLoaderClient) -> float:
            plans = [asyncio.create_task(client.plan(str(many))) for _ in range(12)]
            await asyncio.sleep(0.2)
            load = await client.load(str(demo.model_folder()))
            last = [each async for each in client.watch(load.load_id)][-1]
            assert last.state == types_pb2.LOAD_STATE_SUCCEEDED
            assert sum(plan.done() for plan in plans) < 6
            coordinator.terminate()
            asked = time.monotonic()
            await asyncio.to_thread(coordinator.wait, 20)
            took = time.monotonic() - asked
            await asyncio.gather(*plans, return_exceptions=True)
            return took

        assert running.call(look) < 5.0


def test_a_workers_status_is_watched_until_the_worker_stops(tmp_path: Path) -> None:
    """The first message is the whole status; a load shows, and the end of the worker is a clean end."""
    with cluster(Path("/"), tmp_path, workers=1) as running:

        async def watch(client: AsyncLoaderClient) -> list[worker_pb2.WorkerStatus]:
            (worker,) = await client.list_workers()
            seen: list[worker_pb2.WorkerStatus] = []
            load = types_pb2.Load()
            async with grpc.aio.insecure_channel(worker.address) as channel:
                stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
                async for answer in stub.WatchStatus(worker_pb2.WatchStatusRequest()):
                    seen.append(answer.status)
                    if len(seen) == 1:
                        load = await client.load(str(demo.model_folder()))
                    elif answer.status.memory.resident_bytes:
                        running.workers["w0"].terminate()
            assert seen[-1].loads[0].load_id == load.load_id
            return seen

        seen = running.call(watch)
    assert (seen[0].worker_id, seen[0].device, seen[0].registered) == ("w0", "numpy", True)
    assert not seen[0].loads
    assert seen[-1].loads[0].state == types_pb2.WORKER_LOAD_STATE_COMMITTED
    assert seen[-1].memory.resident_bytes == 90_856_960
