"""A worker's agent against a played coordinator: what ends the worker, and when it serves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loader_kernels.testing import CountingDevice
from loader_service.errors import (
    AccessDenied,
    Conflict,
    InternalError,
    InvalidRequest,
    LoaderError,
    ServiceUnavailable,
    Unauthenticated,
    VersionSkew,
    WorkerNotFound,
    WorkerSuperseded,
)
from loader_service.testing.memory_transport import MemoryNetwork, MemoryTransport
from loader_service.v1 import coordinator_pb2
from loader_worker import agent
from loader_worker.agent import Agent
from loader_worker.worker import Worker

LEASE_SECONDS = 0.05


class PlayedCoordinator:
    """Answers every call with the next of `answers`: an error, or None for success.

    The last one is repeated.
    """

    def __init__(self, *answers: LoaderError | None) -> None:
        self.answers = list(answers)
        self.calls: list[str] = []

    async def call(self, method: str, request: Any, timeout_seconds: float) -> Any:
        self.calls.append(method)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is not None:
            raise answer
        if method == "Heartbeat":
            return coordinator_pb2.HeartbeatResponse()
        terms = coordinator_pb2.RegisterWorkerResponse()
        terms.heartbeat_interval.FromMilliseconds(1)
        terms.lease_duration.FromMilliseconds(int(LEASE_SECONDS * 1000))
        return terms


class Member:
    """A worker's agent and what it has said of its contact."""

    def __init__(self, *answers: LoaderError | None) -> None:
        self.coordinator = PlayedCoordinator(*answers)
        self.contact: list[bool] = []
        worker = Worker("w0", CountingDevice(), MemoryTransport(MemoryNetwork()))
        endpoint: Any = self.coordinator
        self.agent = Agent(worker, endpoint, "here:1", self.contact.append)

    async def until_contact(self, contact: list[bool]) -> None:
        """Run until the contact was as given."""
        running = asyncio.create_task(self.agent.run())
        async with asyncio.timeout(5):
            while self.contact != contact and not running.done():  # noqa: ASYNC110 (it has no event)
                await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.wait([running])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_RETRY_SECONDS", (0.001,))


@pytest.mark.parametrize(
    "refusal",
    [
        InvalidRequest("worker_id must be printable", field="worker_id"),
        VersionSkew("protocol 2"),
        WorkerSuperseded("a newer process"),
        Conflict("taken", reason="WORKER_ID_TAKEN"),
    ],
)
async def test_what_will_not_change_ends_the_worker(refusal: LoaderError) -> None:
    member = Member(refusal)
    async with asyncio.timeout(5):
        with pytest.raises(type(refusal)):
            await member.agent.run()
    # A coordinator that has refused it does not know it; saying goodbye would only confuse its log.
    await member.agent.deregister()
    assert (member.coordinator.calls, member.contact) == (["RegisterWorker"], [])


@pytest.mark.parametrize(
    "failure",
    [
        ServiceUnavailable("nobody is there"),
        Unauthenticated("the token is not known"),  # tokens rotate
        AccessDenied("no such role"),  # access may be granted later
        InternalError("a fault"),
        InvalidRequest("no such file", reason="FILE_UNREADABLE"),  # just being exchanged
        InvalidRequest("half a file", reason="TLS_FILES_INVALID"),
        InvalidRequest("half a file", reason="TOKEN_INVALID"),
    ],
)
async def test_what_may_pass_is_tried_again(failure: LoaderError) -> None:
    member = Member(failure, failure, None)
    await member.until_contact([True])
    assert member.coordinator.calls[:3] == ["RegisterWorker"] * 3


async def test_contact_is_lost_after_a_whole_lease_and_comes_back() -> None:
    member = Member(None, *[ServiceUnavailable("away")] * 300, None)
    await member.until_contact([True, False, True])
    assert len(member.coordinator.calls) > 300


async def test_one_missed_heartbeat_is_no_loss() -> None:
    member = Member(None, ServiceUnavailable("away"), None)
    running = asyncio.create_task(member.agent.run())
    while len(member.coordinator.calls) < 5:  # noqa: ASYNC110 (it has no event)
        await asyncio.sleep(0.001)
    running.cancel()
    assert member.contact == [True]


async def test_a_worker_that_the_coordinator_has_forgotten_has_no_contact_until_it_registers() -> (
    None
):
    member = Member(None, WorkerNotFound("who?"), None)
    await member.until_contact([True, False, True])
    assert member.coordinator.calls[:3] == ["RegisterWorker", "Heartbeat", "RegisterWorker"]
