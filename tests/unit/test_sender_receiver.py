"""A streamer's sender against a worker's session over the in-memory transport, in one process."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from loader_kernels.digest import BLOCK_BYTES
from loader_kernels.testing import CountingDevice, FlippingDevice
from loader_service.errors import (
    DataLoss,
    DigestMismatch,
    OutOfMemory,
    StreamerLost,
    TiedHeadDiffers,
    WorkerLost,
    WrongState,
)
from loader_service.plan.cuts import Even, Heads, Vocab
from loader_service.plan.slices import LoadPlan
from loader_service.stream import wire
from loader_service.stream.chunks import CREDITS, plan_steps, rank_chunks, staging_bytes
from loader_service.stream.feed import HostFeed
from loader_service.stream.jobs import RankEndpoint, StartStream
from loader_service.stream.manifests import manifest_pages
from loader_service.stream.sender import LoadSender
from loader_service.stream.transport import Connection, PeerLostError
from loader_service.stream.window import HostWindow
from loader_service.testing.memory_transport import MemoryNetwork, MemoryTransport
from loader_service.v1.types_pb2 import WorkerLoadState
from loader_worker.manifest import parse_manifest
from loader_worker.session import LoadSession
from loader_worker.store import WeightStore
from tests.checkpoints import RawTensor, random_tensor
from tests.plans import FILE, Part, sized, write_plan

CHUNK = 2 * BLOCK_BYTES
SECONDS = 10.0

PREPARED = WorkerLoadState.WORKER_LOAD_STATE_PREPARED
RECEIVING = WorkerLoadState.WORKER_LOAD_STATE_RECEIVING
VERIFIED = WorkerLoadState.WORKER_LOAD_STATE_VERIFIED
COMMITTED = WorkerLoadState.WORKER_LOAD_STATE_COMMITTED
FAILED = WorkerLoadState.WORKER_LOAD_STATE_FAILED


class SpyConnection:
    """Passes everything on; counts what is sent, and stops chunks where a test says so."""

    def __init__(self, inner: Connection, spy: SpyTransport) -> None:
        self._inner = inner
        self._spy = spy
        self._open_chunks = 0

    @property
    def lanes(self) -> str:
        return self._inner.lanes

    async def send(self, tag: int, buffer: Any) -> None:
        self._spy.sent[tag] += 1
        if is_chunk(tag):
            self._open_chunks += 1
            self._spy.most_open_chunks = max(self._spy.most_open_chunks, self._open_chunks)
            self._spy.chunk_sizes.append(len(buffer))
            if tag == wire.chunk_tag(self._spy.stop_at):
                self._spy.stopped.set()
                await self._spy.go_on.wait()
        await self._inner.send(tag, buffer)

    async def recv(self, tag: int, buffer: Any) -> None:
        await self._inner.recv(tag, buffer)
        if tag == wire.TAG_CREDIT:
            await self._spy.credits_arrive.wait()
            self._open_chunks -= 1

    def abort(self) -> None:
        self._inner.abort()


class SpyTransport(MemoryTransport):
    """A streamer's transport whose connections are watched.

    Attributes:
        sent: messages by tag, over all connections.
        chunk_sizes: bytes of every chunk.
        most_open_chunks: most chunks that one connection had sent without a credit for them.
        stop_at: number of a chunk that is held back until `go_on` is set.
        stopped: set when that chunk is about to be sent.
        credits_arrive: credits are held back while it is cleared.
    """

    def __init__(self, network: MemoryNetwork) -> None:
        super().__init__(network)
        self.sent: Counter[int] = Counter()
        self.chunk_sizes: list[int] = []
        self.most_open_chunks = 0
        self.stop_at = -1
        self.stopped = asyncio.Event()
        self.go_on = asyncio.Event()
        self.credits_arrive = asyncio.Event()
        self.credits_arrive.set()

    async def connect(self, host: str, port: int, timeout_seconds: float) -> Connection:
        return SpyConnection(await super().connect(host, port, timeout_seconds), self)


def is_chunk(tag: int) -> bool:
    return wire.chunk_tag(0) <= tag < wire.end_tag(0)


class WatchedWindow(HostWindow):
    """Knows its largest size and what was not given back.

    Attributes:
        peak: most bytes held.
        out: buffers that are in use.
    """

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self.peak = 0
        self.out = 0

    async def acquire(self, size: int, count: int) -> list[memoryview]:
        buffers = await super().acquire(size, count)
        self.peak = max(self.peak, self.held_bytes)
        self.out += len(buffers)
        return buffers

    def release(self, buffers: list[memoryview]) -> None:
        super().release(buffers)
        self.out -= len(buffers)


@dataclasses.dataclass
class Rank:
    """One worker: its device, its session, and how to reach it."""

    device: CountingDevice
    session: LoadSession
    endpoint: RankEndpoint

    def local_bytes(self) -> dict[str, bytes]:
        """Commit, and return what the store holds by name."""
        store = WeightStore(self.device)
        self.session.commit(store)
        return {
            name: bytes(self.device.read(store.get(name).buffer, 0, store.get(name).nbytes))
            for name in store.names()
        }


class Cluster:
    """A streamer and a worker for each rank of a plan.

    Attributes:
        transport: the streamer's.
        window: the streamer's.
        ranks: the workers.
        sender: made by `start`.
    """

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.threads = threads
        self.network = MemoryNetwork()
        self.transport = SpyTransport(self.network)
        self.window = WatchedWindow(64 * CHUNK)
        self.ranks: list[Rank] = []
        self.sender: LoadSender
        self.lanes: tuple[str, ...] = ()

    async def prepare(self, plan: LoadPlan, devices: Sequence[CountingDevice] = ()) -> None:
        """Make the workers ready for a plan."""
        steps = plan_steps(plan, CHUNK)
        for rank in range(plan.tp):
            header, *pages = manifest_pages("load-1", plan, rank, rank_chunks(steps, rank))
            manifest = parse_manifest(header.header, [page.body for page in pages])
            device = devices[rank] if devices else CountingDevice()
            session = LoadSession(
                manifest, device, MemoryTransport(self.network), self.threads, self.threads
            )
            port, token = await session.prepare()
            endpoint = RankEndpoint(f"w{rank}", "127.0.0.1", port, token)
            self.ranks.append(Rank(device, session, endpoint))
        endpoints = tuple(rank.endpoint for rank in self.ranks)
        job = StartStream("load-1", plan, CHUNK, endpoints)
        self.sender = LoadSender(
            job, self.transport, HostFeed(self.window, self.threads), self.threads
        )

    async def run(self) -> None:
        """Run the sender to its end."""

        async def connected(lanes: tuple[str, ...]) -> None:
            self.lanes = lanes

        async with asyncio.timeout(SECONDS):
            await self.sender.run(connected)

    async def until(self, rank: int, state: WorkerLoadState.ValueType) -> None:
        """Wait for a worker's state."""
        async with asyncio.timeout(SECONDS):
            while self.ranks[rank].session.state != state:  # noqa: ASYNC110 (it has no event)
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        """End every session."""
        for rank in self.ranks:
            await rank.session.abort()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.fixture
