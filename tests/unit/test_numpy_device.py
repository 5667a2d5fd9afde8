"""The NumPy device: accounting, limits, and memory that really goes back to the machine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

from loader_kernels.device import DeviceOutOfMemoryError
from loader_kernels.devices import open_device
from loader_kernels.digest import BLOCK_BYTES, hash_blocks
from loader_kernels.numpy_device import NumpyBuffer, NumpyDevice

LARGE = 64 << 20


def filled(device: NumpyDevice, data: bytes) -> NumpyBuffer:
    buffer = device.allocate(len(data))
    device.window(buffer, 0, len(data))[:] = np.frombuffer(data, np.uint8)
    return buffer


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 1 << 20])
def test_allocating_and_freeing_are_counted_in_bytes(nbytes: int) -> None:
    device = NumpyDevice(8 << 20)
    buffer = device.allocate(nbytes)
    assert buffer.nbytes == nbytes
    assert device.memory().allocated_bytes == nbytes
    assert device.memory().free_bytes == (8 << 20) - nbytes
    device.free(buffer)
    assert device.memory().allocated_bytes == 0
    assert device.memory().free_bytes == 8 << 20


def test_memory_reports_the_limit_as_the_whole_device() -> None:
    assert NumpyDevice(1000).memory().total_bytes == 1000


def test_memory_without_a_limit_is_within_the_machines() -> None:
    memory = NumpyDevice().memory()
    assert 0 < memory.free_bytes <= memory.total_bytes <= psutil.virtual_memory().total


def test_more_than_the_limit_is_refused_with_both_numbers() -> None:
    device = NumpyDevice(1000)
    device.allocate(400)
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        device.allocate(601)
    assert (caught.value.wanted_bytes, caught.value.free_bytes) == (601, 600)
    assert device.memory().allocated_bytes == 400
    assert device.allocate(600).nbytes == 600


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(DeviceOutOfMemoryError):
        NumpyDevice().allocate(1 << 60)


def test_freeing_a_large_buffer_returns_its_pages_to_the_machine() -> None:
    process, device = psutil.Process(), NumpyDevice()
    before = process.memory_info().rss
    buffer = device.allocate(LARGE)
    device.window(buffer, 0, LARGE)[:] = 1
    held = process.memory_info().rss - before
    device.free(buffer)
    left = process.memory_info().rss - before
    assert held >= LARGE * 0.9
    assert left <= LARGE * 0.1


def test_a_freed_buffer_is_refused_by_every_method() -> None:
    device = NumpyDevice()
    buffer, other = device.allocate(16), device.allocate(16)
    device.free(buffer)
    for use in (
        lambda: device.free(buffer),
        lambda: device.window(buffer, 0, 1),
        lambda: device.copy(buffer, 0, other, 0, 1),
        lambda: device.copy(other, 0, buffer, 0, 1),
        lambda: device.zero(buffer, 0, 1),
        lambda: device.read(buffer, 0, 1),
        lambda: device.block_hashes(buffer, 0, 1),
    ):
        with pytest.raises(ValueError, match="freed"):
            use()
    assert device.memory().allocated_bytes == 16


def test_window_writes_into_the_buffer_itself() -> None:
    device = NumpyDevice()
    buffer = filled(device, bytes(8))
    window = device.window(buffer, 2, 3)
    assert (str(window.dtype), window.shape) == ("uint8", (3,))
    assert window.flags.c_contiguous
    window[:] = 7
    assert bytes(device.read(buffer, 0, 8)) == b"\0\0\7\7\7\0\0\0"


def test_copy_and_zero_touch_only_their_part() -> None:
    device = NumpyDevice()
    source, target = filled(device, bytes(range(8))), filled(device, b"\xff" * 8)
    device.copy(source, 1, target, 4, 3)
    device.zero(target, 0, 2)
    assert bytes(device.read(target, 0, 8)) == b"\0\0\xff\xff\1\2\3\xff"


def test_read_gives_a_view_that_cannot_be_written() -> None:
    device = NumpyDevice()
    view = device.read(filled(device, b"abcd"), 1, 2)
    assert (bytes(view), view.readonly) == (b"bc", True)


def test_block_hashes_are_those_of_the_memory() -> None:
    device = NumpyDevice()
    data = np.random.default_rng(1).bytes(3 * BLOCK_BYTES + 5)
    buffer = filled(device, data)
    part = memoryview(data)[BLOCK_BYTES:]
    assert device.block_hashes(buffer, BLOCK_BYTES, len(part)) == hash_blocks(part)


def test_threads_never_get_more_than_the_limit_and_lose_no_byte() -> None:
    device = NumpyDevice(50 * 1000)

    def work(seed: int) -> int:
        refused = 0
        for _ in range(8):
            buffers = []
            for _ in range(10):
                try:
                    buffers.append(device.allocate(1000))
                except DeviceOutOfMemoryError:
                    refused += 1
                assert device.memory().allocated_bytes <= 50 * 1000
            for buffer in buffers:
                device.free(buffer)
        return refused

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert device.memory().allocated_bytes == 0


def test_a_device_is_chosen_by_its_name() -> None:
    device = open_device("numpy", 123)
    assert (device.name, device.memory().total_bytes) == ("numpy", 123)


@pytest.mark.parametrize("name", ["", "cuda", "Numpy", "tpu:0"])
def test_an_unknown_device_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ValueError, match=repr(name)):
        open_device(name)
