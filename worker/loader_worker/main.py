"""`loader-worker`: one process for one device."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from loader_kernels.device import Device
from loader_kernels.devices import open_device
from loader_service import addresses
from loader_service.channel import AsyncEndpoint
from loader_service.errors import InvalidRequest, LoaderError
from loader_service.logs import log_to_stderr
from loader_service.serving.options import (
    add_serving_arguments,
    channel_security,
    serving_options,
    size,
)
from loader_service.serving.server import Server, stop_requested
from loader_service.stream.threads import switch_often
from loader_service.stream.ucxx_transport import UcxxTransport
from loader_service.v1 import coordinator_pb2_grpc, worker_pb2_grpc
from loader_service.version import __version__
from loader_worker.agent import Agent
from loader_worker.servicer import WorkerServicer
from loader_worker.settings import Settings
from loader_worker.worker import Worker

__all__ = ["main"]

_log = logging.getLogger(__name__)

SERVICE = "loader_service.v1.WorkerService"


async def serve(settings: Settings, device: Device) -> None:
    """Serve with `device` until SIGTERM or SIGINT.

    Raises:
        LoaderError: the settings cannot work, or the coordinator refuses this worker for good.
        OSError: a file or an address cannot be used.
    """
    stop = stop_requested()
    # Before anything is started: a refused option must not leave UCX's threads behind.
    settings.serving.check_listen(settings.listen)
    coordinator = AsyncEndpoint(
        settings.coordinator, settings.security, coordinator_pb2_grpc.CoordinatorServiceStub
    )
    server = Server([SERVICE], settings.serving)
    host = await asyncio.to_thread(_advertised_host, settings)
    transport = UcxxTransport.start(settings.data_ports)
    worker = Worker(settings.worker_id, device, transport, settings.model_root)
    tasks: set[asyncio.Task[Any]] = set()

    def start(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        tasks.add(task)
        return task

    def report(serving: bool) -> None:
        # Not awaited: a watcher of the health service that does not read must not stop heartbeats.
        start(server.report(SERVICE, serving=serving)).add_done_callback(tasks.discard)

    try:
        servicer = WorkerServicer(worker, host)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.grpc)
        _, port = addresses.split(await server.start(settings.listen))
        _, advertised = addresses.split(settings.advertise or settings.listen)
        address = addresses.join(host, advertised or port)
        print(f"loader-worker {worker.worker_id} listens at {address}", flush=True)  # noqa: T201 - launchers read it
        agent = Agent(worker, coordinator, address, report)
        membership, stopping = start(agent.run()), start(stop.wait())
        await asyncio.wait((membership, stopping), return_when=asyncio.FIRST_COMPLETED)
        membership.cancel()
        await agent.deregister()
        servicer.end_watches()
        await server.stop()
        with contextlib.suppress(asyncio.CancelledError):
            await membership
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await coordinator.close()
        await worker.close()
        await transport.close()


def _advertised_host(settings: Settings) -> str:
    """Return the host that others reach this worker at; never a wildcard."""
    if settings.advertise:
        host, _ = addresses.split(settings.advertise)
        if addresses.is_wildcard(host):
            raise InvalidRequest(f"nobody can connect to {host}", field="advertise")
        return host
    host, _ = addresses.split(settings.listen)
    if not addresses.is_wildcard(host):
        return host
    return addresses.local_address_towards(*addresses.split(settings.coordinator))


def _default_worker_id() -> str:
    rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    return f"{socket.gethostname()}-{rank}"


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="loader-worker", description="Receives weights to one device and keeps them there."
    )
    parser.add_argument(
        "--coordinator", required=True, metavar="HOST:PORT", help="whom to register with"
    )
    parser.add_argument(
        "--listen",
        default="",
        metavar="HOST:PORT",
        help="where the coordinator and clients call; default any free port, of every address when secured, else of this machine only",
    )
    parser.add_argument(
        "--advertise", default="", metavar="HOST:PORT", help="address given to others"
    )
    parser.add_argument(
        "--device",
        default="numpy",
        help="numpy (host memory) or cuda:N; with several GPUs rather give each worker one of its "
        "own by CUDA_VISIBLE_DEVICES, and cuda:0",
    )
    parser.add_argument(
        "--memory-limit",
        type=size,
        metavar="SIZE",
        help="most device bytes to use, e.g. 8GiB",
    )
    parser.add_argument(
        "--worker-id",
        default=_default_worker_id(),
        metavar="ID",
        help="name of its own in the cluster, kept across restarts (default %(default)s)",
    )
    parser.add_argument("--data-ports", default="", metavar="A-B", help="ports of the data plane")
    parser.add_argument(
        "--model-root",
        metavar="DIR",
        help="read checkpoints oneself beneath this folder only; default wherever this process may and the "
        "files are proved to be the coordinator's",
    )
    add_serving_arguments(parser)
    parser.add_argument("--version", action="version", version=__version__)
    return parser.parse_args(arguments)


def make_settings(options: argparse.Namespace) -> Settings:
    """Return the settings that the command line gives.

    Raises:
        InvalidRequest: an option makes no sense.
    """
    serving = serving_options(options)
    return Settings(
        coordinator=options.coordinator,
        worker_id=options.worker_id,
        listen=options.listen or addresses.join(serving.default_host, 0),
        advertise=options.advertise,
        data_ports=addresses.parse_ports(options.data_ports),
        model_root=_model_root(options.model_root),
        serving=serving,
        security=channel_security(options),
    )


def _model_root(folder: str | None) -> Path | None:
    if folder is None:
        return None
    if not Path(folder).is_dir():
        raise InvalidRequest(f"--model-root {folder!r} is not a folder", field="model_root")
    return Path(folder).resolve()


def _open_device(name: str, memory_limit: int | None) -> Device:
    try:
        return open_device(name, memory_limit)
    except ValueError as error:
        raise InvalidRequest(str(error), field="device") from error


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    log_to_stderr(f"worker {options.worker_id}")
    try:
        settings = make_settings(options)
        device = _open_device(options.device, options.memory_limit)
        if options.device != "numpy":
            switch_often()
        asyncio.run(serve(settings, device))
    except (LoaderError, OSError) as error:
        sys.exit(f"loader-worker: {error}")


if __name__ == "__main__":
    main()