async def cluster(threads: ThreadPoolExecutor) -> AsyncIterator[Cluster]:
    cluster = Cluster(threads)
    yield cluster
    await cluster.close()
    # Whatever a test did, a sender that has ended gave its buffers back.
    assert cluster.window.out == 0


def model(tp: int) -> list[Part]:
    """Every kind of cut, slices of many chunks, bundles, padding, aliases and empty tensors."""
    return [
        Part(random_tensor("embed", "BF16", (13, 5000)), Vocab(), aliases=("head",)),
        Part(random_tensor("q", "F32", (6, 7000)), Even("column", 0)),
        Part(random_tensor("o", "F32", (90, 600)), Even("row", 1)),
        Part(random_tensor("kv", "F32", (8, 999)), Heads("kv", 0, 1, 8, replicable=True)),
        Part(random_tensor("norm", "BF16", (77,))),
        Part(random_tensor("empty", "F32", (0, 4))),
        Part(random_tensor("scalar", "F16", ())),
        sized("large", 5 * CHUNK + 3),
    ]


def one_large(chunks: int) -> list[Part]:
    """A single tensor of so many chunks."""
    return [sized("t", chunks * CHUNK)]


# ---------------------------------------------------------------- success


@pytest.mark.parametrize("tp", [1, 2, 3])
async def test_every_rank_ends_up_with_the_bytes_that_numpy_cuts(
    tp: int, tmp_path: Path, cluster: Cluster
) -> None:
    parts = model(tp)
    plan = write_plan(tmp_path, parts, tp)
    await cluster.prepare(plan)
    assert cluster.sender.done_bytes == (0,) * tp
    assert cluster.sender.verified == (False,) * tp
    await cluster.run()
    assert cluster.lanes == ("memory",) * tp
    assert cluster.sender.done_bytes == tuple(plan.totals(rank).wire_bytes for rank in range(tp))
    assert cluster.sender.verified == (True,) * tp
    for number, rank in enumerate(cluster.ranks):
        assert rank.session.state == VERIFIED
        assert rank.session.done_bytes == plan.totals(number).wire_bytes
        assert rank.local_bytes() == {
            part.tensor.name: part.local_bytes(number, tp) for part in parts
        }
        # Landing room is given back; only the slices stay.
        assert rank.device.memory().allocated_bytes == plan.totals(number).resident_bytes


