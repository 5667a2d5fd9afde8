"""Workers, their leases, and which of them form a group. Pure: time comes in as a number."""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Sequence

from loader_service import addresses
from loader_service.errors import (
    InvalidRequest,
    VersionSkew,
    WorkerBusy,
    WorkerNotFound,
    WorkersUnavailable,
    WorkerSuperseded,
)
from loader_service.v1 import coordinator_pb2, types_pb2
from loader_service.v1.types_pb2 import WorkerLoadState, WorkerState
from loader_service.version import PROTOCOL_VERSION

__all__ = ["WorkerRecord", "WorkerRegistry"]

MOST_NAME_CHARACTERS = 256

KEPT_LOST = 1000
"""Lost workers that stay listed."""

_NAMES_IN_ERROR = 5

_REMEMBERED_LIVES = 16
"""Earlier incarnations of a worker that are refused when they come back."""


@dataclasses.dataclass(slots=True)
class WorkerRecord:
    """What the coordinator knows of one worker.

    Attributes:
        registration: what the worker said when it registered.
        lease_end: time at which it counts as lost.
        heartbeat_time: wall-clock time of the last heartbeat, seconds since the epoch.
        memory: device memory at the last heartbeat.
        loads: loads that the worker reported.
        lost: the lease ran out or the worker has left.
        suspect: its data plane broke; it takes no load until its next heartbeat.
        draining: takes no new load.
        load_id: load that the worker is reserved for; empty when idle.
        rank: rank in that load.
    """

    registration: coordinator_pb2.RegisterWorkerRequest
    lease_end: float
    heartbeat_time: float
    memory: types_pb2.MemoryUsage
    loads: list[coordinator_pb2.WorkerLoad] = dataclasses.field(default_factory=list)
    lost: bool = False
    suspect: bool = False
    draining: bool = False
    load_id: str = ""
    rank: int = 0

    @property
    def worker_id(self) -> str:
        """Name of the worker."""
        return self.registration.worker_id

    @property
    def state(self) -> WorkerState.ValueType:
        """State as clients see it."""
        if self.lost:
            return WorkerState.WORKER_STATE_LOST
        if self.draining:
            return WorkerState.WORKER_STATE_DRAINING
        # A worker that still gives an ended load back is not idle yet.
        holding = any(load.state != WorkerLoadState.WORKER_LOAD_STATE_FAILED for load in self.loads)
        busy = self.load_id or self.suspect or holding
        return WorkerState.WORKER_STATE_BUSY if busy else WorkerState.WORKER_STATE_READY

    def message(self) -> types_pb2.Worker:
        """Return the worker as clients see it."""
        worker = types_pb2.Worker(
            worker_id=self.worker_id,
            address=self.registration.address,
            host=self.registration.host,
            device=self.registration.device,
            state=self.state,
            incarnation=self.registration.incarnation,
            memory=self.memory,
            load_id=self.load_id,
            rank=self.rank,
            transport=self.loads[0].transport if self.loads else "",
            package_version=self.registration.package_version,
        )
        worker.heartbeat_time.FromNanoseconds(int(self.heartbeat_time * 1e9))
        return worker


