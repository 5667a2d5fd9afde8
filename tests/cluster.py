"""A coordinator and workers as real processes, for integration tests and the benchmark."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from loader_service.channel_security import ChannelSecurity
from loader_service.client import AsyncLoaderClient
from loader_service.errors import LoaderError
from loader_service.v1 import types_pb2

BIN = Path(sys.executable).parent
COORDINATOR = [sys.executable, "-m", "loader_service.coordinator.main"]
WORKER = [sys.executable, "-m", "loader_worker.main"]
"""The commands by their modules: they run without being installed, too."""

START_SECONDS = 20.0

_Result = TypeVar("_Result")


class Cluster:
    """Processes of one test; `close` ends them all."""

    def __init__(self, model_root: Path, logs: Path, environment: Mapping[str, str] | None) -> None:
        self.model_root = model_root
        self.logs = logs
        self.workers: dict[str, subprocess.Popen[str]] = {}
        self._environment = {**os.environ, **(environment or {})}
        self.coordinator: subprocess.Popen[str] | None = None
        self.endpoint = ""
        self.security = ChannelSecurity()
        """How `call` and `load` show who they are."""

    def start_coordinator(self, *arguments: str) -> None:
        """Start the coordinator with a lease of 3 s."""
        self.coordinator, self.endpoint = self._start(
            "coordinator",
            [
                *COORDINATOR,
                "--listen=127.0.0.1:0",
                f"--model-root={self.model_root}",
                "--lease-seconds=3",
                *arguments,
            ],
        )

    def start_worker(
        self, worker_id: str, *arguments: str, program: Sequence[str] = WORKER
    ) -> None:
        """Start a worker; `program` stands in for the command itself."""
        self.workers[worker_id], _ = self._start(
            worker_id,
            [
                *program,
                f"--coordinator={self.endpoint}",
                "--listen=127.0.0.1:0",
                f"--worker-id={worker_id}",
                *arguments,
            ],
        )

    def call(self, work: Callable[[AsyncLoaderClient], Awaitable[_Result]]) -> _Result:
        """Run `work` with a client."""

        async def connected() -> _Result:
            async with AsyncLoaderClient(self.endpoint, 30.0, self.security) as client:
                return await work(client)

        return asyncio.run(connected())

    def load(self, path: Path | str, tp: int, **arguments: Any) -> types_pb2.Load:
        """Load a checkpoint and return the load when it serves or has ended.

        The coordinator reads unless the arguments say otherwise: most tests are about what it sends.
        """
        arguments.setdefault("source", types_pb2.WEIGHT_SOURCE_COORDINATOR)

        async def work(client: AsyncLoaderClient) -> types_pb2.Load:
            started = await client.load(str(path), tp, **arguments)
            return [load async for load in client.watch(started.load_id)][-1]

        return self.call(work)

    def unload(self, load_id: str) -> types_pb2.Load:
        """Give a load back."""
        return self.call(lambda client: client.unload(load_id))

    def loaderctl(self, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run the command line."""
        return subprocess.run(
            [str(BIN / "loaderctl"), *arguments],
            env={**self._environment, "LOADER_ENDPOINT": self.endpoint},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )

    def loaderctl_json(self, *arguments: str) -> Any:
        """Run the command line and parse what it prints."""
        return json.loads(self.loaderctl(*arguments, "-o", "json").stdout)

    def streamer(self) -> psutil.Process:
        """Return the coordinator's streamer process."""
        assert self.coordinator is not None
        parent = psutil.Process(self.coordinator.pid)
        return wait_for(
            lambda: next(
                child
                for child in parent.children()
                if "loader_service.stream.streamer" in child.cmdline()
            )
        )

    def repair(self, workers: int) -> None:
        """Start whatever has died, until `w0`, `w1`, ... are idle."""
        if self.coordinator is None or self.coordinator.poll() is not None:
            for process in self.workers.values():
                process.kill()
                process.wait()
            if self.coordinator is not None and self.coordinator.stdout is not None:
                self.coordinator.stdout.close()
            self.start_coordinator()
        for number in range(workers):
            worker = self.workers.get(f"w{number}")
            if worker is not None:
                worker.send_signal(signal.SIGCONT)
            if worker is None or worker.poll() is not None:
                self.start_worker(f"w{number}")
        self.wait_for_workers(workers)

    def wait_for_workers(self, count: int) -> None:
        """Return once `count` workers are idle."""

        def ready() -> bool:
            workers = self.call(lambda client: client.list_workers())
            return sum(w.state == types_pb2.WORKER_STATE_READY for w in workers) >= count

        wait_for(lambda: ready() or None)

    def memory(self, worker_id: str) -> types_pb2.MemoryUsage:
        """Return a worker's memory as the coordinator knows it."""
        workers = self.call(lambda client: client.list_workers())
        return next(worker.memory for worker in workers if worker.worker_id == worker_id)

    def wait_for_empty(self, worker_id: str, seconds: float) -> None:
        """Return once a worker has reported that nothing is allocated on its device."""
        wait_for(lambda: self.memory(worker_id).allocated_bytes == 0 or None, seconds)

    def log(self, name: str) -> str:
        """Return what a process has logged."""
        return (self.logs / f"{name}.log").read_text()

    def close(self) -> None:
        """End every process."""
        processes = [*self.workers.values()]
        if self.coordinator is not None:
            processes.append(self.coordinator)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _start(self, name: str, command: list[str]) -> tuple[subprocess.Popen[str], str]:
        if name in self.workers and (earlier := self.workers[name].stdout) is not None:
            earlier.close()
        with (self.logs / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=self._environment
            )
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{name} did not start: {self.log(name)}")
        return process, line.split()[-1]


@contextlib.contextmanager
def cluster(
    model_root: Path,
    logs: Path,
    workers: int,
    *,
    coordinator: Sequence[str] = (),
    worker: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Cluster]:
    """Run a coordinator and idle workers `w0`, `w1`, ... until the block ends."""
    running = Cluster(model_root, logs, environment)
    try:
        running.start_coordinator(*coordinator)
        for number in range(workers):
            running.start_worker(f"w{number}", *worker)
        running.wait_for_workers(workers)
        yield running
    finally:
        running.close()


def wait_for(ready: Callable[[], _Result | None], seconds: float = START_SECONDS) -> _Result:
    """Return the first answer that is not None; not-yet errors are tried again."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            result = ready()
        except (LoaderError, StopIteration, psutil.NoSuchProcess):
            result = None
        if result is not None:
            return result
        if time.monotonic() > deadline:
            raise TimeoutError("the wanted state did not come")
        time.sleep(0.05)
