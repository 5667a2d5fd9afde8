"""Choosing a device by its name on the command line."""

from __future__ import annotations

from loader_kernels.device import Device
from loader_kernels.numpy_device import NumpyDevice

__all__ = ["open_device"]


def open_device(name: str, limit_bytes: int | None = None) -> Device:
    """Return the device called `name`.

    Args:
        name: `numpy`; CUDA devices (`cuda:0`) are not built yet.
        limit_bytes: most bytes that the device may hand out; None leaves it to the machine.

    Raises:
        ValueError: no such device.
    """
    if name == "numpy":
        return NumpyDevice(limit_bytes)
    raise ValueError(f"no device {name!r}; this version has `numpy`")
