"""What all tests share: tests that need a GPU are skipped visibly where there is none."""

from __future__ import annotations

import ctypes

import pytest


def cuda_device_count() -> int:
    """CUDA devices that the driver shows, 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not cuda_device_count():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, none is here"))
