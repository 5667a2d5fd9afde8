"""Numbers for Prometheus, served on a port of their own.

The gRPC metrics have the names of the grpc-ecosystem set, so that existing dashboards fit.
"""

from __future__ import annotations

import functools
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from loader_service import addresses
from loader_service.errors import ServiceUnavailable
from loader_service.version import __version__

__all__ = ["Metrics"]

REQUEST_SECONDS = 5
_LABELS = ("grpc_type", "grpc_service", "grpc_method")


class Metrics:
    """The metrics of one process."""

    def __init__(self) -> None:
        """Start at zero, in a registry of its own."""
        self.registry = CollectorRegistry()
        build = Gauge("loader_build_info", "Version.", ("version",), registry=self.registry)
        build.labels(__version__).set(1)
        started = Counter("grpc_server_started", "Calls begun.", _LABELS, registry=self.registry)
        handled = Counter(
            "grpc_server_handled", "Calls ended.", (*_LABELS, "grpc_code"), registry=self.registry
        )
        seconds = Histogram(
            "grpc_server_handling_seconds",
            "Time from a call's begin to its end.",
            _LABELS,
            registry=self.registry,
        )
        # Kept by method, since finding a labelled number costs more than counting with it.
        self._started = functools.cache(lambda *call: started.labels(*_labels(*call)))
        self._seconds = functools.cache(lambda *call: seconds.labels(*_labels(*call)))
        self._handled = functools.cache(
            lambda kind, method, code: handled.labels(*_labels(kind, method), _camel_case(code))
        )

    def call_started(self, kind: str, method: str) -> None:
        """Count a call; `kind` is for example `unary`, `method` `/package.Service/Method`."""
        self._started(kind, method).inc()

    def call_ended(self, kind: str, method: str, code: grpc.StatusCode, seconds: float) -> None:
        """Count a call's end."""
        self._handled(kind, method, code).inc()
        self._seconds(kind, method).observe(seconds)

    def serve(self, listen: str) -> str:
        """Serve the numbers over HTTP from a thread, and return the address with the real port.

        Raises:
            ServiceUnavailable: CANNOT_LISTEN.
        """
        host, port = addresses.split(listen)
        try:
            server, _ = start_http_server(port, host, registry=self.registry)
        except OSError as error:
            raise ServiceUnavailable(
                f"cannot listen at {listen}: {error.strerror}", reason="CANNOT_LISTEN"
            ) from error
        # A connection that asks for nothing would keep its thread for ever.
        handler: Any = server.RequestHandlerClass
        handler.timeout = REQUEST_SECONDS
        return addresses.join(host, server.server_port)


def _labels(kind: str, method: str) -> tuple[str, str, str]:
    service, _, name = method.removeprefix("/").partition("/")
    return kind, service, name


def _camel_case(code: grpc.StatusCode) -> str:
    """Return the code as the grpc-ecosystem metrics spell it, e.g. `NotFound`."""
    return "OK" if code is grpc.StatusCode.OK else code.name.title().replace("_", "")