async def test_a_committed_store_knows_rank_aliases_and_padding(
    tmp_path: Path, cluster: Cluster
) -> None:
    await cluster.prepare(write_plan(tmp_path, model(3), 3))
    await cluster.run()
    rank = cluster.ranks[2]
    store = WeightStore(rank.device)
    rank.session.commit(store)
    rank.session.commit(store)  # repeating it is harmless
    assert rank.session.state == COMMITTED
    assert store.prepartitioned_tp == (2, 3)
    assert store.get("head") is store.get("embed")
    assert (store.get("embed").shape, store.get("embed").padding_rows) == ((5, 5000), 2)
    await rank.session.abort()  # a committed load belongs to the store
    assert rank.device.memory().allocated_bytes == store.resident_bytes() > 0


async def test_tensors_without_bytes_cause_no_payload_message_a12(
    tmp_path: Path, cluster: Cluster
) -> None:
    parts = [sized("e", 0), Part(random_tensor("z", "F32", (2, 0)))]
    await cluster.prepare(write_plan(tmp_path, parts, 2))
    await cluster.run()
    assert not any(is_chunk(tag) for tag in cluster.transport.sent)
    for rank in cluster.ranks:
        assert rank.local_bytes() == {"e": b"", "z": b""}


async def test_tensors_without_bytes_add_nothing_to_their_neighbours_message_a12(
    tmp_path: Path, cluster: Cluster
) -> None:
    parts = [sized("e", 0), Part(random_tensor("z", "F32", (2, 0))), sized("w", 16)]
    await cluster.prepare(write_plan(tmp_path, parts, 1))
    await cluster.run()
    assert cluster.transport.chunk_sizes == [16]
    assert cluster.ranks[0].local_bytes()["w"] == parts[2].tensor.data


async def test_a_rank_of_padding_alone_gets_zeros_and_no_payload(
    tmp_path: Path, cluster: Cluster
) -> None:
    part = Part(random_tensor("v", "U8", (2, 9000)), Vocab())
    await cluster.prepare(write_plan(tmp_path, [part], 3))
    await cluster.run()
    assert len(cluster.transport.chunk_sizes) == 2
    assert cluster.ranks[2].local_bytes() == {"v": bytes(9000)}


async def test_chunks_on_the_way_never_exceed_the_credits(tmp_path: Path, cluster: Cluster) -> None:
    await cluster.prepare(write_plan(tmp_path, one_large(40), 2))
    cluster.transport.credits_arrive.clear()
    running = asyncio.create_task(cluster.run())
    async with asyncio.timeout(SECONDS):
        while cluster.transport.most_open_chunks < CREDITS:  # noqa: ASYNC110 - counted elsewhere
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    cluster.transport.credits_arrive.set()
    await running
    assert cluster.transport.most_open_chunks == CREDITS
    assert len(cluster.transport.chunk_sizes) == 80


