"""A worker that can open the checkpoint's files itself reads what it keeps; the streamer only listens."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader_kernels.cupy_device import CupyDevice
from loader_kernels.device import Device
from loader_kernels.digest import BLOCK_BYTES
from loader_kernels.numpy_device import NumpyDevice
from loader_service.errors import (
    DataLoss,
    InvalidRequest,
    LocalSourceUnavailable,
    TiedHeadDiffers,
)
from loader_service.plan.cuts import Even, Heads, Replicated, Vocab
from loader_service.plan.slices import LoadPlan
from loader_service.stream import filling
from loader_service.stream.chunks import plan_steps, rank_chunks
from loader_service.stream.feed import HostFeed
from loader_service.stream.jobs import RankEndpoint, StartStream
from loader_service.stream.manifests import manifest_pages
from loader_service.stream.proof import FileProof, NotTheSameError, prove, same_file
from loader_service.stream.sender import LoadSender
from loader_service.stream.window import HostWindow
from loader_service.testing.memory_transport import MemoryNetwork, MemoryTransport
from loader_service.v1 import worker_pb2
from loader_service.v1.types_pb2 import WeightSource
from loader_worker.manifest import Manifest, parse_manifest
from loader_worker.session import LoadSession
from loader_worker.store import WeightStore
from tests.checkpoints import random_tensor
from tests.fake_cupy import fake_cupy
from tests.plans import FILE, MAX_TP, Part, random_parts, write_plan

CHUNK = 2 * BLOCK_BYTES
MIB = 1 << 20
LOCAL = WeightSource.WEIGHT_SOURCE_LOCAL
AUTO = WeightSource.WEIGHT_SOURCE_AUTO


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("plan")
    yield path
    shutil.rmtree(path)


def make_device(kind: str, patch: pytest.MonkeyPatch) -> Device:
    if kind == "numpy":
        return NumpyDevice()
    patch.setitem(sys.modules, "cupy", fake_cupy())
    return CupyDevice(0)


def messages(
    plan: LoadPlan, rank: int, source: WeightSource.ValueType = AUTO
) -> list[worker_pb2.PrepareLoadRequest]:
    chunks = rank_chunks(plan_steps(plan, CHUNK), rank)
    proofs = [prove(file) for file in plan.files.values()]
    return list(manifest_pages("l", plan, rank, chunks, source, proofs))


def parsed(pages: Sequence[worker_pb2.PrepareLoadRequest]) -> Manifest:
    return parse_manifest(pages[0].header, [page.body for page in pages[1:]])


class Group:
    """Workers of one plan; those in `local` are asked to read for themselves."""

    def __init__(
        self, plan: LoadPlan, threads: ThreadPoolExecutor, root: Path | None = None
    ) -> None:
        self.plan = plan
        self.network = MemoryNetwork()
        self.threads = threads
        self.root = root
        self.sessions: list[LoadSession] = []
        self.devices: list[Device] = []

    async def prepare(self, local: Sequence[int], make: Callable[[], Device]) -> None:
        for rank in range(self.plan.tp):
            chunks = rank_chunks(plan_steps(self.plan, CHUNK), rank)
            pages = (
                messages(self.plan, rank, LOCAL)
                if rank in local
                else list(manifest_pages("l", self.plan, rank, chunks))
            )
            self.devices.append(make())
            self.sessions.append(
                LoadSession(
                    parsed(pages),
                    self.devices[-1],
                    MemoryTransport(self.network),
                    self.threads,
                    self.threads,
                    self.root,
                )
            )
            await self.sessions[-1].prepare()

    async def run(self) -> LoadSender:
        endpoints = tuple(
            RankEndpoint(f"w{rank}", "here", *session.door, reads_itself=session.reads_itself)
            for rank, session in enumerate(self.sessions)
        )
        sender = LoadSender(
            StartStream("l", self.plan, CHUNK, endpoints),
            MemoryTransport(self.network),
            HostFeed(HostWindow(64 * CHUNK), self.threads),
            self.threads,
        )

        async def connected(lanes: tuple[str, ...]) -> None:
            pass

        async with asyncio.timeout(10):
            await sender.run(connected)
        return sender

    def bytes_of(self, rank: int) -> dict[str, bytes]:
        device = self.devices[rank]
        store = WeightStore(device)
        self.sessions[rank].commit(store)
        return {
            name: bytes(device.read(store.get(name).buffer, 0, store.get(name).nbytes))
            for name in store.names()
        }

    async def close(self) -> None:
        for session in self.sessions:
            await session.abort()


async def loaded(
    plan: LoadPlan, local: Sequence[int], make: Callable[[], Device], threads: ThreadPoolExecutor
) -> list[dict[str, bytes]]:
    group = Group(plan, threads)
    try:
        await group.prepare(local, make)
        sender = await group.run()
        assert sender.done_bytes == tuple(plan.totals(rank).wire_bytes for rank in range(plan.tp))
        assert all(sender.verified)
        return [group.bytes_of(rank) for rank in range(plan.tp)]
    finally:
        await group.close()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), tp=st.integers(1, MAX_TP), kind=st.sampled_from(("numpy", "cuda")))
def test_any_plan_gives_the_same_bytes_whoever_reads(
    data: st.DataObject, tp: int, kind: str, folder: Path, threads: ThreadPoolExecutor
) -> None:
    parts = data.draw(random_parts(tp, max_rows=data.draw(st.sampled_from((6, 3000)))))
    plan = write_plan(folder, parts, tp)
    # The network of these tests carries host memory only.
    ranks = st.sets(st.integers(0, tp - 1)) if kind == "numpy" else st.just(set(range(tp)))
    local = data.draw(ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filling, "PIECE_BYTES", data.draw(st.sampled_from((100, 5000, MIB))))

        def make() -> Device:
            return make_device(kind, patch)

        expected = asyncio.run(loaded(plan, (), NumpyDevice, threads))
        assert asyncio.run(loaded(plan, sorted(local), make, threads)) == expected


LARGE: Sequence[Part] = (
    Part(random_tensor("rows", "BF16", (300, 2048)), Even("column", 0)),
    Part(random_tensor("columns", "BF16", (2048, 300)), Even("row", 1)),
    Part(random_tensor("heads", "F32", (8, 999)), Heads("kv", 0, 1, 8, replicable=True)),
    Part(random_tensor("norm", "F32", (2048,)), Replicated()),
    Part(random_tensor("vocab", "BF16", (3001, 100)), Vocab()),
    Part(random_tensor("empty", "F32", (0, 4))),
)


@pytest.mark.parametrize("kind", ["numpy", "cuda"])
async def test_columns_are_read_by_rows_and_the_streamer_reads_nothing(
    kind: str, tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = write_plan(tmp_path, LARGE, 2)
    calls = 0
    real = os.preadv

    def count(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", count)
    feed = HostFeed.fill

    async def fill(*_: Any) -> Any:
        raise AssertionError("the streamer reads")

    monkeypatch.setattr(HostFeed, "fill", fill)
    made = await loaded(plan, (0, 1), lambda: make_device(kind, monkeypatch), threads)
    # 2048 rows for each of two ranks would be 4096 calls.
    assert calls < 500
    monkeypatch.setattr(HostFeed, "fill", feed)
    assert made == await loaded(plan, (), NumpyDevice, threads)


async def test_a_file_that_changes_meanwhile_fails_the_load(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    plan = write_plan(tmp_path, LARGE, 1)
    group = Group(plan, threads)
    await group.prepare((0,), NumpyDevice)
    os.utime(tmp_path / FILE, ns=(1, 1))
    with pytest.raises(DataLoss) as caught:
        await group.run()
    await group.close()
    assert caught.value.reason == "FILE_CHANGED"
    assert group.devices[0].memory().allocated_bytes == 0


async def test_a_file_that_ends_early_fails_the_load_with_the_workers_words(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = write_plan(tmp_path, LARGE, 1)
    group = Group(plan, threads)
    await group.prepare((0,), NumpyDevice)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(DataLoss) as caught:
        await group.run()
    await group.close()
    assert caught.value.reason == "FILE_TRUNCATED"
    assert group.devices[0].memory().allocated_bytes == 0


async def test_a_twin_that_differs_is_found_by_the_worker(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    parts = [
        Part(random_tensor("embed", "BF16", (30, 50), seed=1)),
        Part(random_tensor("head", "BF16", (30, 50), seed=2)),
    ]
    plan = write_plan(tmp_path, parts, 1)
    first, second = plan.tensors
    plan = dataclasses.replace(plan, tensors=(dataclasses.replace(first, twin=second.source),))
    group = Group(plan, threads)
    await group.prepare((0,), NumpyDevice)
    with pytest.raises(TiedHeadDiffers):
        await group.run()
    await group.close()


# ---------------------------------------------------------------- the proof


def spoil(path: Path, how: str) -> None:
    """Put something else in a file's place, of the same name and mostly of the same size."""
    data = bytearray(path.read_bytes())
    path.unlink()
    if how == "header":
        data[20] ^= 1
    elif how == "payload":
        half = len(data) // 2
        data[half:] = bytes(byte ^ 1 for byte in data[half:])
    elif how == "longer":
        data += b"x"
    elif how == "pipe":
        return os.mkfifo(path)
    elif how == "folder":
        return path.mkdir()
    elif how == "gone":
        return None
    path.write_bytes(data)
    return None


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("header", "another header"),
        ("payload", "other bytes"),
        ("longer", "bytes here, not"),
        ("pipe", "is not a file"),
        ("folder", "is not a file"),
        ("gone", "cannot be opened: No such file"),
    ],
)
async def test_another_file_is_not_read(
    how: str, text: str, tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    plan = write_plan(tmp_path, LARGE, 1)
    pages = messages(plan, 0)
    forced = messages(plan, 0, LOCAL)
    spoil(tmp_path / FILE, how)

    async def prepared(given_pages: Sequence[worker_pb2.PrepareLoadRequest]) -> LoadSession:
        transport = MemoryTransport(MemoryNetwork())
        manifest = parsed(given_pages)
        session = LoadSession(manifest, NumpyDevice(), transport, threads, threads)
        await session.prepare()
        return session

    session = await prepared(pages)
    assert not session.reads_itself
    assert text in session.not_local_because
    await session.abort()
    with pytest.raises(LocalSourceUnavailable, match=text):
        await prepared(forced)


def test_a_copy_at_the_same_path_is_the_same_file(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, LARGE, 1)
    proof = prove(plan.files[FILE])
    shutil.copy(tmp_path / FILE, tmp_path / "copy")
    (tmp_path / "copy").replace(tmp_path / FILE)
    found = same_file(proof, tmp_path)
    assert (found.size, found.path) == (proof.size, str(tmp_path / FILE))
    assert found.inode != plan.files[FILE].inode


def test_a_file_outside_of_the_root_is_not_read_through_a_link_either(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, LARGE, 1)
    proof = prove(plan.files[FILE])
    inside = tmp_path / "root"
    inside.mkdir()
    link = inside / FILE
    link.symlink_to(tmp_path / FILE)
    for path in (proof.path, str(link)):
        with pytest.raises(NotTheSameError, match="outside"):
            same_file(dataclasses.replace(proof, path=path), inside)


def test_a_proof_is_of_the_file_that_was_planned(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, LARGE, 1)
    (file,) = plan.files.values()
    assert prove(file).sample_offsets != prove(file).sample_offsets
    os.utime(tmp_path / FILE, ns=(1, 1))
    with pytest.raises(DataLoss) as changed:
        prove(file)
    (tmp_path / FILE).unlink()
    with pytest.raises(DataLoss) as gone:
        prove(file)
    assert (changed.value.reason, gone.value.reason) == ("FILE_CHANGED", "READ_FAILED")


# ---------------------------------------------------------------- manifests


def damaged(plan: LoadPlan, damage: Callable[[worker_pb2.ManifestPage], None]) -> Manifest:
    pages = messages(plan, 0)
    damage(pages[1].body)
    return parsed(pages)


def set_run(**fields: int) -> Callable[[worker_pb2.ManifestPage], None]:
    def damage(page: worker_pb2.ManifestPage) -> None:
        for name, value in fields.items():
            setattr(page.slices[0].origin.runs[0], name, value)

    return damage


def set_tensor(**fields: int) -> Callable[[worker_pb2.ManifestPage], None]:
    def damage(page: worker_pb2.ManifestPage) -> None:
        for name, value in fields.items():
            setattr(page.slices[0].origin.tensor, name, value)

    return damage


def set_file(**fields: Any) -> Callable[[worker_pb2.ManifestPage], None]:
    def damage(page: worker_pb2.ManifestPage) -> None:
        for name, value in fields.items():
            setattr(page.files[0], name, value)

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        set_run(source_offset_bytes=-1),
        set_run(source_offset_bytes=1 << 40),
        set_run(local_offset_bytes=1),
        set_run(length_bytes=1 << 40),
        set_run(length_bytes=8),
        set_run(count=0),
        set_run(count=1 << 40),
        set_run(source_stride_bytes=0),
        set_run(local_stride_bytes=0),
        set_tensor(file_index=1),
        set_tensor(file_index=-1),
        set_tensor(offset_bytes=0),
        set_tensor(length_bytes=1 << 40),
        set_tensor(length_bytes=-1),
        set_file(path="relative"),
        set_file(header_bytes=0),
        set_file(header_bytes=1 << 50),
        set_file(sample_bytes=1 << 30),
        set_file(sample_bytes=0),
        lambda page: page.files[0].sample_offsets.append(-1),
        lambda page: page.slices[0].ClearField("origin"),
    ],
)
def test_a_manifest_that_reaches_outside_is_refused(
    damage: Callable[[worker_pb2.ManifestPage], None], tmp_path: Path
) -> None:
    plan = write_plan(tmp_path, LARGE, 2)
    with pytest.raises(InvalidRequest) as caught:
        damaged(plan, damage)
    assert caught.value.reason == "INVALID_MANIFEST"


def test_a_manifest_brings_the_proofs_and_where_each_slice_is(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, LARGE, 2)
    manifest = parsed(messages(plan, 1, LOCAL))
    (proof,) = manifest.files
    assert isinstance(proof, FileProof)
    assert manifest.must_be_local
    assert [piece.runs for piece in manifest.slices] == [
        piece.runs for piece in plan.rank_slices(1)
    ]
    assert [(origin.source.name, origin.source.offset) for origin in manifest.origins] == [
        (tensor.source.name, tensor.source.offset) for tensor in plan.tensors
    ]
