"""What only the NumPy device does: exact counts, views, pages that really go back to the machine."""

from __future__ import annotations

import psutil
import pytest

from loader_kernels.numpy_device import NumpyDevice

LARGE = 64 << 20


@pytest.mark.parametrize("nbytes", [0, 1, 4097, (1 << 20) + 1])
def test_bytes_are_counted_as_they_are(nbytes: int) -> None:
    device = NumpyDevice()
    device.allocate(nbytes)
    assert device.memory().allocated_bytes == nbytes


def test_memory_without_a_limit_is_within_the_machines() -> None:
    assert NumpyDevice().memory().total_bytes <= psutil.virtual_memory().total


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


def test_read_is_a_view() -> None:
    device = NumpyDevice()
    buffer = device.allocate(4)
    view = device.read(buffer, 0, 4)
    device.window(buffer, 0, 4)[:] = 7
    assert bytes(view) == b"\7\7\7\7"
