"""Running one gRPC server as a process: port, health, signals, shutdown in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from loader_service import addresses
from loader_service.errors import ServiceUnavailable
from loader_service.rpc import ErrorInterceptor, server_options

__all__ = ["Server", "stop_requested"]

GRACE_SECONDS = 2.0


class Server:
    """A gRPC server with the standard health service."""

    def __init__(self, service_names: Sequence[str]) -> None:
        """Prepare a server; add servicers to `grpc`, then `start`.

        Args:
            service_names: full names, reported by the health service beside the empty one.
        """
        self.grpc = grpc.aio.server(interceptors=[ErrorInterceptor()], options=server_options())
        self._health = health.aio.HealthServicer()
        self._names = ("", *service_names)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)

    async def start(self, listen: str) -> str:
        """Bind `HOST:PORT`, serve, and return the address with the real port.

        Raises:
            ServiceUnavailable: CANNOT_LISTEN when the port cannot be bound.
        """
        host, _ = addresses.split(listen)
        try:
            port = self.grpc.add_insecure_port(listen)
        except RuntimeError as error:
            raise ServiceUnavailable(
                f"cannot listen at {listen}: {error}", reason="CANNOT_LISTEN"
            ) from error
        await self.grpc.start()
        for name in self._names:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return addresses.join(host, port)

    async def stop(self) -> None:
        """Report NOT_SERVING, let calls finish for a moment, and stop."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(GRACE_SECONDS)


def stop_requested() -> asyncio.Event:
    """Return an event that SIGTERM or SIGINT sets; a second signal ends the process at once."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()

    def request(number: signal.Signals) -> None:
        event.set()
        signal.signal(number, signal.SIG_DFL)
        loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, request, number)
    return event
