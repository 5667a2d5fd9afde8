"""A worker whose device changes a byte: after landing (`landed`), or on SIGUSR1 (`committed`)."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from loader_kernels.device import Span
from loader_kernels.numpy_device import NumpyBuffer, NumpyDevice
from loader_service.logs import log_to_stderr
from loader_worker.main import make_settings, parse_arguments, serve


class FaultyDevice(NumpyDevice):
    """Host memory that loses a bit at a chosen moment."""

    def __init__(self, moment: str) -> None:
        super().__init__()
        self._landed = moment == "landed"
        self._largest: NumpyBuffer | None = None
        if moment == "committed":
            signal.signal(signal.SIGUSR1, self._flip_largest)

    def allocate(self, nbytes: int) -> NumpyBuffer:
        buffer = super().allocate(nbytes)
        if self._largest is None or self._largest.nbytes < nbytes:
            self._largest = buffer
        return buffer

    def block_hashes(self, spans: Sequence[Span], uploads: Sequence[object] = ()) -> list[bytes]:
        for buffer, offset, length in spans:
            if self._landed and buffer is self._largest:
                self.window(buffer, offset, length)[length // 2] ^= 1
                self._landed = False
        return super().block_hashes(spans, uploads)

    def _flip_largest(self, number: int, frame: FrameType | None) -> None:
        assert self._largest is not None
        self.window(self._largest, 0, 1)[0] ^= 1


if __name__ == "__main__":
    log_to_stderr("faulty worker")
    settings = make_settings(parse_arguments(sys.argv[2:]))
    asyncio.run(serve(settings, FaultyDevice(sys.argv[1])))
