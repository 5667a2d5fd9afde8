"""The device contract over host memory, over CuPy without a GPU, and over CuPy on one."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loader_kernels.cupy_device import CupyDevice
from loader_kernels.device import Device
from loader_kernels.device_contract import MIB, DeviceContract
from loader_kernels.numpy_device import NumpyDevice
from tests.fake_cupy import fake_cupy


class TestNumpyDevice(DeviceContract):
    def open(self, limit_bytes: int | None = None) -> Device:
        return NumpyDevice(limit_bytes)

    def fill(self, window: Any, data: bytes) -> None:
        assert (str(window.dtype), window.shape) == ("uint8", (len(data),))
        assert window.flags.c_contiguous
        window[:] = np.frombuffer(data, np.uint8)


class TestCupyDeviceWithoutGpu(DeviceContract):
    @pytest.fixture(autouse=True)
    def cupy(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        module = fake_cupy()
        monkeypatch.setitem(sys.modules, "cupy", module)
        return module

    def open(self, limit_bytes: int | None = None) -> Device:
        return CupyDevice(0, limit_bytes)

    def fill(self, window: Any, data: bytes) -> None:
        interface = window.__cuda_array_interface__
        assert (interface["typestr"], interface["shape"]) == ("|u1", (len(data),))
        address, read_only = interface["data"]
        assert not read_only
        ctypes.memmove(address, data, len(data))


@pytest.mark.gpu
class TestCupyDevice(DeviceContract):
    def open(self, limit_bytes: int | None = None) -> Device:
        return CupyDevice(0, limit_bytes)

    def fill(self, window: Any, data: bytes) -> None:
        import cupy

        array = cupy.asarray(window)
        assert (str(array.dtype), array.shape) == ("uint8", (len(data),))
        array.set(np.frombuffer(data, np.uint8))
        cupy.cuda.Device().synchronize()

    @pytest.mark.parametrize(
        ("nbytes", "count"),
        [(1, 8192), (513, 8192), (MIB // 2, 64), (MIB - 512, 64), (MIB, 32), (3 * MIB, 32)],
    )
    def test_cuda_takes_what_is_counted(self, nbytes: int, count: int) -> None:
        device = self.open()
        before = device.memory()
        buffers = [device.allocate(nbytes) for _ in range(count)]
        held = device.memory()
        assert before.free_bytes - held.free_bytes == pytest.approx(
            held.allocated_bytes, abs=4 * MIB
        )
        for buffer in buffers:
            device.free(buffer)
        # CUDA keeps at most one of the blocks that small buffers share.
        assert before.free_bytes - device.memory().free_bytes <= 2 * MIB
