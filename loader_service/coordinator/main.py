"""`loader-coordinator`: the server that clients and workers speak to."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from loader_service import addresses
from loader_service.channel_security import ChannelSecurity
from loader_service.checkpoint.files import DEFAULT_MAX_HEADER_BYTES, DEFAULT_MAX_TENSORS
from loader_service.clock import SystemClock
from loader_service.coordinator.coordinator import Coordinator
from loader_service.coordinator.servicer import CoordinatorServicer
from loader_service.coordinator.settings import DEFAULT_MAX_LOADS, DEFAULT_WINDOW_BYTES, Settings
from loader_service.coordinator.streamer_process import StreamerProcess
from loader_service.coordinator.worker_client import GrpcWorkerClient
from loader_service.errors import LoaderError
from loader_service.logs import log_to_stderr
from loader_service.serving.options import (
    ServingOptions,
    add_serving_arguments,
    channel_security,
    positive,
    serving_options,
    size,
)
from loader_service.serving.server import Server, stop_requested
from loader_service.v1 import coordinator_pb2_grpc
from loader_service.version import __version__

__all__ = ["main"]

SERVICE = "loader_service.v1.CoordinatorService"

SWITCH_SECONDS = 0.001
"""How long a planning thread may keep the interpreter while calls wait for an answer."""


async def serve(
    listen: str,
    settings: Settings,
    data_ports: str,
    staging: str,
    serving: ServingOptions,
    security: ChannelSecurity,
) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = stop_requested()
    sys.setswitchinterval(SWITCH_SECONDS)
    server = Server([SERVICE], serving)

    def connect(worker_id: str, address: str) -> GrpcWorkerClient:
        return GrpcWorkerClient(worker_id, address, security)

    streamer = StreamerProcess(settings.window_bytes, data_ports, staging)
    coordinator = Coordinator(settings, SystemClock(), connect, streamer.stream)
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(
        CoordinatorServicer(coordinator), server.grpc
    )
    address = await server.start(listen)
    await server.report(SERVICE, serving=True)
    background = [
        asyncio.create_task(streamer.run()),
        asyncio.create_task(coordinator.watch()),
        asyncio.create_task(stop.wait()),
    ]
    print(f"loader-coordinator listens at {address}", flush=True)  # noqa: T201 - launchers read it
    done, _ = await asyncio.wait(background, return_when=asyncio.FIRST_COMPLETED)
    # Ending the loads ends their watchers, which would otherwise use up the time to stop.
    await server.report(SERVICE, serving=False)
    await coordinator.close()
    await server.stop()
    for task in background:
        task.cancel()
    await asyncio.wait(background)
    for task in done:
        # Only a fault ends a background task before the stop does.
        task.result()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loader-coordinator",
        description="Plans loads and streams checkpoints to workers.",
    )
    parser.add_argument(
        "--listen",
        default="127.0.0.1:50051",
        metavar="HOST:PORT",
        help="where clients and workers call (default %(default)s)",
    )
    parser.add_argument("--model-root", required=True, metavar="DIR", help="where checkpoints lie")
    parser.add_argument(
        "--window-bytes",
        type=size,
        default=DEFAULT_WINDOW_BYTES,
        metavar="SIZE",
        help="memory for chunks on their way, on the host and on the GPU (default 512MiB)",
    )
    parser.add_argument(
        "--max-header-bytes",
        type=size,
        default=DEFAULT_MAX_HEADER_BYTES,
        metavar="SIZE",
        help="largest safetensors header that is accepted (default 256MiB)",
    )
    parser.add_argument(
        "--max-tensors",
        type=positive(int),
        default=DEFAULT_MAX_TENSORS,
        metavar="N",
        help=f"most tensors of a checkpoint that is accepted (default {DEFAULT_MAX_TENSORS})",
    )
    parser.add_argument(
        "--max-loads",
        type=positive(int),
        default=DEFAULT_MAX_LOADS,
        metavar="N",
        help=f"loads on their way that one identity may have (default {DEFAULT_MAX_LOADS})",
    )
    parser.add_argument(
        "--heartbeat-seconds",
        type=positive(float),
        default=1.0,
        help="how often workers report (default 1)",
    )
    parser.add_argument(
        "--lease-seconds",
        type=positive(float),
        default=10.0,
        help="how long a silent worker counts as alive (default 10)",
    )
    parser.add_argument(
        "--stall-seconds",
        type=positive(float),
        default=2.0,
        help="a rank without a chunk for so long is reported as stalled (default 2)",
    )
    parser.add_argument(
        "--staging",
        choices=("auto", "host"),
        default="auto",
        help="where chunks are made: auto takes this machine's first GPU for loads to GPUs of this "
        "machine (default), host never does",
    )
    parser.add_argument("--data-ports", default="", metavar="A-B", help="ports of the data plane")
    add_serving_arguments(parser)
    parser.add_argument("--version", action="version", version=__version__)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not Path(options.model_root).is_dir():
        parser.error(f"--model-root {options.model_root!r} is not a folder")
    if options.heartbeat_seconds >= options.lease_seconds:
        parser.error("--lease-seconds must be greater than --heartbeat-seconds")
    log_to_stderr("coordinator")
    try:
        addresses.parse_ports(options.data_ports)
        settings = Settings(
            model_root=options.model_root,
            window_bytes=options.window_bytes,
            max_header_bytes=options.max_header_bytes,
            heartbeat_seconds=options.heartbeat_seconds,
            lease_seconds=options.lease_seconds,
            stall_seconds=options.stall_seconds,
            max_loads=options.max_loads,
            max_tensors=options.max_tensors,
        )
        asyncio.run(
            serve(
                options.listen,
                settings,
                options.data_ports,
                options.staging,
                serving_options(options),
                channel_security(options),
            )
        )
    except (LoaderError, OSError) as error:
        sys.exit(f"loader-coordinator: {error}")


if __name__ == "__main__":
    main()
