"""Running one gRPC server as a process: port, health, signals, shutdown in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from loader_service import addresses
from loader_service.errors import ServiceUnavailable
from loader_service.serving.access import Access
from loader_service.serving.audit import AuditLog
from loader_service.serving.certificates import server_credentials
from loader_service.serving.interceptor import CallInterceptor
from loader_service.serving.metrics import Metrics
from loader_service.serving.options import ServingOptions

__all__ = ["Server", "stop_requested"]

GRACE_SECONDS = 2.0
_OPTIONS = (
    # Two servers on one port would take each other's calls in turn.
    ("grpc.so_reuseport", 0),
    # What is larger is a fault of the sender: lists come in pages, weights by the data plane.
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", 4 << 20),
    ("grpc.max_metadata_size", 16 << 10),
    # Clients may ask as often as ours do whether the connection still lives, and so does the server.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 20_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


class Server:
    """A gRPC server with the standard health service, and reflection where nothing is secret."""

    def __init__(self, service_names: Sequence[str], options: ServingOptions) -> None:
        """Prepare a server; add servicers to `grpc`, then `start`.

        Args:
            service_names: full names, reported by the health service beside the empty one.
            options: whom to let in, and what to record.

        Raises:
            InvalidRequest: ACCESS_FILE_INVALID.
            OSError: the audit log cannot be written.
        """
        self._options = options
        self._names = tuple(service_names)
        self._metrics = Metrics()
        self.interceptor = CallInterceptor(
            Access(options.access_file) if options.access_file else None,
            AuditLog(options.audit_log),
            self._metrics,
            options.max_streams,
        )
        self.grpc = grpc.aio.server(interceptors=[self.interceptor], options=_OPTIONS)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        if not options.tls_cert:
            reflection.enable_server_reflection(
                (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc
            )

    async def start(self, listen: str) -> str:
        """Bind `HOST:PORT`, serve, and return the address with the real port.

        The health service reports the server as a whole as SERVING; each named service is
        NOT_SERVING until its owner says otherwise by `report`.

        Raises:
            InvalidRequest: INSECURE_LISTEN, or TLS_FILES_INVALID.
            ServiceUnavailable: CANNOT_LISTEN when the port cannot be bound.
        """
        self._options.check_listen(listen)
        host, _ = addresses.split(listen)
        try:
            port = self._bind(listen)
        except RuntimeError as error:
            raise ServiceUnavailable(
                f"cannot listen at {listen}: {error}", reason="CANNOT_LISTEN"
            ) from error
        if self._options.metrics_listen:
            self._metrics.serve(self._options.metrics_listen)
        for name in self._names:
            await self.report(name, serving=False)
        await self.grpc.start()
        await self.report("", serving=True)
        return addresses.join(host, port)

    async def report(self, name: str, *, serving: bool) -> None:
        """Say whether a service does its work; the health service tells whoever asks."""
        status = health_pb2.HealthCheckResponse
        await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self) -> None:
        """Report NOT_SERVING, let calls finish for a moment, and stop."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(GRACE_SECONDS)

    def _bind(self, listen: str) -> int:
        options = self._options
        if not options.tls_cert:
            return self.grpc.add_insecure_port(listen)
        credentials = server_credentials(options.tls_cert, options.tls_key, options.tls_client_ca)
        return self.grpc.add_secure_port(listen, credentials)


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
