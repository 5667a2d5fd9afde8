"""The CuPy device without a GPU: refusals that say what to do, and a driver that says no."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from loader_kernels.cupy_device import CupyDevice
from loader_kernels.devices import open_device
from tests.fake_cupy import DEVICES, CUDARuntimeError, fake_cupy


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = fake_cupy()
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def test_the_numpy_device_is_chosen_by_its_name() -> None:
    device = open_device("numpy", 123)
    assert (device.name, device.memory().total_bytes) == ("numpy", 123)


@pytest.mark.parametrize(("name", "opened"), [("cuda", "cuda:0"), ("cuda:1", "cuda:1")])
def test_a_cuda_device_is_chosen_by_its_number(
    name: str, opened: str, cupy: SimpleNamespace
) -> None:
    device = open_device(name, 1 << 20)
    assert (device.name, device.memory().total_bytes) == (opened, 1 << 20)
    assert cupy.cuda.runtime.current.index == int(opened[-1])


@pytest.mark.parametrize("name", ["", "Numpy", "tpu:0", "cuda:", "cuda:-1", "cuda:x", "cuda:0 "])
def test_an_unknown_device_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ValueError, match=repr(name)):
        open_device(name)


def test_without_cupy_the_refusal_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ValueError, match=r"cuda:0 needs CuPy.*loader-service\[cuda13\]"):
        open_device("cuda:0")


def test_without_a_driver_the_refusal_says_what_to_look_at(cupy: SimpleNamespace) -> None:
    cupy.cuda.runtime.failing = CUDARuntimeError(35, "cudaErrorInsufficientDriver")
    with pytest.raises(ValueError, match=r"cuda:0 cannot be used; `nvidia-smi`.*Insufficient"):
        open_device("cuda:0")


def test_a_number_beyond_the_devices_is_refused(cupy: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match=f"no device 'cuda:{DEVICES}'; CUDA shows {DEVICES}"):
        open_device(f"cuda:{DEVICES}")


def test_a_buffer_of_another_cuda_device_is_refused(cupy: SimpleNamespace) -> None:
    buffer = CupyDevice(0).allocate(16)
    with pytest.raises(ValueError, match="not one of this device's"):
        CupyDevice(1).free(buffer)


@pytest.mark.parametrize(
    ("nbytes", "counted"),
    [
        (0, 0),
        (1, 512),
        (513, 1024),
        (1 << 20, 1 << 20),
        ((1 << 20) + 1, 2 << 20),
        (5 << 20, 6 << 20),
    ],
)
def test_buffers_count_as_cuda_takes_them(nbytes: int, counted: int, cupy: SimpleNamespace) -> None:
    device = CupyDevice(0)
    device.allocate(nbytes)
    assert device.memory().allocated_bytes == counted


def test_every_buffer_is_an_allocation_of_its_own_and_ends_when_freed(
    cupy: SimpleNamespace,
) -> None:
    device = CupyDevice(0)
    own = set(cupy.cuda.runtime.allocations)
    buffers = [device.allocate(nbytes) for nbytes in (0, 1, 1, 1 << 20)]
    assert len(cupy.cuda.runtime.allocations.keys() - own) == 3
    for buffer in buffers:
        device.free(buffer)
    assert set(cupy.cuda.runtime.allocations) == own


def test_a_fault_that_is_no_lack_of_memory_comes_through(cupy: SimpleNamespace) -> None:
    device = CupyDevice(0)
    cupy.cuda.runtime.failing = CUDARuntimeError(700, "cudaErrorIllegalAddress")
    with pytest.raises(CUDARuntimeError, match="IllegalAddress"):
        device.allocate(1)
    assert device.memory().allocated_bytes == 0


def test_memory_that_the_driver_does_not_take_back_stays_counted(cupy: SimpleNamespace) -> None:
    device = CupyDevice(0)
    buffer = device.allocate(512)
    cupy.cuda.runtime.failing = CUDARuntimeError(700, "cudaErrorIllegalAddress")
    with pytest.raises(CUDARuntimeError):
        device.free(buffer)
    assert device.memory().allocated_bytes == 512
    with pytest.raises(ValueError, match="freed"):
        device.free(buffer)
