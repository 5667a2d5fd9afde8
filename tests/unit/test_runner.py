"""LoadRunner with workers and a streamer that a test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

import pytest

from loader_service.background import BackgroundThreads
from loader_service.checkpoint.catalog import Checkpoint
from loader_service.checkpoint.files import read_checkpoint
from loader_service.clock import SystemClock
from loader_service.coordinator import runner as runner_module
from loader_service.coordinator.record import LoadRecord
from loader_service.coordinator.registry import WorkerRecord
from loader_service.coordinator.runner import LoadRequest, LoadRunner
from loader_service.errors import (
    CheckpointNotFound,
    DigestMismatch,
    LoadCancelled,
    LoaderError,
    OutOfMemory,
    StreamerLost,
    WorkerBusy,
    WorkerLost,
    WorkersUnavailable,
)
from loader_service.plan.planner import PlanOptions, UnknownTensorPolicy
from loader_service.stream.jobs import Event, StartStream, StreamConnected, StreamProgress
from loader_service.v1 import coordinator_pb2, types_pb2, worker_pb2
from loader_worker.manifest import parse_manifest
from tests.checkpoints import random_tensor, write_file

SECONDS = 5.0
LEASE = 0.3
SIZE = 100_000

Play = Callable[[StartStream, Callable[[Event], None]], Awaitable[None]]


class FakeWorker:
    """A worker's client. Every answer can be an error, or be held back.

    Attributes:
        calls: what was asked, in order.
        refusal: raised by `prepare`.
        commit_errors: raised by `commit`, one after another; then it succeeds.
        abort_error: raised by `abort`.
        hold_prepare: `prepare` waits for it.
        hold_abort: `abort` waits for it.
        holds: the worker has something of the load.
    """

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.calls: list[str] = []
        self.refusal: LoaderError | None = None
        self.commit_errors: list[LoaderError] = []
        self.abort_error: LoaderError | None = None
        self.hold_prepare = asyncio.Event()
        self.hold_prepare.set()
        self.hold_abort = asyncio.Event()
        self.hold_abort.set()
        self.holds = False

    async def incarnation(self) -> str:
        return "life"

    async def prepare(
        self, pages: Iterable[worker_pb2.PrepareLoadRequest]
    ) -> worker_pb2.PrepareLoadResponse:
        self.calls.append("prepare")
        header, *bodies = pages
        manifest = parse_manifest(header.header, [page.body for page in bodies])
        await self.hold_prepare.wait()
        if self.refusal is not None:
            raise self.refusal
        self.holds = True
        return worker_pb2.PrepareLoadResponse(
            data_host="host", data_port=1000 + manifest.rank, token=self.worker_id.encode()
        )

    async def commit(self, load_id: str) -> None:
        self.calls.append("commit")
        assert load_id == "load-1"
        if self.commit_errors:
            raise self.commit_errors.pop(0)

    async def abort(self, load_id: str) -> None:
        self.calls.append("abort")
        assert load_id == "load-1"
        await self.hold_abort.wait()
        if self.abort_error is not None:
            raise self.abort_error
        self.holds = False

    async def close(self) -> None:
        self.calls.append("close")


class Stage:
    """A runner with two workers.

    Attributes:
        record: of the load.
        workers: the workers, in rank order.
        stream: plays the streamer.
        jobs: what the streamer was asked for.
        states: the states that the load went through.
    """

    def __init__(self, folder: Path) -> None:
        write_file(folder / "model.safetensors", [random_tensor("t", "U8", (SIZE,))])
        self.folder = folder
        self.record = LoadRecord("load-1", str(folder), 2, SystemClock(), "somebody", 2.0)
        self.workers = [FakeWorker("a"), FakeWorker("b")]
        self.stream: Play = stream_well
        self.read: Callable[[], Checkpoint] = lambda: read_checkpoint(str(folder), str(folder))
        self.choose: Callable[[], Awaitable[Sequence[WorkerRecord]]] = self.group
        self.jobs: list[StartStream] = []
        self.states: list[str] = []
        request = LoadRequest(
            read=self.read_now,
            tp=2,
            options=PlanOptions(unknown_tensors=UnknownTensorPolicy.REPLICATE),
            window_bytes=1 << 20,
            lease_seconds=LEASE,
        )
        self.runner = LoadRunner(
            self.record,
            request,
            self.choose_now,
            self.connect,
            self.run_stream,
            BackgroundThreads(1, "plan"),
        )

    def read_now(self) -> Checkpoint:
        return self.read()

    async def choose_now(self) -> Sequence[WorkerRecord]:
        return await self.choose()

    async def group(self) -> Sequence[WorkerRecord]:
        return [
            WorkerRecord(
                coordinator_pb2.RegisterWorkerRequest(
                    worker_id=worker.worker_id, address=f"{worker.worker_id}:1"
                ),
                0.0,
                0.0,
                types_pb2.MemoryUsage(),
            )
            for worker in self.workers
        ]

    def connect(self, worker_id: str, address: str) -> FakeWorker:
        (worker,) = (worker for worker in self.workers if worker.worker_id == worker_id)
        assert address == f"{worker_id}:1"
        return worker

    async def run_stream(self, job: StartStream, on_event: Callable[[Event], None]) -> None:
        self.jobs.append(job)
        await self.stream(job, on_event)

    async def run(self) -> None:
        """Run to the end, noting the states."""

        async def note() -> None:
            while True:
                if (state := self.state) not in self.states:
                    self.states.append(state)
                await self.record.wait_for_change(self.record.revision)

        noting = asyncio.create_task(note())
        async with asyncio.timeout(SECONDS):
            await self.runner.run()
            await asyncio.sleep(0)
        noting.cancel()

    async def until(self, state: str) -> None:
        """Wait for a state."""
        async with asyncio.timeout(SECONDS):
            while self.state != state:
                await self.record.wait_for_change(self.record.revision)

    @property
    def state(self) -> str:
        return types_pb2.LoadState.Name(self.record.state).removeprefix("LOAD_STATE_")

    @property
    def reason(self) -> str:
        return self.record.failure.reason if self.record.failure else ""

    def check_released(self) -> None:
        """Every worker that was asked anything was told to give up, last of all."""
        for worker in self.workers:
            assert not worker.holds
            assert worker.calls[-2:] == ["abort", "close"]


@pytest.fixture
async def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


async def stream_well(job: StartStream, on_event: Callable[[Event], None]) -> None:
    """A streamer that does its work."""
    on_event(StreamConnected(job.load_id, ("tcp", "cma")))
    on_event(StreamProgress(job.load_id, (SIZE // 2, SIZE), (False, False)))
    await asyncio.sleep(0)
    on_event(StreamProgress(job.load_id, (SIZE, SIZE), (False, False)))
    await asyncio.sleep(0)
    on_event(StreamProgress(job.load_id, (SIZE, SIZE), (True, True)))


def stream_failing(error: Exception) -> Play:
    async def stream(job: StartStream, on_event: Callable[[Event], None]) -> None:
        on_event(StreamConnected(job.load_id, ("tcp", "tcp")))
        raise error

    return stream


def stream_waiting(begun: asyncio.Event) -> Play:
    async def stream(job: StartStream, on_event: Callable[[Event], None]) -> None:
        begun.set()
        await asyncio.Event().wait()

    return stream


# ---------------------------------------------------------------- success


async def test_a_load_goes_through_all_states_and_commits_every_rank(stage: Stage) -> None:
    await stage.run()
    assert stage.states == [
        "PENDING", "PLANNING", "PREPARING", "STREAMING", "VERIFYING", "COMMITTING", "SUCCEEDED",
    ]  # fmt: skip
    assert [worker.calls for worker in stage.workers] == [["prepare", "commit"]] * 2
    ranks = stage.record.message().ranks
    assert [(rank.worker_id, rank.transport, rank.verified) for rank in ranks] == [
        ("a", "tcp", True),
        ("b", "cma", True),
    ]


async def test_the_streamer_is_told_where_every_rank_listens(stage: Stage) -> None:
    await stage.run()
    (job,) = stage.jobs
    assert [(end.worker_id, end.host, end.port, end.token) for end in job.endpoints] == [
        ("a", "host", 1000, b"a"),
        ("b", "host", 1001, b"b"),
    ]
    assert (job.load_id, job.plan.tp) == ("load-1", 2)


async def test_a_streamer_that_reports_nothing_but_its_end_is_enough(stage: Stage) -> None:
    async def silent(job: StartStream, on_event: Callable[[Event], None]) -> None:
        on_event(StreamConnected(job.load_id, ("tcp", "tcp")))

    stage.stream = silent
    await stage.run()
    assert stage.state == "SUCCEEDED"
    assert [worker.calls for worker in stage.workers] == [["prepare", "commit"]] * 2


# ---------------------------------------------------------------- failures before the commit


async def test_a_checkpoint_that_cannot_be_read_touches_no_worker(stage: Stage) -> None:
    def read() -> Checkpoint:
        raise CheckpointNotFound("nothing there")

    stage.read = read
    await stage.run()
    assert (stage.state, stage.reason) == ("FAILED", "CHECKPOINT_NOT_FOUND")
    assert [worker.calls for worker in stage.workers] == [[], []]


async def test_a_group_that_cannot_be_had_fails_the_load(stage: Stage) -> None:
    async def choose() -> Sequence[WorkerRecord]:
        raise WorkersUnavailable("too few")

    stage.choose = choose
    await stage.run()
    assert (stage.state, stage.reason) == ("FAILED", "NOT_ENOUGH_WORKERS")


@pytest.mark.parametrize("refuser", [0, 1])
@pytest.mark.parametrize("error", [OutOfMemory("no room"), WorkerBusy("busy"), WorkerLost("gone")])
async def test_one_workers_refusal_makes_all_give_up(
    refuser: int, error: LoaderError, stage: Stage
) -> None:
    stage.workers[refuser].refusal = error
    await stage.run()
    assert (stage.state, stage.record.failure) == ("FAILED", error)
    assert stage.jobs == []
    stage.check_released()


async def test_nobody_is_released_while_another_still_prepares(stage: Stage) -> None:
    stage.workers[0].refusal = OutOfMemory("no room")
    stage.workers[1].hold_prepare.clear()
    running = asyncio.create_task(stage.run())
    await stage.until("PREPARING")
    await asyncio.sleep(0.02)
    assert [worker.calls for worker in stage.workers] == [["prepare"], ["prepare"]]
    stage.workers[1].hold_prepare.set()
    await running
    assert stage.reason == "OUT_OF_MEMORY"
    stage.check_released()


@pytest.mark.parametrize(
    "error", [DigestMismatch("differs", tensor="t"), StreamerLost("died"), WorkerLost("gone")]
)
async def test_what_ends_the_stream_ends_the_load_with_nothing_committed(
    error: LoaderError, stage: Stage
) -> None:
    stage.stream = stream_failing(error)
    await stage.run()
    assert (stage.state, stage.record.failure) == ("FAILED", error)
    assert not any("commit" in worker.calls for worker in stage.workers)
    stage.check_released()


async def test_a_fault_of_our_own_is_an_internal_error_that_says_what_it_was(
    stage: Stage,
) -> None:
    stage.stream = stream_failing(ZeroDivisionError("oops"))
    await stage.run()
    assert (stage.state, stage.reason) == ("FAILED", "INTERNAL")
    assert stage.record.failure is not None
    assert "ZeroDivisionError: oops" in stage.record.failure.message
    stage.check_released()


async def test_a_worker_that_does_not_give_up_in_time_is_not_waited_for(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "CLEANUP_SECONDS", 0.05)
    stage.stream = stream_failing(StreamerLost("died"))
    stage.workers[0].hold_abort.clear()
    await stage.run()
    assert (stage.state, stage.reason) == ("FAILED", "STREAMER_LOST")
    assert [worker.calls[-1] for worker in stage.workers] == ["close", "close"]


async def test_a_worker_that_cannot_give_up_does_not_hide_the_cause(stage: Stage) -> None:
    stage.stream = stream_failing(DigestMismatch("differs"))
    stage.workers[0].abort_error = WorkerLost("gone")
    await stage.run()
    assert stage.reason == "DIGEST_MISMATCH"
    assert stage.workers[1].calls[-2:] == ["abort", "close"]


# ---------------------------------------------------------------- commit


async def test_a_commit_that_does_not_get_through_is_repeated(stage: Stage) -> None:
    stage.workers[1].commit_errors = [WorkerLost("no answer")]
    await stage.run()
    assert stage.state == "SUCCEEDED"
    assert stage.workers[0].calls.count("commit") == 1
    assert stage.workers[1].calls.count("commit") == 2


async def test_a_commit_that_never_gets_through_fails_the_load_and_releases_all(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "RETRY_SECONDS", 0.05)
    stage.workers[1].commit_errors = [WorkerLost("no answer")] * 1000
    await stage.run()
    assert (stage.state, stage.reason) == ("FAILED", "WORKER_LOST")
    assert stage.workers[0].calls.count("commit") == 1
    assert stage.workers[1].calls.count("commit") > 2
    stage.check_released()


async def test_a_refused_commit_is_not_repeated(stage: Stage) -> None:
    stage.workers[0].commit_errors = [DigestMismatch("odd")]
    await stage.run()
    assert (stage.state, stage.reason) == ("FAILED", "DIGEST_MISMATCH")
    assert stage.workers[0].calls.count("commit") == 1
    stage.check_released()


# ---------------------------------------------------------------- ended from outside


async def test_a_cancel_in_the_middle_releases_all_without_a_failure(stage: Stage) -> None:
    begun = asyncio.Event()
    stage.stream = stream_waiting(begun)
    running = asyncio.create_task(stage.run())
    await begun.wait()
    stage.runner.fail(LoadCancelled("enough"))
    await running
    assert (stage.state, stage.record.failure) == ("CANCELLED", None)
    stage.check_released()


async def test_a_cancel_while_workers_prepare_releases_all(stage: Stage) -> None:
    stage.workers[1].hold_prepare.clear()
    running = asyncio.create_task(stage.run())
    await stage.until("PREPARING")
    await asyncio.sleep(0.02)
    stage.runner.fail(LoadCancelled("enough"))
    await running
    assert stage.state == "CANCELLED"
    stage.check_released()


async def test_a_cancel_while_waiting_for_workers_ends_the_load(stage: Stage) -> None:
    async def choose() -> Sequence[WorkerRecord]:
        await asyncio.Event().wait()
        return []

    stage.choose = choose
    running = asyncio.create_task(stage.run())
    await asyncio.sleep(0.01)
    stage.runner.fail(LoadCancelled("enough"))
    await running
    assert stage.state == "CANCELLED"


async def test_a_cause_that_comes_before_the_load_began_to_run_is_kept(stage: Stage) -> None:
    stage.runner.fail(LoadCancelled("at once"))
    await stage.run()
    assert stage.state == "CANCELLED"
    assert stage.jobs == []
    assert [worker.calls for worker in stage.workers] == [[], []]


async def test_the_first_cause_is_kept(stage: Stage) -> None:
    begun = asyncio.Event()
    stage.stream = stream_waiting(begun)
    first = WorkerLost("the lease ran out", worker_id="a")
    running = asyncio.create_task(stage.run())
    await begun.wait()
    stage.runner.fail(first)
    stage.runner.fail(LoadCancelled("too late"))
    await running
    assert (stage.state, stage.record.failure) == ("FAILED", first)


async def test_a_cause_is_kept_although_the_stream_breaks_because_of_it(stage: Stage) -> None:
    begun = asyncio.Event()

    async def stream(job: StartStream, on_event: Callable[[Event], None]) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise StreamerLost("follows from it") from None

    stage.stream = stream
    first = DigestMismatch("differs")
    running = asyncio.create_task(stage.run())
    await begun.wait()
    stage.runner.fail(first)
    await running
    assert stage.record.failure is first


async def test_failing_a_load_that_has_ended_changes_nothing(stage: Stage) -> None:
    await stage.run()
    stage.runner.fail(WorkerLost("later"))
    await asyncio.sleep(0.01)
    assert (stage.state, stage.record.failure) == ("SUCCEEDED", None)


async def test_releasing_a_committed_load_tells_every_worker_once(stage: Stage) -> None:
    await stage.run()
    await stage.runner.release()
    await stage.runner.release()
    stage.check_released()
    assert [worker.calls.count("abort") for worker in stage.workers] == [1, 1]
