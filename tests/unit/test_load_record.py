"""A load's record: its table of states, revisions, rates, durations and waiters."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeAlias

import pytest

from loader_service.coordinator.planning import PlannedLoad
from loader_service.coordinator.record import RATE_SECONDS, LoadRecord, is_settled, is_terminal
from loader_service.errors import LoadCancelled, WorkerLost, WrongState
from loader_service.plan.slices import LoadPlan
from loader_service.v1 import types_pb2
from loader_service.v1.types_pb2 import LoadState
from tests.plans import sized, write_plan

State: TypeAlias = LoadState.ValueType

PENDING = types_pb2.LOAD_STATE_PENDING
PLANNING = types_pb2.LOAD_STATE_PLANNING
PREPARING = types_pb2.LOAD_STATE_PREPARING
STREAMING = types_pb2.LOAD_STATE_STREAMING
VERIFYING = types_pb2.LOAD_STATE_VERIFYING
COMMITTING = types_pb2.LOAD_STATE_COMMITTING
SUCCEEDED = types_pb2.LOAD_STATE_SUCCEEDED
DEGRADED = types_pb2.LOAD_STATE_DEGRADED
UNLOADING = types_pb2.LOAD_STATE_UNLOADING
UNLOADED = types_pb2.LOAD_STATE_UNLOADED
FAILED = types_pb2.LOAD_STATE_FAILED
CANCELLED = types_pb2.LOAD_STATE_CANCELLED

WAY: tuple[State, ...] = (
    PENDING, PLANNING, PREPARING, STREAMING, VERIFYING, COMMITTING, SUCCEEDED, DEGRADED, UNLOADING,
    UNLOADED,
)  # fmt: skip
"""The longest way through the states."""

LEGAL = {*itertools.pairwise(WAY), (SUCCEEDED, UNLOADING), (DEGRADED, SUCCEEDED)}
STALL = 2.0
ALL_STATES = tuple(LoadState.values())


class FakeClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1_000_000.25 + self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def new_record(clock: FakeClock, path: str = "p", tp: int = 1) -> LoadRecord:
    return LoadRecord("load-1", path, tp, clock, "somebody", STALL)


@pytest.fixture
def record(clock: FakeClock) -> LoadRecord:
    return new_record(clock, "some/path", 2)


def go_to(record: LoadRecord, state: State) -> None:
    """Move along the way until `state`."""
    for step in WAY[1 : WAY.index(state) + 1]:
        record.move_to(step)


def set_plan(record: LoadRecord, plan: LoadPlan) -> None:
    record.set_plan(
        PlannedLoad(
            plan=plan,
            chunk_bytes=1 << 20,
            chunks=(),
            totals=tuple(plan.totals(rank) for rank in range(plan.tp)),
            staging_bytes=(),
            read_alone_bytes=(),
            source_bytes=plan.source_bytes,
        )
    )


def name(state: State) -> str:
    return LoadState.Name(state).removeprefix("LOAD_STATE_")


# ---------------------------------------------------------------- states


@pytest.mark.parametrize("before", WAY, ids=name)
def test_only_the_transitions_of_the_table_are_allowed(before: State, clock: FakeClock) -> None:
    for after in ALL_STATES:
        record = new_record(clock)
        go_to(record, before)
        revision = record.revision
        if (before, after) in LEGAL:
            record.move_to(after)
            assert (record.state, record.revision) == (after, revision + 1)
            continue
        with pytest.raises(
            WrongState, match=f"load-1 is {name(before)} and cannot become"
        ) as caught:
            record.move_to(after)
        assert caught.value.metadata == {"load_id": "load-1", "state": name(before)}
        assert (record.state, record.revision) == (before, revision)


@pytest.mark.parametrize("end", [FAILED, CANCELLED], ids=name)
@pytest.mark.parametrize("before", WAY, ids=name)
def test_a_load_may_end_from_every_state_that_is_not_terminal(
    before: State, end: State, record: LoadRecord
) -> None:
    go_to(record, before)
    error = WorkerLost("gone", worker_id="w")
    if before == UNLOADED:
        with pytest.raises(WrongState, match="has ended already"):
            record.end(end, error)
        assert (record.state, record.failure) == (UNLOADED, None)
        return
    record.end(end, error)
    assert (record.state, record.failure) == (end, error)
    for after in ALL_STATES:
        with pytest.raises(WrongState):
            record.move_to(after)
    with pytest.raises(WrongState):
        record.end(FAILED, LoadCancelled("again"))
    assert (record.state, record.failure) == (end, error)


@pytest.mark.parametrize("state", WAY, ids=name)
def test_a_load_can_be_cancelled_until_its_commit_begins(state: State, record: LoadRecord) -> None:
    go_to(record, state)
    if WAY.index(state) < WAY.index(COMMITTING):
        record.check_can_cancel()
    else:
        with pytest.raises(WrongState, match=name(state)):
            record.check_can_cancel()


def test_terminal_and_settled_states_are_those_of_the_description() -> None:
    terminal = {FAILED, CANCELLED, UNLOADED}
    assert {state for state in ALL_STATES if is_terminal(state)} == terminal
    assert {state for state in ALL_STATES if is_settled(state)} == {SUCCEEDED, DEGRADED, *terminal}


# ---------------------------------------------------------------- messages


def test_a_new_load_shows_what_was_asked_for(record: LoadRecord) -> None:
    message = record.message()
    assert message.create_time.ToMilliseconds() == 1_000_000_250
    message.ClearField("create_time")
    assert message.total_duration.ToNanoseconds() == 0
    message.ClearField("total_duration")
    assert message == types_pb2.Load(
        load_id="load-1",
        state=PENDING,
        path="some/path",
        tp=2,
        replicas=1,
        revision=1,
        owner="somebody",
    )


def test_a_planned_load_shows_bytes_of_all_ranks(record: LoadRecord, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, [sized("t", 100), sized("u", 10)], 2)
    record.set_group(["a", "b"])
    set_plan(record, plan)
    message = record.message()
    assert (message.path, message.architecture) == (str(tmp_path), "unknown")
    sizes = (message.source_bytes, message.wire_bytes, message.resident_bytes)
    assert sizes == (110, 220, 220)
    assert [(rank.rank, rank.worker_id, rank.tensor_count) for rank in message.ranks] == [
        (0, "a", 2),
        (1, "b", 2),
    ]
    assert [(rank.total_bytes, rank.resident_bytes) for rank in message.ranks] == [(110, 110)] * 2


@pytest.mark.parametrize("state", [SUCCEEDED, DEGRADED, UNLOADING, UNLOADED], ids=name)
def test_a_load_that_was_committed_is_complete_and_holds_its_bytes_until_it_is_unloaded(
    state: State, streaming: LoadRecord
) -> None:
    streaming.set_progress((1000, 1000), (True, True))
    assert streaming.message().resident_bytes == 2000
    for step in WAY[WAY.index(VERIFYING) : WAY.index(state) + 1]:
        streaming.move_to(step)
    message = streaming.message()
    held = 0 if state == UNLOADED else 1000
    assert (message.progress, message.resident_bytes) == (1.0, 2 * held)
    assert [rank.resident_bytes for rank in message.ranks] == [held, held]


@pytest.mark.parametrize("end", [FAILED, CANCELLED], ids=name)
def test_a_load_that_has_failed_holds_nothing(end: State, streaming: LoadRecord) -> None:
    streaming.set_progress((500, 250), (False, False))
    streaming.end(end, None)
    message = streaming.message()
    assert (message.progress, message.resident_bytes, message.wire_bytes) == (0.25, 0, 2000)
    assert [rank.resident_bytes for rank in message.ranks] == [0, 0]


def test_a_failure_is_shown_with_reason_and_facts(record: LoadRecord) -> None:
    record.end(FAILED, WorkerLost("w is gone", worker_id="w"))
    failure = record.message().failure
    assert (failure.reason, failure.message) == ("WORKER_LOST", "w is gone")
    assert failure.metadata["worker_id"] == "w"


def test_a_cancelled_load_has_no_failure(record: LoadRecord) -> None:
    record.end(CANCELLED, None)
    assert not record.message().HasField("failure")


def test_every_change_raises_the_revision(record: LoadRecord, tmp_path: Path) -> None:
    seen = [record.revision]
    record.set_group(["a", "b"])
    seen.append(record.revision)
    set_plan(record, write_plan(tmp_path, [sized("t", 100)], 2))
    seen.append(record.revision)
    record.set_lanes(["tcp", "tcp"])
    seen.append(record.revision)
    record.set_progress((1, 2), (False, False))
    seen.append(record.revision)
    record.end(FAILED, None)
    seen.append(record.revision)
    assert seen == sorted(set(seen))
    assert record.message().revision == seen[-1]


def test_loads_sort_newest_first(clock: FakeClock) -> None:
    records = [new_record(clock) for number in range(12)]
    assert sorted(records, key=LoadRecord.order_key) == records[::-1]


# ---------------------------------------------------------------- progress and rates


@pytest.fixture
def streaming(record: LoadRecord, tmp_path: Path) -> LoadRecord:
    """A load of two ranks with 1000 bytes each, that streams."""
    record.set_group(["a", "b"])
    go_to(record, PREPARING)
    set_plan(record, write_plan(tmp_path, [sized("t", 1000)], 2))
    record.move_to(STREAMING)
    record.set_lanes(["tcp/lo", "cma"])
    return record


def rates(record: LoadRecord) -> list[float]:
    return [rank.bytes_per_second for rank in record.message().ranks]


def test_progress_shows_bytes_lanes_and_verified_ranks(streaming: LoadRecord) -> None:
    streaming.set_progress((1000, 300), (True, False))
    first, second = streaming.message().ranks
    assert (first.done_bytes, first.verified, first.transport) == (1000, True, "tcp/lo")
    assert (second.done_bytes, second.verified, second.transport) == (300, False, "cma")
    assert second.bytes_by_source.coordinator_bytes == 300


def test_done_bytes_never_shrink(streaming: LoadRecord) -> None:
    streaming.set_progress((500, 300), (False, False))
    streaming.set_progress((400, 301), (False, False))
    assert [rank.done_bytes for rank in streaming.message().ranks] == [500, 301]


def test_all_landed_needs_every_rank(streaming: LoadRecord) -> None:
    assert not streaming.all_landed
    streaming.set_progress((1000, 999), (False, False))
    assert not streaming.all_landed
    streaming.set_progress((1000, 1000), (False, False))
    assert streaming.all_landed


def test_rates_are_averages_over_the_last_seconds(streaming: LoadRecord, clock: FakeClock) -> None:
    streaming.set_progress((0, 0), (False, False))
    assert rates(streaming) == [0.0, 0.0]
    clock.now = RATE_SECONDS / 2
    streaming.set_progress((100, 50), (False, False))
    assert rates(streaming) == [100 / clock.now, 50 / clock.now]
    clock.now = RATE_SECONDS * 3
    streaming.set_progress((800, 50), (False, False))  # what came before is too old to count
    assert rates(streaming) == [0.0, 0.0]
    clock.now += 0.5
    streaming.set_progress((900, 50), (False, False))
    assert rates(streaming) == [200.0, 0.0]


def test_two_reports_at_one_instant_have_no_rate(streaming: LoadRecord) -> None:
    streaming.set_progress((1, 1), (False, False))
    streaming.set_progress((9, 9), (False, False))
    assert rates(streaming) == [0.0, 0.0]


def test_a_settled_load_has_no_rate_any_more(streaming: LoadRecord, clock: FakeClock) -> None:
    streaming.set_progress((0, 0), (False, False))
    clock.now = 1.0
    streaming.set_progress((100, 100), (False, False))
    assert rates(streaming) == [100.0, 100.0]
    streaming.end(FAILED, None)
    assert rates(streaming) == [0.0, 0.0]


# ---------------------------------------------------------------- durations


def seconds(record: LoadRecord) -> tuple[float, float]:
    """(transfer, total) seconds."""
    message = record.message()
    return (
        message.transfer_duration.ToNanoseconds() / 1e9,
        message.total_duration.ToNanoseconds() / 1e9,
    )


def test_durations_run_until_transfer_and_load_end(record: LoadRecord, clock: FakeClock) -> None:
    record.set_group(["a", "b"])
    clock.now = 2.0
    go_to(record, STREAMING)
    assert seconds(record) == (0.0, 2.0)
    record.set_lanes(["x", "y"])
    clock.now = 5.0
    assert seconds(record) == (3.0, 5.0)
    record.move_to(VERIFYING)
    record.move_to(COMMITTING)
    clock.now = 6.0
    assert seconds(record) == (3.0, 6.0)
    record.move_to(SUCCEEDED)
    clock.now = 100.0
    assert seconds(record) == (3.0, 6.0)
    record.move_to(UNLOADING)
    record.move_to(UNLOADED)
    assert seconds(record) == (3.0, 6.0)


def test_a_failure_ends_both_durations(record: LoadRecord, clock: FakeClock) -> None:
    record.set_group(["a", "b"])
    go_to(record, STREAMING)
    clock.now = 1.0
    record.set_lanes(["x", "y"])
    clock.now = 4.0
    record.end(FAILED, None)
    clock.now = 9.0
    assert seconds(record) == (3.0, 4.0)


def test_a_load_that_failed_in_the_instant_it_began_took_no_time(
    record: LoadRecord, clock: FakeClock
) -> None:
    record.end(FAILED, None)
    clock.now = 9.0
    assert seconds(record) == (0.0, 0.0)


# ---------------------------------------------------------------- waiting


async def is_waiting(task: asyncio.Task[None]) -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return not task.done()


def waiter(call: Awaitable[None]) -> asyncio.Task[None]:
    async def wait() -> None:
        await call

    return asyncio.create_task(wait())


async def test_every_watcher_wakes_at_the_next_change(record: LoadRecord) -> None:
    waiting = [waiter(record.wait_for_change(record.revision)) for _ in range(3)]
    assert all([await is_waiting(task) for task in waiting])
    record.set_group(["a", "b"])
    async with asyncio.timeout(5):
        await asyncio.gather(*waiting)


async def test_a_watcher_that_is_behind_does_not_wait(record: LoadRecord) -> None:
    record.set_group(["a", "b"])
    async with asyncio.timeout(5):
        await record.wait_for_change(record.revision - 1)


async def test_a_watcher_that_is_ahead_waits_for_its_revision(record: LoadRecord) -> None:
    task = waiter(record.wait_for_change(record.revision + 1))
    record.set_group(["a", "b"])
    assert await is_waiting(task)
    record.set_group(["c", "d"])
    async with asyncio.timeout(5):
        await task


@pytest.mark.parametrize("end", [SUCCEEDED, FAILED, CANCELLED], ids=name)
async def test_who_waits_for_the_answer_wakes_when_it_is_there(
    end: State, record: LoadRecord
) -> None:
    task = waiter(record.wait_until_settled())
    for state in WAY[1:6]:
        record.move_to(state)
        assert await is_waiting(task)
    if end == SUCCEEDED:
        record.move_to(end)
    else:
        record.end(end, None)
    async with asyncio.timeout(5):
        await task
        await record.wait_until_settled()
