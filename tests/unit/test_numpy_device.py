"""The NumPy device: accounting, limits, and memory that really goes back to the machine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from loader_kernels.device import DeviceOutOfMemoryError
from loader_kernels.devices import open_device
from loader_kernels.numpy_device import NumpyDevice
from tests.device_contract import LARGE, DeviceContract


class TestNumpyDevice(DeviceContract):
    @pytest.fixture
    def device(self) -> NumpyDevice:
        return NumpyDevice()


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


def test_a_cuda_device_without_cupy_or_driver_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="device 'cuda:999'"):
        open_device("cuda:999")


@pytest.mark.parametrize("name", ["", "cuda:", "cuda:-1", "cuda:x", "Numpy", "tpu:0"])
def test_an_unknown_device_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ValueError, match=repr(name)):
        open_device(name)
