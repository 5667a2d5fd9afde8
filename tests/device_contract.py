"""What every Device must do, as tests that a device inherits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from loader_kernels.device import Buffer, Device, DeviceOutOfMemoryError
from loader_kernels.digest import BLOCK_BYTES, hash_blocks

LARGE = 64 << 20


class DeviceContract:
    """Override the fixture `device`, and `fill` where a window is no NumPy array."""

    @pytest.fixture
    def device(self) -> Device:
        """Return the device under test, with nothing allocated."""
        raise NotImplementedError

    def fill(self, window: Any, data: bytes) -> None:
        """Write `data` through a window."""
        window[:] = np.frombuffer(data, np.uint8)

    def filled(self, device: Device, data: bytes) -> Buffer:
        """Return a buffer that holds `data`."""
        buffer = device.allocate(len(data))
        self.fill(device.window(buffer, 0, len(data)), data)
        return buffer

    @pytest.mark.parametrize("nbytes", [0, 1, 4096, LARGE])
    def test_a_buffer_has_its_size_and_goes_back_whole(self, device: Device, nbytes: int) -> None:
        buffer = device.allocate(nbytes)
        assert buffer.nbytes == nbytes
        assert nbytes <= device.memory().allocated_bytes < nbytes + 4096
        device.free(buffer)
        assert device.memory().allocated_bytes == 0

    def test_free_memory_is_within_the_whole(self, device: Device) -> None:
        memory = device.memory()
        assert 0 < memory.free_bytes <= memory.total_bytes

    def test_more_than_the_device_has_is_refused(self, device: Device) -> None:
        with pytest.raises(DeviceOutOfMemoryError) as caught:
            device.allocate(1 << 50)
        assert caught.value.wanted_bytes == 1 << 50
        assert 0 < caught.value.free_bytes < 1 << 50
        assert device.memory().allocated_bytes == 0

    def test_a_freed_buffer_is_refused_by_every_method(self, device: Device) -> None:
        buffer, other = device.allocate(16), device.allocate(16)
        held = device.memory().allocated_bytes
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
        assert device.memory().allocated_bytes == held // 2
        device.free(other)

    def test_a_window_writes_into_the_buffer_itself(self, device: Device) -> None:
        buffer = self.filled(device, bytes(8))
        self.fill(device.window(buffer, 2, 3), b"\7\7\7")
        assert bytes(device.read(buffer, 0, 8)) == b"\0\0\7\7\7\0\0\0"
        device.free(buffer)

    def test_copy_and_zero_touch_only_their_part(self, device: Device) -> None:
        source, target = self.filled(device, bytes(range(8))), self.filled(device, b"\xff" * 8)
        device.copy(source, 1, target, 4, 3)
        device.zero(target, 0, 2)
        device.zero(target, 3, 0)
        assert bytes(device.read(target, 0, 8)) == b"\0\0\xff\xff\1\2\3\xff"
        device.free(source)
        device.free(target)

    def test_what_is_read_cannot_be_written(self, device: Device) -> None:
        buffer = self.filled(device, b"abcd")
        part = device.read(buffer, 1, 2)
        assert (bytes(part), part.readonly) == (b"bc", True)
        device.free(buffer)

    @pytest.mark.parametrize("blocks", [0, 3, 600])
    def test_block_hashes_are_those_of_the_memory(self, device: Device, blocks: int) -> None:
        data = np.random.default_rng(1).bytes(blocks * BLOCK_BYTES + 5)
        buffer = self.filled(device, data)
        offset = BLOCK_BYTES if blocks else 0
        part = memoryview(data)[offset:]
        assert device.block_hashes(buffer, offset, len(part)) == hash_blocks(part)
        device.free(buffer)

    def test_threads_work_on_their_own_buffers(self, device: Device) -> None:
        def work(seed: int) -> bool:
            data = np.random.default_rng(seed).bytes(3 * BLOCK_BYTES)
            buffer, other = self.filled(device, data), device.allocate(len(data))
            device.copy(buffer, 0, other, 0, len(data))
            same = device.block_hashes(other, 0, len(data)) == hash_blocks(memoryview(data))
            device.free(buffer)
            device.free(other)
            return same

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(work, range(16)))
        assert device.memory().allocated_bytes == 0
