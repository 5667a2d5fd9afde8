"""The device contract on a CUDA device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loader_kernels.cupy_device import CupyDevice
from loader_kernels.device import DeviceOutOfMemoryError
from tests.device_contract import LARGE, DeviceContract

pytestmark = pytest.mark.gpu


class TestCupyDevice(DeviceContract):
    @pytest.fixture
    def device(self) -> CupyDevice:
        return CupyDevice(0)

    def fill(self, window: Any, data: bytes) -> None:
        import cupy

        cupy.asarray(window)[:] = cupy.asarray(np.frombuffer(data, np.uint8))
        cupy.cuda.runtime.deviceSynchronize()

    def test_freed_memory_goes_back_to_the_card(self, device: CupyDevice) -> None:
        before = device.memory().free_bytes
        buffers = [device.allocate(LARGE) for _ in range(8)]
        assert before - device.memory().free_bytes >= 8 * LARGE
        for buffer in buffers:
            device.free(buffer)
        assert device.memory().free_bytes == before

    def test_the_limit_is_kept(self) -> None:
        device = CupyDevice(0, limit_bytes=LARGE)
        assert device.memory().total_bytes == LARGE
        buffer = device.allocate(LARGE - 1024)
        with pytest.raises(DeviceOutOfMemoryError):
            device.allocate(2048)
        device.free(buffer)

    def test_windows_lie_where_cuda_finds_them(self, device: CupyDevice) -> None:
        buffer = device.allocate(100)
        interface = device.window(buffer, 10, 20).__cuda_array_interface__
        assert interface["shape"] == (20,)
        assert interface["data"][0] == (buffer.pointer or 0) + 10
        device.free(buffer)
