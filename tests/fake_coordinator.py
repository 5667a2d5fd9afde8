"""A coordinator with fixed answers, inside the test's process, for tests of the command line.

Answers are those of `tests.messages`. A path or id `refuse-REASON` is refused as `REFUSALS` says,
`hang` is not answered.
A watched load sends what the test has put into `updates`, and ends at one that is settled.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loader_service import errors
from loader_service.channel import FAILURE_KEY
from loader_service.errors import LoaderError
from loader_service.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from tests import messages

REFUSALS: dict[str, LoaderError] = {
    error.reason: error
    for error in (
        errors.LoadNotFound("no load has this name", load_id="load-none"),
        errors.WorkersUnavailable("4 idle workers are needed, 1 are there: w0", needed=4),
        errors.WorkerBusy("worker 'w0' holds load load-1", worker_id="w0", load_id="load-1"),
        errors.PlanRefused(
            "5 does not divide 12; group sizes that fit: 1, 2, 4",
            reason="TP_NOT_DIVISIBLE",
            valid_tp="1,2,4",
        ),
        errors.Conflict("the id was used for another request", reason="REQUEST_ID_REUSED"),
        errors.AccessDenied("'anna' has the role viewer; Load is for admin, operator"),
        errors.Unauthenticated("the bearer token is not known", reason="TOKEN_UNKNOWN"),
        errors.ServiceUnavailable("the coordinator is stopping", reason="SHUTTING_DOWN"),
        errors.DataLoss("the file became shorter", reason="FILE_TRUNCATED"),
        errors.DeadlineExceeded("the answer did not come in time"),
    )
}
_SETTLED = (
    types_pb2.LOAD_STATE_SUCCEEDED,
    types_pb2.LOAD_STATE_FAILED,
    types_pb2.LOAD_STATE_CANCELLED,
)


class FakeCoordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Answers every method that clients call.

    Attributes:
        endpoint: its address.
        updates: what a watched load sends next.
        requests: every request that came, in order.
        seconds_left: deadline of every request, None without one.
        loads: what is listed.
        away: refuse everything as a coordinator does that is stopping.
        serving: what the health service says.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self.updates: queue.Queue[types_pb2.Load] = queue.Queue()
        self.requests: list[Any] = []
        self.seconds_left: list[float | None] = []
        self.loads = [messages.streaming(), messages.succeeded(), messages.failed()]
        self.away = False
        self.serving = health_pb2.HealthCheckResponse.SERVING

    def put(self, *loads: types_pb2.Load) -> None:
        """Send these to whoever watches."""
        for revision, load in enumerate(loads, start=self.updates.qsize() + 100):
            load.revision = revision
            self.updates.put(load)

    def last(self, kind: type[Any]) -> Any:
        """Return the last request of a kind."""
        return [request for request in self.requests if isinstance(request, kind)][-1]

    def Load(self, request: Any, context: Any) -> Any:
        self._take(request, context, request.path)
        started = types_pb2.Load(
            load_id="load-5e5e5e5e",
            state=types_pb2.LOAD_STATE_PENDING,
            path=request.path,
            tp=request.tp,
            replicas=1,
        )
        return coordinator_pb2.LoadResponse(load=started)

    def GetLoad(self, request: Any, context: Any) -> Any:
        self._take(request, context, request.load_id)
        load = next(
            (load for load in self.loads if load.load_id == request.load_id), messages.succeeded()
        )
        return coordinator_pb2.GetLoadResponse(load=load)

    def ListLoads(self, request: Any, context: Any) -> Any:
        self._take(request, context, "")
        return coordinator_pb2.ListLoadsResponse(loads=self.loads)

    def WatchLoad(self, request: Any, context: Any) -> Any:
        self._take(request, context, request.load_id)
        while context.is_active():
            try:
                load = self.updates.get(timeout=0.05)
            except queue.Empty:
                continue
            yield coordinator_pb2.WatchLoadResponse(load=load)
            if load.state in _SETTLED:
                return

    def CancelLoad(self, request: Any, context: Any) -> Any:
        self._take(request, context, request.load_id)
        load = messages.streaming()
        load.state = types_pb2.LOAD_STATE_CANCELLED
        return coordinator_pb2.CancelLoadResponse(load=load)

    def Unload(self, request: Any, context: Any) -> Any:
        self._take(request, context, request.load_id)
        load = messages.succeeded()
        load.state = types_pb2.LOAD_STATE_UNLOADED
        return coordinator_pb2.UnloadResponse(load=load)

    def ListWorkers(self, request: Any, context: Any) -> Any:
        self._take(request, context, "")
        return coordinator_pb2.ListWorkersResponse(workers=self._workers())

    def GetWorker(self, request: Any, context: Any) -> Any:
        self._take(request, context, request.worker_id)
        return coordinator_pb2.GetWorkerResponse(worker=self._workers()[0])

    def DrainWorker(self, request: Any, context: Any) -> Any:
        self._take(request, context, request.worker_id)
        worker = self._workers()[1]
        worker.state = types_pb2.WORKER_STATE_DRAINING
        return coordinator_pb2.DrainWorkerResponse(worker=worker)

    def UndrainWorker(self, request: Any, context: Any) -> Any:
        self._take(request, context, request.worker_id)
        return coordinator_pb2.UndrainWorkerResponse(worker=self._workers()[1])

    def PlanLoad(self, request: Any, context: Any) -> Any:
        self._take(request, context, request.path)
        plan = coordinator_pb2.PlanLoadResponse()
        plan.CopyFrom(messages.PLAN)
        if not request.include_tensors:
            plan.ClearField("tensors")
        if request.worker_ids:
            plan.admission.admitted = True
            plan.admission.ClearField("refusal")
            for rank in plan.admission.ranks:
                rank.free_bytes, rank.fits = 1 << 30, True
        return plan

    def InspectCheckpoint(self, request: Any, context: Any) -> Any:
        self._take(request, context, request.path)
        return messages.CHECKPOINT

    def _workers(self) -> list[types_pb2.Worker]:
        busy = messages.worker()
        busy.address = self.endpoint
        idle = types_pb2.Worker(
            worker_id="host-1",
            address=self.endpoint,
            host="host",
            device="numpy",
            state=types_pb2.WORKER_STATE_READY,
            incarnation="fedcba9876543210",
            memory=types_pb2.MemoryUsage(free_bytes=80 << 30, total_bytes=80 << 30),
            package_version="0.1.0",
        )
        idle.heartbeat_time.FromJsonString("2026-12-01T05:06:09Z")
        return [busy, idle]

    def _take(self, request: Any, context: Any, name: str) -> None:
        """Keep a request; refuse it when its name says so."""
        self.requests.append(request)
        self.seconds_left.append(context.time_remaining())
        while name == "hang" and context.is_active():
            time.sleep(0.01)
        if self.away:
            name = "refuse-SHUTTING_DOWN"
        if not name.startswith("refuse-"):
            return
        error = REFUSALS[name.removeprefix("refuse-")]
        reason, message, metadata = errors.to_fields(error)
        failure = types_pb2.Failure(reason=reason, message=message, metadata=metadata)
        context.set_trailing_metadata(((FAILURE_KEY, failure.SerializeToString()),))
        context.abort(error.status, message)


class _FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    def ListTensors(self, request: Any, context: Any) -> Any:
        return worker_pb2.ListTensorsResponse(rank=0, tensors=messages.SLICES[0])


class _FakeHealth(health_pb2_grpc.HealthServicer):
    def __init__(self, coordinator: FakeCoordinator) -> None:
        self._coordinator = coordinator

    def Check(self, request: Any, context: Any) -> Any:
        return health_pb2.HealthCheckResponse(status=self._coordinator.serving)


@contextlib.contextmanager
def fake_coordinator(
    credentials: grpc.ServerCredentials | None = None,
) -> Iterator[FakeCoordinator]:
    """Serve on a free port of this machine, with TLS where credentials are given."""
    server = grpc.server(futures.ThreadPoolExecutor(8))
    # Only what clients call is there.
    fake = FakeCoordinator()  # type: ignore[abstract]
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(fake, server)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(_FakeWorker(), server)  # type: ignore[abstract]
    health_pb2_grpc.add_HealthServicer_to_server(_FakeHealth(fake), server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    fake.endpoint = f"127.0.0.1:{port}"
    server.start()
    try:
        yield fake
    finally:
        server.stop(None).wait()
