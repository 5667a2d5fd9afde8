"""One load as the coordinator keeps it: states, progress, and who waits for a change."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import deque
from collections.abc import Collection, Sequence

from loader_service.clock import Clock
from loader_service.coordinator.planning import PlannedLoad
from loader_service.errors import LoaderError, WrongState
from loader_service.serving.status import failure_message
from loader_service.texts import MOST_NAME_BYTES, cut, short_warnings
from loader_service.v1 import types_pb2
from loader_service.v1.types_pb2 import LoadState, RankState

__all__ = ["LoadRecord", "is_settled", "is_terminal"]

RATE_SECONDS = 2.0
"""Rates are averages over this time."""

MOST_PROGRESS = 0.999
"""Progress of a load whose bytes have all landed; 1 is kept for one that is committed."""

_S = LoadState
_NEXT: dict[LoadState.ValueType, frozenset[LoadState.ValueType]] = {
    _S.LOAD_STATE_PENDING: frozenset({_S.LOAD_STATE_PLANNING}),
    _S.LOAD_STATE_PLANNING: frozenset({_S.LOAD_STATE_PREPARING}),
    _S.LOAD_STATE_PREPARING: frozenset({_S.LOAD_STATE_STREAMING}),
    _S.LOAD_STATE_STREAMING: frozenset({_S.LOAD_STATE_VERIFYING}),
    _S.LOAD_STATE_VERIFYING: frozenset({_S.LOAD_STATE_COMMITTING}),
    _S.LOAD_STATE_COMMITTING: frozenset({_S.LOAD_STATE_SUCCEEDED}),
    _S.LOAD_STATE_SUCCEEDED: frozenset({_S.LOAD_STATE_DEGRADED, _S.LOAD_STATE_UNLOADING}),
    _S.LOAD_STATE_DEGRADED: frozenset({_S.LOAD_STATE_SUCCEEDED, _S.LOAD_STATE_UNLOADING}),
    _S.LOAD_STATE_UNLOADING: frozenset({_S.LOAD_STATE_UNLOADED}),
}
_TERMINAL = frozenset({_S.LOAD_STATE_FAILED, _S.LOAD_STATE_CANCELLED, _S.LOAD_STATE_UNLOADED})
_BEFORE_COMMIT = (
    _S.LOAD_STATE_PENDING,
    _S.LOAD_STATE_PLANNING,
    _S.LOAD_STATE_PREPARING,
    _S.LOAD_STATE_STREAMING,
    _S.LOAD_STATE_VERIFYING,
)

_numbers = itertools.count()
_LAST_NUMBER = 10**15


def is_terminal(state: LoadState.ValueType) -> bool:
    """Say whether nothing more will happen to a load."""
    return state in _TERMINAL


def is_settled(state: LoadState.ValueType) -> bool:
    """Say whether the request to load has been answered, one way or the other."""
    return is_terminal(state) or state in (_S.LOAD_STATE_SUCCEEDED, _S.LOAD_STATE_DEGRADED)


@dataclasses.dataclass(slots=True)
class _Rank:
    """Progress of one rank; `samples` are (time, done bytes) of the last seconds."""

    worker_id: str
    tensor_count: int = 0
    resident_bytes: int = 0
    total_bytes: int = 0
    done_bytes: int = 0
    lanes: str = ""
    reads_itself: bool = False
    verified: bool = False
    state: RankState.ValueType = RankState.RANK_STATE_WAITING
    advanced: float = 0.0
    samples: deque[tuple[float, int]] = dataclasses.field(default_factory=deque)

    def advance(self, done_bytes: int, verified: bool, now: float) -> None:
        if done_bytes > self.done_bytes:
            self.done_bytes = done_bytes
            self.advanced = now
        if verified:
            self.verified = True
            self.state = RankState.RANK_STATE_VERIFIED
        self.samples.append((now, self.done_bytes))
        while self.samples[0][0] < now - RATE_SECONDS:
            self.samples.popleft()

    @property
    def expects_chunks(self) -> bool:
        return self.state == RankState.RANK_STATE_RECEIVING and self.done_bytes < self.total_bytes

    @property
    def share(self) -> float:
        return self.done_bytes / self.total_bytes if self.total_bytes else 1.0

    def rate(self) -> float:
        if len(self.samples) < 2:
            return 0.0
        (first_time, first_bytes), (last_time, last_bytes) = self.samples[0], self.samples[-1]
        return (
            (last_bytes - first_bytes) / (last_time - first_time) if last_time > first_time else 0.0
        )


class LoadRecord:
    """State and progress of one load. Used from one event loop; readers get snapshots."""

    def __init__(
        self, load_id: str, path: str, tp: int, clock: Clock, owner: str, stall_seconds: float
    ) -> None:
        """Start in PENDING.

        Args:
            load_id: name of the load.
            path: checkpoint as the client named it.
            tp: ranks of the group.
            clock: time.
            owner: identity that asked for the load.
            stall_seconds: a rank that no chunk reaches for so long counts as stalled.
        """
        self.owner = owner
        self._stall_seconds = stall_seconds
        self._stalled: frozenset[int] = frozenset()
        self.load_id = load_id
        self.path = path
        self.tp = tp
        self.state: LoadState.ValueType = _S.LOAD_STATE_PENDING
        self.failure: LoaderError | None = None
        self._clock = clock
        self._number = next(_numbers)
        self._created = clock.monotonic()
        self._created_wall = clock.time()
        self._settled: float | None = None
        self._architecture = ""
        self._warnings: tuple[str, ...] = ()
        self._source_bytes = 0
        self._transfer_begin: float | None = None
        self._transfer_end: float | None = None
        self._ranks: list[_Rank] = []
        self._revision = 1
        self._changed = asyncio.Event()
        # Of its own, so that progress does not wake those who only wait for the end.
        self._answered = asyncio.Event()

    def order_key(self) -> str:
        """Return a text that sorts loads newest first."""
        return f"{_LAST_NUMBER - self._number:016d}"

    @property
    def revision(self) -> int:
        """Grows with every change."""
        return self._revision

    def move_to(self, state: LoadState.ValueType) -> None:
        """Go to the next state.

        Raises:
            WrongState: the state cannot follow the present one.
        """
        if state not in _NEXT.get(self.state, frozenset()):
            raise self.wrong_state(f"cannot become {_name(state)}")
        now = self._clock.monotonic()
        if state == _S.LOAD_STATE_COMMITTING:
            self._transfer_end = now
        if state == _S.LOAD_STATE_UNLOADED:
            for rank in self._ranks:
                if rank.state != RankState.RANK_STATE_LOST:
                    rank.state = RankState.RANK_STATE_RELEASED
        self._enter(state, now)

    def end(self, state: LoadState.ValueType, failure: LoaderError | None) -> None:
        """Go to FAILED or CANCELLED, from any state that is not terminal.

        The rank whose worker the failure names is FAILED, the others are CANCELLED.

        Raises:
            WrongState: the load has ended already.
        """
        if is_terminal(self.state):
            raise self.wrong_state("has ended already")
        now = self._clock.monotonic()
        self._transfer_end = now
        self.failure = failure
        blamed = failure.metadata.get("worker_id") if failure else None
        for number, rank in enumerate(self._ranks):
            guilty = rank.worker_id == blamed
            if failure and guilty:
                failure.metadata.setdefault("rank", str(number))
            rank.state = RankState.RANK_STATE_FAILED if guilty else RankState.RANK_STATE_CANCELLED
        self._enter(state, now)

    @property
    def can_cancel(self) -> bool:
        """Whether the load's commit has not begun, and the load has not ended."""
        return self.state in _BEFORE_COMMIT

    def check_can_cancel(self) -> None:
        """Raise `WrongState` when the load is being committed or has been."""
        if not self.can_cancel:
            raise self.wrong_state("cannot be cancelled any more")

    def wrong_state(self, what: str) -> WrongState:
        """Return the error for a verb that does not fit the state."""
        name = _name(self.state)
        return WrongState(
            f"load {self.load_id} is {name} and {what}", load_id=self.load_id, state=name
        )

    def set_group(self, worker_ids: Sequence[str]) -> None:
        """Say which workers hold the ranks."""
        self._ranks = [_Rank(worker_id) for worker_id in worker_ids]
        self._touch()

    def set_plan(self, planned: PlannedLoad) -> None:
        """Say what is to be moved."""
        self.path = planned.plan.path
        self._architecture = planned.plan.architecture
        self._warnings = planned.plan.warnings
        self._source_bytes = planned.source_bytes
        for rank, totals in zip(self._ranks, planned.totals, strict=True):
            rank.tensor_count = totals.tensor_count
            rank.resident_bytes = totals.resident_bytes
            rank.total_bytes = totals.wire_bytes
        self._touch()

    def set_sources(self, alone: Collection[int], source_bytes: int) -> None:
        """Say which ranks' workers read for themselves, and what all together read from the files."""
        for number, rank in enumerate(self._ranks):
            rank.reads_itself = number in alone
        self._source_bytes = source_bytes
        self._touch()

    def set_rank(self, rank: int, state: RankState.ValueType) -> None:
        """Say where one rank stands."""
        self._ranks[rank].state = state
        self._touch()

    def set_lanes(self, lanes: Sequence[str]) -> None:
        """Say what carries each rank's data; the transfer begins."""
        now = self._clock.monotonic()
        self._transfer_begin = now
        for rank, lane in zip(self._ranks, lanes, strict=True):
            rank.lanes = lane
            rank.state = RankState.RANK_STATE_RECEIVING
            rank.advanced = now
        self._touch()

    def set_progress(self, done_bytes: Sequence[int], verified: Sequence[bool]) -> None:
        """Say how far each rank has come."""
        now = self._clock.monotonic()
        for rank, done, ok in zip(self._ranks, done_bytes, verified, strict=True):
            rank.advance(done, ok, now)
        self._touch()

    def check_stalled(self) -> None:
        """Count a change when a rank has begun or ceased to be stalled since the last time."""
        stalled = frozenset(
            number for number, rank in enumerate(self._ranks) if self._is_stalled(rank)
        )
        if stalled != self._stalled:
            self._stalled = stalled
            self._touch()

    def lose_rank(self, worker_id: str) -> None:
        """Say that a load that was committed has lost the worker of a rank."""
        self._mark(worker_id, RankState.RANK_STATE_LOST)
        if self.state == _S.LOAD_STATE_SUCCEEDED:
            self.move_to(_S.LOAD_STATE_DEGRADED)

    def regain_rank(self, worker_id: str) -> None:
        """Say that the worker of a lost rank is back and still holds its slices."""
        self._mark(worker_id, RankState.RANK_STATE_COMMITTED)
        whole = all(rank.state == RankState.RANK_STATE_COMMITTED for rank in self._ranks)
        if whole and self.state == _S.LOAD_STATE_DEGRADED:
            self.move_to(_S.LOAD_STATE_SUCCEEDED)

    def _mark(self, worker_id: str, state: RankState.ValueType) -> None:
        for rank in self._ranks:
            if rank.worker_id == worker_id:
                rank.state = state
        self._touch()

    def has_lost(self, worker_id: str) -> bool:
        """Whether a rank of this worker counts as lost."""
        return any(
            rank.worker_id == worker_id and rank.state == RankState.RANK_STATE_LOST
            for rank in self._ranks
        )

    @property
    def is_answered(self) -> bool:
        """Whether the load has been committed once, or has ended: its request is answered."""
        return self._answered.is_set()

    @property
    def worker_ids(self) -> list[str]:
        """Workers in rank order; empty before they are chosen."""
        return [rank.worker_id for rank in self._ranks]

    @property
    def all_landed(self) -> bool:
        """Whether every rank has all of its bytes."""
        return all(rank.done_bytes == rank.total_bytes for rank in self._ranks)

    async def wait_for_change(self, after_revision: int) -> None:
        """Return once the revision is greater than `after_revision`."""
        while self._revision <= after_revision:
            await self._changed.wait()

    async def wait_until_settled(self) -> None:
        """Return once the request to load has been answered."""
        await self._answered.wait()

    def message(self) -> types_pb2.Load:
        """Return the load as clients see it."""
        load = types_pb2.Load(
            load_id=self.load_id,
            state=self.state,
            path=self.path,
            architecture=cut(self._architecture, MOST_NAME_BYTES),
            tp=self.tp,
            replicas=1,
            source_bytes=self._source_bytes,
            wire_bytes=sum(rank.total_bytes for rank in self._ranks),
            resident_bytes=sum(self._resident_bytes(rank) for rank in self._ranks),
            ranks=[self._rank_message(number, rank) for number, rank in enumerate(self._ranks)],
            warnings=short_warnings(self._warnings),
            revision=self._revision,
            progress=self._progress(),
            owner=self.owner,
        )
        self._add_estimate(load)
        load.create_time.FromNanoseconds(int(self._created_wall * 1e9))
        now = self._clock.monotonic()
        until = now if self._settled is None else self._settled
        load.total_duration.FromNanoseconds(int((until - self._created) * 1e9))
        if self._transfer_begin is not None:
            end = now if self._transfer_end is None else self._transfer_end
            load.transfer_duration.FromNanoseconds(int((end - self._transfer_begin) * 1e9))
        if self.failure is not None:
            load.failure.CopyFrom(failure_message(self.failure))
        return load

    def _resident_bytes(self, rank: _Rank) -> int:
        """Device bytes that a rank keeps, or is to keep; a load that has ended keeps none."""
        return 0 if is_terminal(self.state) else rank.resident_bytes

    def _progress(self) -> float:
        """Share of the rank that has come least far; 1 is for loads that are or were committed."""
        ended_early = self.state in (_S.LOAD_STATE_FAILED, _S.LOAD_STATE_CANCELLED)
        if self._settled is not None and not ended_early:
            return 1.0
        shares = [rank.share for rank in self._ranks]
        begun = self._transfer_begin is not None
        return min(MOST_PROGRESS, *shares) if shares and begun else 0.0

    def _add_estimate(self, load: types_pb2.Load) -> None:
        """Name the slowest rank, and the time that the last one needs; nothing where none is late."""
        late = [(number, rank) for number, rank in enumerate(self._ranks) if rank.expects_chunks]
        if not late:
            return
        load.slowest_rank, _ = min(late, key=lambda entry: entry[1].share)
        rates = [rank.rate() for _, rank in late]
        if all(rates):
            seconds = max(
                (rank.total_bytes - rank.done_bytes) / rate
                for (_, rank), rate in zip(late, rates, strict=True)
            )
            load.eta_duration.FromNanoseconds(int(seconds * 1e9))

    def _is_stalled(self, rank: _Rank) -> bool:
        idle = self._clock.monotonic() - rank.advanced
        return rank.expects_chunks and idle >= self._stall_seconds

    def _rank_message(self, number: int, rank: _Rank) -> types_pb2.RankProgress:
        message = types_pb2.RankProgress(
            rank=number,
            worker_id=rank.worker_id,
            tensor_count=rank.tensor_count,
            resident_bytes=self._resident_bytes(rank),
            total_bytes=rank.total_bytes,
            done_bytes=rank.done_bytes,
            bytes_per_second=0.0 if is_settled(self.state) else rank.rate(),
            transport=rank.lanes,
            bytes_by_source=types_pb2.BytesBySource(
                **{"local_bytes" if rank.reads_itself else "coordinator_bytes": rank.done_bytes}
            ),
            verified=rank.verified,
            state=rank.state,
            stalled=self._is_stalled(rank),
        )
        if rank.expects_chunks:
            idle = self._clock.monotonic() - rank.advanced
            message.idle_duration.FromNanoseconds(int(idle * 1e9))
        return message

    def _enter(self, state: LoadState.ValueType, now: float) -> None:
        self.state = state
        if is_settled(state) and self._settled is None:
            self._settled = now
            self._answered.set()
        self._touch()

    def _touch(self) -> None:
        self._revision += 1
        # Waiters of the past go on; later ones wait for the next change.
        self._changed.set()
        self._changed = asyncio.Event()


def _name(state: LoadState.ValueType) -> str:
    return LoadState.Name(state).removeprefix("LOAD_STATE_")
