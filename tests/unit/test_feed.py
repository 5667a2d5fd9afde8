"""A ring on a device holds the same chunks, with the same hashes, as buffers on the host."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader_kernels.cupy_device import CupyDevice
from loader_kernels.device import Device
from loader_kernels.digest import BLOCK_BYTES
from loader_kernels.numpy_device import NumpyDevice
from loader_service.errors import DataLoss, OutOfMemory
from loader_service.plan.cuts import Even, Replicated, Vocab
from loader_service.plan.slices import LoadPlan
from loader_service.stream import filling
from loader_service.stream.chunks import plan_steps
from loader_service.stream.feed import DeviceFeed, Feed, HostFeed
from loader_service.stream.filling import Place
from loader_service.stream.payloads import Payload, step_payloads
from loader_service.stream.reader import OpenFiles
from loader_service.stream.window import HostWindow
from tests.checkpoints import random_tensor
from tests.fake_cupy import fake_cupy
from tests.plans import FILE, MAX_TP, Part, random_parts, write_plan

MIB = 1 << 20
RING_BYTES = 64 * MIB


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.fixture(params=["numpy", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    if request.param == "numpy":
        return NumpyDevice()
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    return CupyDevice(0)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("plan")
    yield path
    shutil.rmtree(path)


def places_of(payloads: Sequence[Payload]) -> list[Place]:
    return [place for payload in payloads for place in payload.places()]


async def chunks_of(feed: Feed, plan: LoadPlan, chunk_bytes: int, read: Any) -> list[Any]:
    """Return ranks, bytes and hashes of every payload of every step."""
    seen: list[Any] = []
    files = OpenFiles(plan.files)
    try:
        for step in plan_steps(plan, chunk_bytes):
            payloads = step_payloads(step, plan.tensors, range(plan.tp))
            slots = await feed.acquire(chunk_bytes, sum(each.nbytes > 0 for each in payloads))
            spare = list(slots)
            for payload in payloads:
                payload.slot = spare.pop() if payload.nbytes else None
            hashes = await feed.fill(files, plan.tensors, places_of(payloads))
            seen += [
                (each.ranks, read(each.slot, each.nbytes) if each.nbytes else b"")
                for each in payloads
            ]
            seen.append(sorted((part.piece.name, part.begin, part.hashes) for part in hashes))
            feed.release(slots)
    finally:
        files.close()
    return seen


async def check_same(
    plan: LoadPlan, chunk_bytes: int, device: Device, threads: ThreadPoolExecutor
) -> None:
    host = HostFeed(HostWindow(RING_BYTES), threads)
    ring = DeviceFeed(device, RING_BYTES, threads)
    expected = await chunks_of(host, plan, chunk_bytes, lambda slot, size: bytes(slot[:size]))
    made = await chunks_of(
        ring, plan, chunk_bytes, lambda slot, size: bytes(device.read(slot, 0, size))
    )
    assert made == expected


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), tp=st.integers(1, MAX_TP))
def test_any_plan_gives_the_same_chunks_on_the_device(
    data: st.DataObject, tp: int, folder: Path, threads: ThreadPoolExecutor, device: Device
) -> None:
    parts = data.draw(random_parts(tp, max_rows=data.draw(st.sampled_from((6, 3000)))))
    plan = write_plan(folder, parts, tp)
    with pytest.MonkeyPatch.context() as patch:
        # Small, so that pieces end everywhere.
        patch.setattr(filling, "PIECE_BYTES", data.draw(st.sampled_from((100, 5000, MIB))))
        asyncio.run(check_same(plan, data.draw(st.integers(1, 3)) * BLOCK_BYTES, device, threads))


LARGE: Sequence[Part] = (
    Part(random_tensor("rows", "BF16", (3000, 2048)), Even("column", 0)),
    Part(random_tensor("columns", "BF16", (2048, 3000)), Even("row", 1)),
    Part(random_tensor("long rows", "U8", (3, 4 * MIB)), Even("row", 1)),
    Part(random_tensor("norm", "F32", (2048,)), Replicated()),
    Part(random_tensor("vocab", "BF16", (3001, 1000)), Vocab()),
)


@pytest.mark.parametrize("tp", [1, 2, 4])
async def test_large_tensors_are_read_once_in_pieces(
    tp: int, tmp_path: Path, threads: ThreadPoolExecutor, device: Device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    plan = write_plan(tmp_path, LARGE, tp)
    await check_same(plan, 8 * MIB, device, threads)
    counts = np.zeros(plan.files[FILE].size, np.uint8)
    real = os.preadv
    calls = 0

    def count(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        done = real(descriptor, buffers, offset)
        counts[offset : offset + done] += 1
        return done

    monkeypatch.setattr(os, "preadv", count)
    ring = DeviceFeed(device, RING_BYTES, threads)
    await chunks_of(ring, plan, 8 * MIB, lambda *_: b"")
    start = min(tensor.source.offset for tensor in plan.tensors)
    assert set(counts[start:]) == {1}
    # Column slices are read row by row for all ranks, not piece by piece.
    assert calls < 400


async def test_a_file_that_ends_early_is_an_error(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    plan = write_plan(tmp_path, LARGE, 2)
    files = OpenFiles(plan.files)
    os.truncate(tmp_path / FILE, 20 * MIB)
    ring = DeviceFeed(NumpyDevice(), RING_BYTES, threads)
    *_, last = plan_steps(plan, 8 * MIB)
    payloads = step_payloads(last, plan.tensors, range(plan.tp))
    slots = await ring.acquire(8 * MIB, len(payloads))
    for payload, slot in zip(payloads, slots, strict=True):
        payload.slot = slot
    with pytest.raises(DataLoss) as caught:
        await ring.fill(files, plan.tensors, places_of(payloads))
    ring.release(slots)
    files.close()
    assert caught.value.reason == "FILE_TRUNCATED"


async def test_a_ring_that_does_not_fit_is_refused(threads: ThreadPoolExecutor) -> None:
    ring = DeviceFeed(NumpyDevice(12 * MIB), RING_BYTES, threads)
    with pytest.raises(OutOfMemory, match="ring on numpy does not fit"):
        await ring.acquire(8 * MIB, 2)
    slots = await ring.acquire(8 * MIB, 1)
    ring.release(slots)
