"""Choosing a device by its name on the command line."""

from __future__ import annotations

import re

from loader_kernels.cupy_device import CupyDevice
from loader_kernels.device import Device
from loader_kernels.numpy_device import NumpyDevice

__all__ = ["open_device"]

_CUDA = re.compile(r"cuda(?::(\d{1,3}))?", re.ASCII)


def open_device(name: str, limit_bytes: int | None = None) -> Device:
    """Return the device called `name`.

    Args:
        name: `numpy` for host memory, `cuda:N` for CUDA device N, `cuda` for the first.
        limit_bytes: most bytes that the device may hand out; None leaves it to the machine.

    Raises:
        ValueError: no such device here; the text says what to do.
    """
    if name == "numpy":
        return NumpyDevice(limit_bytes)
    if cuda := _CUDA.fullmatch(name):
        return CupyDevice(int(cuda[1] or 0), limit_bytes)
    raise ValueError(f"no device {name!r}; choose `numpy` or `cuda:N`")
