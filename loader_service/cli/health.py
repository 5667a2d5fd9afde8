"""Asking a server for its health, by the standard protocol that every gRPC probe speaks."""

from __future__ import annotations

import dataclasses

from grpc_health.v1 import health_pb2, health_pb2_grpc

from loader_service.channel import AsyncEndpoint
from loader_service.channel_security import ChannelSecurity
from loader_service.cli.session import Session
from loader_service.errors import LoaderError
from loader_service.v1 import coordinator_pb2, worker_pb2

__all__ = ["COORDINATOR", "WORKER", "Answer", "Target", "check"]

COORDINATOR = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].full_name
WORKER = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name

USUAL_SECONDS = 10.0
"""Deadline of a check where nobody has given one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A server to ask.

    Attributes:
        name: for people.
        address: `HOST:PORT`.
        service: full name of the gRPC service that is to be up.
        security: how it is called.
    """

    name: str
    address: str
    service: str
    security: ChannelSecurity


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What a server said.

    Attributes:
        target: the server.
        status: status of the health protocol, or UNREACHABLE.
        message: why it could not be asked.
    """

    target: Target
    status: str
    message: str = ""

    @property
    def serving(self) -> bool:
        """Whether the server does its work."""
        return self.status == "SERVING"


async def check(session: Session, target: Target) -> Answer:
    """Ask a server; one that cannot be asked does not serve."""
    timeout = session.settings.timeout_seconds or USUAL_SECONDS
    request = health_pb2.HealthCheckRequest(service=target.service)
    try:
        endpoint = AsyncEndpoint(target.address, target.security, health_pb2_grpc.HealthStub)
        try:
            answer = await endpoint.call("Check", request, timeout)
        finally:
            await endpoint.close()
    except LoaderError as error:
        return Answer(target, "UNREACHABLE", f"{error.reason}: {error.message}")
    return Answer(target, health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