@pytest.mark.parametrize("slots", [2, 3, 8])
async def test_the_window_is_never_exceeded_and_all_buffers_come_back(
    slots: int, tmp_path: Path, cluster: Cluster
) -> None:
    cluster.window = WatchedWindow(slots * 2 * CHUNK)
    await cluster.prepare(
        write_plan(tmp_path, [Part(random_tensor("t", "U8", (2, 20 * CHUNK)), Even("c", 0))], 2)
    )
    await cluster.run()
    assert 2 * CHUNK <= cluster.window.peak <= slots * 2 * CHUNK
    assert cluster.window.out == 0


async def test_two_loads_share_one_small_window_without_deadlock(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    clusters = [Cluster(threads), Cluster(threads)]
    window = WatchedWindow(2 * CHUNK)
    for number, cluster in enumerate(clusters):
        (tmp_path / str(number)).mkdir()
        cluster.window = window
        await cluster.prepare(write_plan(tmp_path / str(number), one_large(15), 1))
    await asyncio.gather(*(cluster.run() for cluster in clusters))
    assert window.peak <= 2 * CHUNK
    for cluster in clusters:
        assert cluster.sender.verified == (True,)
        await cluster.close()


async def test_ranks_that_keep_the_same_bytes_share_a_buffer(
    tmp_path: Path, cluster: Cluster
) -> None:
    cluster.window = WatchedWindow(CHUNK)  # room for one chunk, however many ranks get it
    await cluster.prepare(write_plan(tmp_path, one_large(6), 3))
    await cluster.run()
    assert cluster.window.peak == CHUNK
    assert len(cluster.transport.chunk_sizes) == 18


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(("victim", "flip_byte"), [(0, 0), (2, 5), (7, 5 * CHUNK + 2), (7, CHUNK)])
async def test_memory_that_lost_a_bit_fails_the_load_by_the_tensors_name(
    victim: int, flip_byte: int, tmp_path: Path, cluster: Cluster
) -> None:
    plan = write_plan(tmp_path, model(2), 2)
    devices = [CountingDevice(), FlippingDevice(victim, flip_byte)]
    await cluster.prepare(plan, devices)
    with pytest.raises(DigestMismatch) as caught:
        await cluster.run()
    name = plan.tensors[victim].source.name
    assert caught.value.metadata["tensor"] == name
    assert caught.value.metadata["rank"] == "1"
    assert len(caught.value.metadata["expected"]) == len(caught.value.metadata["landed"]) == 32
    assert caught.value.metadata["expected"] != caught.value.metadata["landed"]
    await cluster.until(1, FAILED)
    failure = cluster.ranks[1].session.failure
    assert isinstance(failure, DigestMismatch)
    assert failure.metadata["tensor"] == name
    assert (devices[1].live, devices[1].memory().allocated_bytes) == ([], 0)
    # The other rank was cut off, or had verified everything already; the coordinator ends it then.
    other = cluster.ranks[0].session
    await other.abort()
    assert other.failure is None or isinstance(other.failure, StreamerLost)
    assert devices[0].live == []


async def test_a_mismatch_is_the_cause_although_the_hang_up_wakes_other_receives_first(
    tmp_path: Path, cluster: Cluster
) -> None:
    # Chunks of `b` are being waited for while the worker refuses `a`.
    cluster.transport.stop_at = 3
    device = FlippingDevice(0)
    await cluster.prepare(
        write_plan(tmp_path, [sized("a", CHUNK + 1), sized("b", 9 * CHUNK)], 1), [device]
    )
    with pytest.raises(DigestMismatch, match="'a'"):
        await cluster.run()
    await cluster.until(0, FAILED)
    assert isinstance(cluster.ranks[0].session.failure, DigestMismatch)
    assert device.live == []


async def test_padding_that_is_not_zero_any_more_fails_the_load(
    tmp_path: Path, cluster: Cluster
) -> None:
    part = Part(random_tensor("v", "U8", (2, 9000)), Vocab())
    device = FlippingDevice(0, 8999)
    await cluster.prepare(
        write_plan(tmp_path, [part], 3), [CountingDevice(), CountingDevice(), device]
    )
    with pytest.raises(DigestMismatch, match="'v' on rank 2"):
        await cluster.run()
    await cluster.until(2, FAILED)
    assert device.live == []


async def test_a_failed_load_cannot_be_committed(tmp_path: Path, cluster: Cluster) -> None:
    device = FlippingDevice(0)
    await cluster.prepare(write_plan(tmp_path, one_large(1), 1), [device])
    with pytest.raises(DigestMismatch):
        await cluster.run()
    await cluster.until(0, FAILED)
    store = WeightStore(device)
    with pytest.raises(WrongState, match="FAILED"):
        cluster.ranks[0].session.commit(store)
    assert (store.is_empty, store.prepartitioned_tp) == (True, None)


@pytest.mark.parametrize("ready", [False, True])
async def test_a_load_cannot_be_committed_before_it_is_verified(
    ready: bool, tmp_path: Path, cluster: Cluster
) -> None:
    cluster.transport.stop_at = 2
    await cluster.prepare(write_plan(tmp_path, one_large(4), 1))
    store = WeightStore(cluster.ranks[0].device)
    running = asyncio.create_task(cluster.run())
    if ready:
        await cluster.transport.stopped.wait()
    with pytest.raises(WrongState, match="RECEIVING" if ready else "PREPARED"):
        cluster.ranks[0].session.commit(store)
    assert store.is_empty
    cluster.transport.go_on.set()
    await running
    cluster.ranks[0].session.commit(store)
    assert store.names() == ["t"]


async def test_a_tied_head_that_differs_fails_the_load(tmp_path: Path, cluster: Cluster) -> None:
    embedding = random_tensor("embed", "U8", (8, 9000))
    head = bytearray(embedding.data)
    head[-1] ^= 1
    parts = [
        Part(embedding, Vocab(), aliases=("head",), twin="head"),
        Part(RawTensor("head", "U8", (8, 9000), bytes(head))),
    ]
    await cluster.prepare(write_plan(tmp_path, parts, 2))
    with pytest.raises(TiedHeadDiffers, match="'head'"):
        await cluster.run()
    for number, rank in enumerate(cluster.ranks):
        await cluster.until(number, FAILED)
        assert rank.device.live == []


async def test_a_file_that_changes_under_way_fails_the_load_although_all_bytes_landed(
    tmp_path: Path, cluster: Cluster
) -> None:
    cluster.transport.stop_at = 2
    await cluster.prepare(write_plan(tmp_path, one_large(4), 1))
    running = asyncio.create_task(cluster.run())
    await cluster.transport.stopped.wait()
    with (tmp_path / FILE).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\0")
    cluster.transport.go_on.set()
    with pytest.raises(DataLoss) as caught:
        await running
    assert caught.value.reason == "FILE_CHANGED"


async def test_slices_that_do_not_fit_are_refused_with_nothing_allocated(
    tmp_path: Path, cluster: Cluster
) -> None:
    plan = write_plan(tmp_path, [sized("a", 500), sized("b", 600)], 1)
    chunks = rank_chunks(plan_steps(plan, CHUNK), 0)
    wanted = 1100 + staging_bytes(chunks)
    device = CountingDevice(wanted - 1)
    with pytest.raises(OutOfMemory) as caught:
        await cluster.prepare(plan, [device])
    facts = {"rank": "0", "wanted_bytes": str(wanted), "free_bytes": str(wanted - 1)}
    assert caught.value.metadata == facts
    assert (device.live, device.memory().allocated_bytes) == ([], 0)


async def test_memory_that_runs_out_while_allocating_is_given_back(
    tmp_path: Path, cluster: Cluster
) -> None:
    class Shrinking(CountingDevice):
        """Somebody else takes memory after it was checked."""

        def allocate(self, nbytes: int) -> Any:
            self._limit_bytes = 1000
            return super().allocate(nbytes)

    device = Shrinking()
    with pytest.raises(OutOfMemory):
        await cluster.prepare(write_plan(tmp_path, [sized("a", 900), sized("b", 600)], 1), [device])
    assert device.live == []


async def test_a_prepare_that_is_cancelled_while_allocating_gives_everything_back(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    class Slow(CountingDevice):
        """Allocates the first buffer, then waits for the test."""

        def allocate(self, nbytes: int) -> Any:
            buffer = super().allocate(nbytes)
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(SECONDS)
            return buffer

    device = Slow()
    plan = write_plan(tmp_path, [sized("a", 10), sized("b", 10)], 1)
    header, *pages = manifest_pages("l", plan, 0, rank_chunks(plan_steps(plan, CHUNK), 0))
    manifest = parse_manifest(header.header, [page.body for page in pages])
    session = LoadSession(manifest, device, MemoryTransport(MemoryNetwork()), threads, threads)
    preparing = asyncio.create_task(session.prepare())
    await begun.wait()
    preparing.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await preparing
    assert device.live == []


# ---------------------------------------------------------------- the way in


async def greet(connection: Connection, hello: bytes) -> None:
    """Say hello and wait for the welcome."""
    await connection.send(wire.TAG_HELLO, hello)
    await connection.recv(wire.TAG_WELCOME, bytearray(wire.WELCOME_BYTES))


async def test_a_wrong_token_is_shown_out_and_the_right_one_still_works(
    tmp_path: Path, cluster: Cluster
) -> None:
    await cluster.prepare(write_plan(tmp_path, one_large(3), 1))
    endpoint = cluster.ranks[0].endpoint
    for token in (bytes(wire.TOKEN_BYTES), endpoint.token[:-1] + b"\0", endpoint.token[::-1]):
        stranger = await cluster.transport.connect(endpoint.host, endpoint.port, 1.0)
        with pytest.raises(PeerLostError):
            await greet(stranger, wire.encode_hello(token))
    await cluster.run()
    assert cluster.sender.verified == (True,)


async def test_the_token_of_one_rank_opens_no_other(tmp_path: Path, cluster: Cluster) -> None:
    """Tokens are bound to load and rank: each belongs to the one session that made it."""
    await cluster.prepare(write_plan(tmp_path, one_large(3), 2))
    first, second = (rank.endpoint for rank in cluster.ranks)
    stranger = await cluster.transport.connect(second.host, second.port, 1.0)
    with pytest.raises(PeerLostError):
        await greet(stranger, wire.encode_hello(first.token))
    await cluster.run()
    assert cluster.sender.verified == (True, True)
    # Used once, it has nowhere to be shown again.
    with pytest.raises(PeerLostError):
        await cluster.transport.connect(first.host, first.port, 1.0)


async def test_a_stranger_that_says_nothing_or_nonsense_keeps_nobody_out(
    tmp_path: Path, cluster: Cluster
) -> None:
    await cluster.prepare(write_plan(tmp_path, one_large(3), 1))
    endpoint = cluster.ranks[0].endpoint
    silent = await cluster.transport.connect(endpoint.host, endpoint.port, 1.0)
    loud = await cluster.transport.connect(endpoint.host, endpoint.port, 1.0)
    with pytest.raises(PeerLostError):
        await greet(loud, bytes(wire.HELLO_BYTES))
    await cluster.run()
    assert cluster.sender.verified == (True,)
    silent.abort()


async def test_a_token_opens_one_connection_only(tmp_path: Path, cluster: Cluster) -> None:
    cluster.transport.stop_at = 1
    await cluster.prepare(write_plan(tmp_path, one_large(3), 1))
    endpoint = cluster.ranks[0].endpoint
    second = await cluster.transport.connect(endpoint.host, endpoint.port, 1.0)
    running = asyncio.create_task(cluster.run())
    await cluster.transport.stopped.wait()
    with pytest.raises(PeerLostError):
        await greet(second, wire.encode_hello(endpoint.token))
    with pytest.raises(PeerLostError):  # the listener is gone
        await cluster.transport.connect(endpoint.host, endpoint.port, 1.0)
    cluster.transport.go_on.set()
    await running


async def test_a_worker_that_is_not_there_is_lost_by_name(tmp_path: Path, cluster: Cluster) -> None:
    await cluster.prepare(write_plan(tmp_path, one_large(3), 2))
    await cluster.ranks[1].session.abort()
    with pytest.raises(WorkerLost, match="'w1'") as caught:
        await cluster.run()
    assert caught.value.metadata == {"worker_id": "w1", "rank": "1"}


# ---------------------------------------------------------------- ends in the middle


@pytest.mark.parametrize("tp", [1, 3])
async def test_a_cancel_in_the_middle_returns_every_buffer(
    tp: int, tmp_path: Path, cluster: Cluster
) -> None:
    cluster.transport.stop_at = 3
    await cluster.prepare(
        write_plan(tmp_path, [Part(random_tensor("t", "U8", (tp, 20 * CHUNK)), Even("c", 0))], tp)
    )
    running = asyncio.create_task(cluster.run())
    await cluster.transport.stopped.wait()
    assert cluster.window.out > 0
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert cluster.window.out == 0
    for number, rank in enumerate(cluster.ranks):
        await cluster.until(number, FAILED)
        assert isinstance(rank.session.failure, StreamerLost)
        assert rank.device.live == []


async def test_a_cancel_while_a_thread_reads_waits_for_the_thread(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    real = os.preadv

    def slow(*arguments: Any) -> int:
        loop.call_soon_threadsafe(reading.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(SECONDS)
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", slow)
    await cluster.prepare(write_plan(tmp_path, one_large(4), 1))
    running = asyncio.create_task(cluster.run())
    await reading.wait()
    running.cancel()
    await asyncio.sleep(0.02)
    assert not running.done()
    assert cluster.window.out > 0
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert cluster.window.out == 0


async def test_a_cancel_while_a_thread_opens_the_files_leaves_none_open(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    opened: list[int] = []
    real = os.open

    def slow(*arguments: Any) -> int:
        opened.append(real(*arguments))
        loop.call_soon_threadsafe(opening.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(SECONDS)
        return opened[0]

    await cluster.prepare(write_plan(tmp_path, one_large(4), 1))
    monkeypatch.setattr(os, "open", slow)
    running = asyncio.create_task(cluster.run())
    await opening.wait()
    running.cancel()
    await asyncio.sleep(0.01)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    monkeypatch.undo()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


async def test_a_worker_that_aborts_in_the_middle_is_lost_and_keeps_nothing(
    tmp_path: Path, cluster: Cluster
) -> None:
    cluster.transport.stop_at = 3
    await cluster.prepare(write_plan(tmp_path, one_large(10), 2))
    running = asyncio.create_task(cluster.run())
    await cluster.transport.stopped.wait()
    assert cluster.ranks[1].session.state == RECEIVING
    await cluster.ranks[1].session.abort()
    assert cluster.ranks[1].device.live == []
    cluster.transport.go_on.set()
    with pytest.raises(WorkerLost) as caught:
        await running
    assert caught.value.metadata["worker_id"] == "w1"
    assert cluster.window.out == 0


async def test_aborting_a_prepared_session_frees_it_and_closes_the_door(
    tmp_path: Path, cluster: Cluster
) -> None:
    await cluster.prepare(write_plan(tmp_path, one_large(2), 1))
    (rank,) = cluster.ranks
    assert rank.session.state == PREPARED
    await rank.session.abort()
    await rank.session.abort()
    assert rank.device.live == []
    with pytest.raises(PeerLostError):
        await cluster.transport.connect("127.0.0.1", rank.endpoint.port, 1.0)


# ---------------------------------------------------------------- peers that break the protocol


class Peer:
    """A worker that a test plays by hand."""

    def __init__(self, act: Callable[[Connection], Awaitable[None]]) -> None:
        self._act = act
        self._tasks: list[asyncio.Task[None]] = []

    def accept(self, connection: Connection) -> None:
        self._tasks.append(asyncio.create_task(self._greet(connection)))

    async def _greet(self, connection: Connection) -> None:
        await connection.recv(wire.TAG_HELLO, bytearray(wire.HELLO_BYTES))
        await self._act(connection)


async def act_no_welcome(connection: Connection) -> None:
    await connection.send(wire.TAG_WELCOME, bytes(wire.WELCOME_BYTES))


async def act_foreign_credit(connection: Connection) -> None:
    await connection.send(wire.TAG_WELCOME, wire.encode_welcome(1))
    await connection.send(wire.TAG_CREDIT, wire.encode_credit(99))


async def act_nonsense_verdict(connection: Connection) -> None:
    await connection.send(wire.TAG_WELCOME, wire.encode_welcome(1))
    await connection.send(wire.TAG_VERDICT, b"\x01" * wire.VERDICT_BYTES)


async def act_hang_up(connection: Connection) -> None:
    connection.abort()


@pytest.mark.parametrize(
    "act", [act_no_welcome, act_foreign_credit, act_nonsense_verdict, act_hang_up]
)
async def test_a_worker_that_breaks_the_protocol_is_lost_by_name(
    act: Callable[[Connection], Awaitable[None]], tmp_path: Path, cluster: Cluster
) -> None:
    plan = write_plan(tmp_path, one_large(3), 1)
    listener = await cluster.transport.listen(Peer(act).accept)
    job = StartStream("l", plan, CHUNK, (RankEndpoint("w9", "h", listener.port, bytes(32)),))
    cluster.sender = LoadSender(
        job, cluster.transport, HostFeed(cluster.window, cluster.threads), cluster.threads
    )
    with pytest.raises(WorkerLost, match="'w9'"):
        await cluster.run()
    assert cluster.sender.verified in ((False,), ())


async def welcomed(cluster: Cluster) -> Connection:
    """Connect to the only worker as a streamer does."""
    endpoint = cluster.ranks[0].endpoint
    connection = await cluster.transport.connect(endpoint.host, endpoint.port, 1.0)
    await greet(connection, wire.encode_hello(endpoint.token))
    return connection


async def test_wrong_digests_are_refused_although_the_bytes_are_right(
    tmp_path: Path, cluster: Cluster
) -> None:
    part = sized("t", 10)
    await cluster.prepare(write_plan(tmp_path, [part], 1))
    connection = await welcomed(cluster)
    await connection.send(wire.chunk_tag(0), part.tensor.data)
    await connection.send(wire.end_tag(0), bytes(16))
    verdict = bytearray(wire.VERDICT_BYTES)
    await connection.recv(wire.TAG_VERDICT, verdict)
    error = wire.decode_verdict(bytes(verdict))
    assert isinstance(error, DigestMismatch)
    assert error.metadata["expected"] == "00" * 16
    connection.abort()
    await cluster.until(0, FAILED)
    assert cluster.ranks[0].device.live == []


async def test_bytes_without_digests_are_never_verified(tmp_path: Path, cluster: Cluster) -> None:
    part = sized("t", 10)
    await cluster.prepare(write_plan(tmp_path, [part], 1))
    connection = await welcomed(cluster)
    await connection.send(wire.chunk_tag(0), part.tensor.data)
    await asyncio.sleep(0.02)
    assert cluster.ranks[0].session.state == RECEIVING
    connection.abort()
    await cluster.until(0, FAILED)
    assert cluster.ranks[0].device.live == []


async def test_a_streamer_that_hangs_up_right_after_the_verdict_leaves_the_load_verified(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Over a network the worker may learn of the hang-up before it learns that its verdict arrived.
    await cluster.prepare(write_plan(tmp_path, one_large(2), 1))
    session = cluster.ranks[0].session
    real = session._greet_later

    class LateVerdict:
        def __init__(self, inner: Connection) -> None:
            self.inner = inner
            self.lanes = inner.lanes

        async def send(self, tag: int, buffer: Any) -> None:
            await self.inner.send(tag, buffer)
            if tag == wire.TAG_VERDICT:
                raise PeerLostError("reset")

        async def recv(self, tag: int, buffer: Any) -> None:
            await self.inner.recv(tag, buffer)

        def abort(self) -> None:
            self.inner.abort()

    listener = await MemoryTransport(cluster.network).listen(
        lambda connection: real(LateVerdict(connection))
    )
    endpoint = dataclasses.replace(cluster.ranks[0].endpoint, port=listener.port)
    job = dataclasses.replace(cluster.sender._job, endpoints=(endpoint,))
    cluster.sender = LoadSender(
        job, cluster.transport, HostFeed(cluster.window, cluster.threads), cluster.threads
    )
    await cluster.run()
    assert session.state == VERIFIED
    assert set(cluster.ranks[0].local_bytes()) == {"t"}
