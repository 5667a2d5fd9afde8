"""A worker's threads and its device: reading, freeing and cancelling at the same time."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from loader_kernels.device import Buffer
from loader_kernels.testing import CountingDevice
from loader_service.errors import LoadNotFound, WorkerLost
from loader_service.stream.chunks import plan_steps, rank_chunks
from loader_service.stream.feed import HostFeed
from loader_service.stream.jobs import RankEndpoint, StartStream
from loader_service.stream.manifests import manifest_pages
from loader_service.stream.sender import LoadSender
from loader_service.stream.window import HostWindow
from loader_service.testing.memory_transport import MemoryNetwork, MemoryTransport
from loader_service.v1 import worker_pb2
from loader_worker import servicer
from loader_worker.manifest import Manifest, parse_manifest
from loader_worker.servicer import WorkerServicer
from loader_worker.worker import Worker
from tests.plans import sized, write_plan

CHUNK = 1 << 20
SECONDS = 10.0
CONTEXT: grpc.aio.ServicerContext[Any, Any] = None  # type: ignore[assignment]


class GatedDevice(CountingDevice):
    """Stands still in one method until the test lets it go on.

    Attributes:
        gated: name of the method.
        begun: set when the method has begun.
        go_on: lets it end.
        loop_thread: thread whose calls are counted.
        inline_calls: blocking methods that were called from that thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gated = ""
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.loop_thread = threading.get_ident()
        self.inline_calls: list[str] = []

    def _enter(self, method: str) -> None:
        if threading.get_ident() == self.loop_thread:
            self.inline_calls.append(method)
        if method == self.gated:
            self.begun.set()
            assert self.go_on.wait(SECONDS)

    def memory(self) -> Any:
        self._enter("memory")
        return super().memory()

    def allocate(self, nbytes: int) -> Any:
        buffer = super().allocate(nbytes)
        self._enter("allocate")
        return buffer

    def zero(self, buffer: Buffer, offset: int, length: int) -> None:
        self._enter("zero")
        super().zero(buffer, offset, length)

    def read(self, buffer: Buffer, offset: int, length: int) -> memoryview:
        self._enter("read")
        return super().read(buffer, offset, length)

    def free(self, buffer: Buffer) -> None:
        self._enter("free")
        super().free(buffer)


class Loader:
    """A worker on a gated device, and a streamer for it."""

    def __init__(self, folder: Path, threads: ThreadPoolExecutor) -> None:
        self.device = GatedDevice()
        self._network = MemoryNetwork()
        self._threads = threads
        self.worker = Worker("w0", self.device, MemoryTransport(self._network))
        self.plan = write_plan(folder, [sized("a", 100), sized("b", 3 * CHUNK), sized("c", 9)], 1)
        self.steps = plan_steps(self.plan, CHUNK)

    def manifest(self, load_id: str = "l") -> Manifest:
        header, *pages = manifest_pages(load_id, self.plan, 0, rank_chunks(self.steps, 0))
        return parse_manifest(header.header, [page.body for page in pages])

    async def load(self) -> None:
        """Bring a load to its commit."""
        await self.send(*(await self.worker.prepare(self.manifest())).door)
        await self.worker.commit("l")

    async def send(self, port: int, token: bytes) -> None:
        """Send a prepared load."""
        job = StartStream("l", self.plan, CHUNK, (RankEndpoint("w0", "here", port, token),))
        sender = LoadSender(
            job,
            MemoryTransport(self._network),
            HostFeed(HostWindow(64 * CHUNK), self._threads),
            self._threads,
        )

        async def connected(lanes: tuple[str, ...]) -> None:
            pass

        async with asyncio.timeout(SECONDS):
            await sender.run(connected)

    async def list_tensors(self) -> worker_pb2.ListTensorsResponse:
        request = worker_pb2.ListTensorsRequest(load_id="l", include_sha256=True)
        return await WorkerServicer(self.worker, "host").ListTensors(request, CONTEXT)


@pytest.fixture
async def loader(tmp_path: Path) -> AsyncIterator[Loader]:
    with ThreadPoolExecutor(2) as threads:
        loader = Loader(tmp_path, threads)
        yield loader
        loader.device.go_on.set()
        await loader.worker.close()
    assert loader.device.live == []


async def begun(loader: Loader) -> None:
    """Return once the gated method stands still."""
    assert await asyncio.to_thread(loader.device.begun.wait, SECONDS)


async def test_digests_of_pieces_are_those_of_whole_tensors(
    loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    await loader.load()
    monkeypatch.setattr(servicer, "HASH_BYTES", CHUNK - 1)
    answer = await loader.list_tensors()
    store, device = loader.worker.store, loader.device
    assert {tensor.name: tensor.sha256 for tensor in answer.tensors} == {
        name: hashlib.sha256(device.read(weight.buffer, 0, weight.nbytes)).hexdigest()
        for name in store.names()
        for weight in [store.get(name)]
    }


async def test_a_load_that_is_given_back_while_it_is_hashed_is_not_found(
    loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    await loader.load()
    monkeypatch.setattr(servicer, "HASH_BYTES", 50)
    loader.device.gated = "read"
    staged = loader.device.frees.total()
    listing = asyncio.create_task(loader.list_tensors())
    await begun(loader)
    aborting = asyncio.create_task(loader.worker.abort("l"))
    while not loader.worker.store.is_empty:  # noqa: ASYNC110 (it has no event)
        await asyncio.sleep(0.001)
    assert loader.device.frees.total() <= staged  # what is being read is still there
    loader.device.go_on.set()
    with pytest.raises(LoadNotFound, match="given back meanwhile"):
        await listing
    await aborting
    assert (loader.worker.store.resident_bytes(), loader.device.live) == (0, [])


async def test_a_worker_answers_while_its_device_frees(loader: Loader) -> None:
    await loader.load()
    held = loader.worker.store.resident_bytes()
    loader.device.gated = "free"
    aborting = asyncio.create_task(loader.worker.abort("l"))
    await begun(loader)
    async with asyncio.timeout(SECONDS):
        status = await loader.worker.status()
    assert status.memory.resident_bytes == status.memory.allocated_bytes == held
    loader.device.go_on.set()
    await aborting
    assert (await loader.worker.memory()).resident_bytes == 0


async def test_no_call_of_the_device_keeps_the_event_loop(loader: Loader) -> None:
    await loader.load()
    await loader.worker.memory()
    await loader.list_tensors()
    await loader.worker.abort("l")
    await loader.worker.prepare(loader.manifest())
    await loader.worker.abort("l")
    assert loader.device.inline_calls == []


async def test_an_abort_while_staging_is_allocated_frees_it(loader: Loader) -> None:
    door = (await loader.worker.prepare(loader.manifest())).door
    prepared = len(loader.device.live)
    loader.device.gated = "allocate"
    sending = asyncio.create_task(loader.send(*door))
    await begun(loader)
    assert len(loader.device.live) > prepared
    aborting = asyncio.create_task(loader.worker.abort("l"))
    await asyncio.sleep(0)
    loader.device.go_on.set()
    await aborting
    assert (loader.device.live, loader.worker.loads()) == ([], [])
    with pytest.raises(WorkerLost):
        await sending


async def test_an_abort_whose_caller_leaves_is_done_all_the_same(loader: Loader) -> None:
    await loader.send(*(await loader.worker.prepare(loader.manifest())).door)
    loader.device.gated = "free"
    aborting = asyncio.create_task(loader.worker.abort("l"))
    await begun(loader)
    aborting.cancel()
    await asyncio.sleep(0)
    loader.device.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await aborting
    assert (loader.device.live, loader.worker.loads()) == ([], [])