class WorkerRegistry:
    """All workers by id. Reserving and giving back is all-or-nothing."""

    def __init__(self, lease_seconds: float) -> None:
        """Start without workers; a lease lasts `lease_seconds` after each heartbeat."""
        self._lease_seconds = lease_seconds
        self._workers: dict[str, WorkerRecord] = {}
        self._drained: set[str] = set()
        self._superseded: defaultdict[str, deque[str]] = defaultdict(
            lambda: deque(maxlen=_REMEMBERED_LIVES)
        )

    def rival(self, request: coordinator_pb2.RegisterWorkerRequest) -> WorkerRecord | None:
        """Return another process of the registering worker's name whose lease still runs.

        That is another life, or the same one said to be at another address. It may be a process that
        was killed and started again within its lease, or two processes may have been given one name:
        only asking it can tell.
        """
        record = self._workers.get(request.worker_id)
        if record is None or record.lost:
            return None
        known = record.registration
        same = (known.incarnation, known.address) == (request.incarnation, request.address)
        return None if same else record

    def register(
        self, request: coordinator_pb2.RegisterWorkerRequest, now: float, wall_time: float
    ) -> str:
        """Take a worker in; a new life of a known worker replaces the old one.

        Returns:
            The load that the worker's earlier life held and that is lost with it, or "".

        Raises:
            VersionSkew: the worker speaks another version of the protocol.
            InvalidRequest: a field is missing.
            WorkerSuperseded: a newer life of this worker has registered since.
        """
        self.check(request)
        earlier = self._workers.get(request.worker_id)
        record = WorkerRecord(
            request,
            now + self._lease_seconds,
            wall_time,
            request.memory,
            list(request.loads),
            draining=request.worker_id in self._drained,
        )
        self._workers[request.worker_id] = record
        if earlier is None:
            return ""
        if earlier.registration.incarnation != request.incarnation:
            self._superseded[request.worker_id].append(earlier.registration.incarnation)
            return earlier.load_id
        record.load_id, record.rank = earlier.load_id, earlier.rank
        return ""

    def check(self, request: coordinator_pb2.RegisterWorkerRequest) -> None:
        """Refuse a registration that cannot be accepted, whoever else is there; see `register`."""
        if request.protocol_version != PROTOCOL_VERSION:
            raise VersionSkew(
                f"worker {request.worker_id!r} speaks protocol {request.protocol_version} (package "
                f"{request.package_version}), this coordinator speaks {PROTOCOL_VERSION}",
                worker_id=request.worker_id,
            )
        for field in ("worker_id", "incarnation", "address"):
            if not getattr(request, field):
                raise InvalidRequest(f"{field} is missing", field=field)
        for field in ("worker_id", "incarnation", "host", "device", "package_version"):
            # They stand in logs and tables, on one line.
            text = getattr(request, field)
            if len(text) > MOST_NAME_CHARACTERS or not text.isprintable():
                raise InvalidRequest(
                    f"{field} must be printable and at most {MOST_NAME_CHARACTERS} characters long",
                    field=field,
                )
        addresses.split(request.address)
        if request.incarnation in self._superseded[request.worker_id]:
            raise WorkerSuperseded(
                f"a newer process has taken the place of worker {request.worker_id!r}",
                worker_id=request.worker_id,
            )

    def heartbeat(
        self, request: coordinator_pb2.HeartbeatRequest, now: float, wall_time: float
    ) -> WorkerRecord:
        """Renew a lease and take the report.

        Raises:
            WorkerNotFound: the worker must register (again).
        """
        record = self._require(request.worker_id, request.incarnation)
        if record.lost:
            raise WorkerNotFound(
                f"the lease of worker {request.worker_id!r} ran out", worker_id=request.worker_id
            )
        record.lease_end = now + self._lease_seconds
        record.heartbeat_time = wall_time
        record.suspect = False
        record.memory = request.memory
        record.loads = list(request.loads)
        return record

    def set_draining(self, worker_id: str, draining: bool) -> WorkerRecord:
        """Take a worker out of service for new loads, or back in; outlives its restarts.

        Raises:
            WorkerNotFound: no worker has this name.
        """
        record = self.get(worker_id)
        record.draining = draining
        if draining:
            self._drained.add(worker_id)
        else:
            self._drained.discard(worker_id)
        return record

    def get(self, worker_id: str) -> WorkerRecord:
        """Return a worker.

        Raises:
            WorkerNotFound: no worker has this name.
        """
        record = self._workers.get(worker_id)
        if record is None:
            raise WorkerNotFound(f"there is no worker {worker_id!r}", worker_id=worker_id)
        return record

    def is_held(self, worker_id: str, load_id: str) -> bool:
        """Whether a worker that is not lost is reserved for a load."""
        record = self._workers.get(worker_id)
        return record is not None and not record.lost and record.load_id == load_id

    def deregister(self, worker_id: str, incarnation: str) -> str:
        """Forget a worker that stops; return the load that it held, or "".

        Raises:
            WorkerNotFound: it is not (or no longer) this life of the worker.
        """
        record = self._require(worker_id, incarnation)
        del self._workers[worker_id]
        self._superseded.pop(worker_id, None)
        return record.load_id

    def extend_leases(self, seconds: float) -> None:
        """Give every worker more time, because the coordinator could not listen."""
        for record in self._workers.values():
            record.lease_end += seconds

    def expire(self, now: float) -> list[WorkerRecord]:
        """Mark workers whose lease ran out as lost; return those that were not before."""
        expired = [
            record
            for record in self._workers.values()
            if not record.lost and record.lease_end <= now
        ]
        for record in expired:
            record.lost = True
        if expired:
            self._forget_lost()
        return expired

    def _forget_lost(self) -> None:
        """Forget the workers that were lost longest ago, so that names that never return do not pile up."""
        lost = [record for record in self._workers.values() if record.lost and not record.load_id]
        lost.sort(key=lambda record: record.lease_end)
        for record in lost[: max(0, len(lost) - KEPT_LOST)]:
            del self._workers[record.worker_id]
            self._superseded.pop(record.worker_id, None)

    def reserve(self, load_id: str, tp: int, worker_ids: Sequence[str]) -> list[WorkerRecord]:
        """Choose the group of a load, see `choose`, and reserve it."""
        group = self.choose(tp, worker_ids)
        for rank, record in enumerate(group):
            record.load_id, record.rank = load_id, rank
        return group

    def choose(self, tp: int, worker_ids: Sequence[str]) -> list[WorkerRecord]:
        """Return the group that a load would get now, in rank order.

        Without `worker_ids`: idle workers, those that share a host first, then by id.

        Raises:
            WorkersUnavailable: fewer idle workers than ranks.
            WorkerBusy: a named worker is not idle.
            WorkerNotFound: a named worker is unknown or lost.
            InvalidRequest: the names do not fit the number of ranks.
        """
        return self._named(tp, worker_ids) if worker_ids else self._idle(tp)

    def give_back(self, load_id: str) -> None:
        """End the reservations of a load."""
        for record in self._workers.values():
            if record.load_id == load_id:
                record.load_id, record.rank = "", 0
                # A worker that holds the load all the same says so with its next heartbeat.
                record.loads = [load for load in record.loads if load.load_id != load_id]

    def suspect(self, worker_id: str) -> None:
        """Choose this worker for no load until its next heartbeat; an unknown one is fine."""
        record = self._workers.get(worker_id)
        if record is not None:
            record.suspect = True

    def all(self) -> list[WorkerRecord]:
        """Return the workers by id."""
        return sorted(self._workers.values(), key=lambda record: record.worker_id)

    def _require(self, worker_id: str, incarnation: str) -> WorkerRecord:
        record = self._workers.get(worker_id)
        if record is None or record.registration.incarnation != incarnation:
            raise WorkerNotFound(
                f"worker {worker_id!r} is not registered in this life", worker_id=worker_id
            )
        return record

    def _idle(self, tp: int) -> list[WorkerRecord]:
        ready = [record for record in self.all() if record.state == WorkerState.WORKER_STATE_READY]
        if len(ready) < tp:
            raise self._too_few(tp)
        hosts: dict[str, list[WorkerRecord]] = {}
        for record in ready:
            hosts.setdefault(record.registration.host, []).append(record)
        # The smallest host that takes the whole group; else the fullest hosts one after another.
        fitting = [workers for workers in hosts.values() if len(workers) >= tp]
        if fitting:
            return min(fitting, key=len)[:tp]
        by_size = sorted(hosts.values(), key=len, reverse=True)
        return [record for workers in by_size for record in workers][:tp]

    def _too_few(self, tp: int) -> WorkersUnavailable:
        """Return the error that says what all the workers are, since none of them may be idle."""
        by_state: defaultdict[WorkerState.ValueType, list[str]] = defaultdict(list)
        for record in self.all():
            by_state[record.state].append(record.worker_id)
        lost = by_state[WorkerState.WORKER_STATE_LOST]
        words = {
            "idle": WorkerState.WORKER_STATE_READY,
            "busy": WorkerState.WORKER_STATE_BUSY,
            "drained": WorkerState.WORKER_STATE_DRAINING,
            "lost": WorkerState.WORKER_STATE_LOST,
        }
        there = "; ".join(
            f"{len(by_state[state])} {word} ({_some(by_state[state])})"
            for word, state in words.items()
            if by_state[state]
        )
        return WorkersUnavailable(
            f"{tp} idle workers are needed; registered: {there or 'none'}",
            needed=tp,
            workers=sum(map(len, by_state.values())) - len(lost),
            idle=",".join(by_state[WorkerState.WORKER_STATE_READY]),
            busy=",".join(by_state[WorkerState.WORKER_STATE_BUSY]),
            drained=",".join(by_state[WorkerState.WORKER_STATE_DRAINING]),
        )

    def _named(self, tp: int, worker_ids: Sequence[str]) -> list[WorkerRecord]:
        if len(worker_ids) != tp or len(set(worker_ids)) != tp:
            raise InvalidRequest(
                f"{tp} different workers must be named for tp={tp}, not {', '.join(worker_ids)}",
                field="worker_ids",
            )
        group = []
        for worker_id in worker_ids:
            record = self._workers.get(worker_id)
            # Told before who is busy: waiting does not help against a slip in a name.
            if record is None:
                raise WorkerNotFound(f"there is no worker {worker_id!r}", worker_id=worker_id)
            if record.lost:
                raise WorkerNotFound(f"worker {worker_id!r} is lost", worker_id=worker_id)
            group.append(record)
        for record in group:
            worker_id = record.worker_id
            if record.draining:
                raise WorkerBusy(
                    f"worker {worker_id!r} is drained and takes no load",
                    reason="WORKER_DRAINING",
                    worker_id=worker_id,
                )
            if record.state != WorkerState.WORKER_STATE_READY:
                raise WorkerBusy(
                    f"worker {worker_id!r} holds load {record.load_id or '(being given back)'}",
                    worker_id=worker_id,
                    load_id=record.load_id,
                )
        return group


def _some(names: Sequence[str]) -> str:
    more = ", …" if len(names) > _NAMES_IN_ERROR else ""
    return ", ".join(names[:_NAMES_IN_ERROR]) + more
