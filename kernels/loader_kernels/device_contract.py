"""What every Device must do, as tests that an implementation inherits.

A subclass is named `Test...`, overrides `open` and `fill` and runs under pytest. Large buffers are
multiples of 2 MiB, so that a device which rounds counts them as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from loader_kernels.device import (
    STAGING_BYTES,
    Buffer,
    Copy,
    Device,
    DeviceOutOfMemoryError,
    Span,
    Upload,
)
from loader_kernels.digest import BLOCK_BYTES, hash_blocks

__all__ = ["DeviceContract"]

MIB = 1 << 20
LIMIT_BYTES = 16 * MIB
THREADS = 8


@dataclasses.dataclass
class _Foreign:
    """A buffer of no device."""

    nbytes: int = 16


def _random_bytes(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


class DeviceContract:
    """Tests of the Device port."""

    def open(self, limit_bytes: int | None = None) -> Device:
        """Return a fresh device that hands out at most `limit_bytes`."""
        raise NotImplementedError

    def fill(self, window: Any, data: bytes) -> None:
        """Write `data` to a window as a transport would, without the device's own methods."""
        raise NotImplementedError

    def filled(self, device: Device, data: bytes) -> Buffer:
        """Return a buffer that holds `data`."""
        buffer = device.allocate(len(data))
        self.fill(device.window(buffer, 0, len(data)), data)
        return buffer

    @pytest.mark.parametrize("nbytes", [0, 1, 4096, MIB - 1, MIB, MIB + 1, 6 * MIB])
    def test_allocating_and_freeing_are_counted(self, nbytes: int) -> None:
        """With at most 2 MiB of rounding, which the limit counts too."""
        device = self.open(LIMIT_BYTES)
        buffer = device.allocate(nbytes)
        held = device.memory()
        assert buffer.nbytes == nbytes
        assert nbytes <= held.allocated_bytes < nbytes + 2 * MIB
        assert held.free_bytes == LIMIT_BYTES - held.allocated_bytes
        device.free(buffer)
        assert device.memory().allocated_bytes == 0
        assert device.memory().free_bytes == LIMIT_BYTES

    def test_memory_reports_the_limit_as_the_whole_device(self) -> None:
        """Also before anything is allocated."""
        assert self.open(LIMIT_BYTES).memory().total_bytes == LIMIT_BYTES

    def test_memory_without_a_limit_is_the_devices(self) -> None:
        """What is free is part of the whole."""
        memory = self.open().memory()
        assert 0 < memory.free_bytes <= memory.total_bytes

    def test_more_than_the_limit_is_refused_with_both_numbers(self) -> None:
        """A refusal takes nothing; what is left can still be had."""
        device = self.open(LIMIT_BYTES)
        device.allocate(6 * MIB)
        with pytest.raises(DeviceOutOfMemoryError) as caught:
            device.allocate(12 * MIB)
        assert (caught.value.wanted_bytes, caught.value.free_bytes) == (12 * MIB, 10 * MIB)
        assert device.memory().allocated_bytes == 6 * MIB
        assert device.allocate(10 * MIB).nbytes == 10 * MIB

    def test_more_than_the_device_has_is_refused(self) -> None:
        """With what is really free; the device stays usable."""
        device = self.open()
        with pytest.raises(DeviceOutOfMemoryError) as caught:
            device.allocate(1 << 60)
        assert 0 < caught.value.free_bytes < 1 << 60
        assert device.memory().allocated_bytes == 0
        device.free(device.allocate(MIB))

    def test_a_buffer_without_bytes_is_like_any_other(self) -> None:
        """It can be used by every method, and is gone once freed."""
        device = self.open(LIMIT_BYTES)
        empty, other = device.allocate(0), device.allocate(16)
        device.zero(empty, 0, 0)
        device.copy([Copy(empty, 0, other, 16, 0)])
        device.copy([Copy(other, 0, empty, 0, 0)])
        device.window(empty, 0, 0)
        assert bytes(device.read(empty, 0, 0)) == b""
        assert device.block_hashes([Span(empty, 0, 0)]) == [b""]
        device.free(empty)
        with pytest.raises(ValueError, match="freed"):
            device.free(empty)

    def test_freed_and_foreign_buffers_are_refused_by_every_method(self) -> None:
        """And nothing is counted twice."""
        device = self.open()
        freed, other = device.allocate(16), device.allocate(16)
        device.free(freed)
        held = device.memory().allocated_bytes
        for buffer in (freed, _Foreign()):
            for use in (
                device.free,
                lambda bad: device.window(bad, 0, 1),
                lambda bad: device.copy([Copy(bad, 0, other, 0, 1)]),
                lambda bad: device.copy([Copy(other, 0, bad, 0, 1)]),
                lambda bad: device.zero(bad, 0, 1),
                lambda bad: device.read(bad, 0, 1),
                lambda bad: device.block_hashes([Span(bad, 0, 1)]),
            ):
                with pytest.raises(ValueError, match="not one of this device's"):
                    use(buffer)
        assert device.memory().allocated_bytes == held

    @pytest.mark.parametrize(("offset", "length"), [(0, 17), (16, 1), (-1, 1), (17, 0), (4, -1)])
    def test_bytes_outside_the_buffer_are_refused(self, offset: int, length: int) -> None:
        """They may be another tensor's."""
        device = self.open()
        buffer, other = device.allocate(16), device.allocate(32)
        for use in (
            lambda: device.window(buffer, offset, length),
            lambda: device.copy([Copy(buffer, offset, other, 0, length)]),
            lambda: device.copy([Copy(other, 0, buffer, offset, length)]),
            lambda: device.zero(buffer, offset, length),
            lambda: device.read(buffer, offset, length),
            lambda: device.block_hashes([Span(buffer, offset, length)]),
        ):
            with pytest.raises(ValueError, match="outside"):
                use()

    def test_a_window_is_the_buffer_itself(self) -> None:
        """Only the bytes that it was asked for."""
        device = self.open()
        buffer = self.filled(device, bytes(8))
        self.fill(device.window(buffer, 2, 3), b"\7\7\7")
        assert bytes(device.read(buffer, 0, 8)) == b"\0\0\7\7\7\0\0\0"

    def test_copy_and_zero_touch_only_their_part(self) -> None:
        """Also inside one buffer."""
        device = self.open()
        source, target = self.filled(device, bytes(range(8))), self.filled(device, b"\xff" * 8)
        device.copy([Copy(source, 1, target, 4, 3)])
        device.zero(target, 0, 2)
        assert bytes(device.read(target, 0, 8)) == b"\0\0\xff\xff\1\2\3\xff"
        device.copy([Copy(source, 0, source, 6, 2)])
        assert bytes(device.read(source, 0, 8)) == b"\0\1\2\3\4\5\0\1"

    def test_read_gives_bytes_that_cannot_be_written(self) -> None:
        """As a view or as a copy."""
        device = self.open()
        view = device.read(self.filled(device, b"abcd"), 1, 2)
        assert (bytes(view), view.readonly) == (b"bc", True)

    @pytest.mark.parametrize(
        "nbytes", [1, BLOCK_BYTES, BLOCK_BYTES + 1, 4 * MIB, 4 * MIB + 1, 9 * MIB + 5]
    )
    def test_block_hashes_are_those_of_the_memory(self, nbytes: int) -> None:
        """From the second block on, whatever the pieces are that the device hashes by."""
        device = self.open()
        data = _random_bytes(BLOCK_BYTES + nbytes, nbytes)
        buffer = self.filled(device, data)
        expected = hash_blocks(memoryview(data)[BLOCK_BYTES:])
        assert device.block_hashes([Span(buffer, BLOCK_BYTES, nbytes)]) == [expected]
        device.free(buffer)

    def test_what_is_uploaded_is_there_once_it_is_hashed(self) -> None:
        """Though the thread's staging memory is used again at once, and by several threads."""
        device = self.open()
        size = 3 * MIB + 5
        data = [_random_bytes(size, seed) for seed in range(THREADS)]
        buffer = device.allocate(THREADS * size)

        def work(number: int) -> list[object]:
            uploads = []
            for start in range(0, size, MIB):
                part = data[number][start : start + MIB]
                staging = device.staging(len(part))
                staging[:] = part
                half = len(part) // 2
                place = number * size + start
                uploads.append(
                    device.upload(
                        [
                            Upload(half, 0, Span(buffer, place + half, len(part) - half)),
                            Upload(0, 0, Span(buffer, place, half)),
                        ]
                    )
                )
            return uploads

        with ThreadPoolExecutor(THREADS) as threads:
            uploads = [upload for each in threads.map(work, range(THREADS)) for upload in each]
        spans = [Span(buffer, number * size, size) for number in range(THREADS)]
        assert device.block_hashes(spans, uploads) == [
            hash_blocks(memoryview(each)) for each in data
        ]
        device.free(buffer)

    def test_more_staging_memory_than_a_thread_has_is_refused(self) -> None:
        """Writing behind its end would be worse."""
        device = self.open()
        assert len(device.staging(STAGING_BYTES)) == STAGING_BYTES
        with pytest.raises(ValueError, match="staging"):
            device.staging(STAGING_BYTES + 1)

    def test_columns_are_taken_apart_on_the_way(self) -> None:
        """Rows of the staging memory, each divided among buffers."""
        device = self.open()
        rows, widths = 37, (1, 300, 16, 4096)
        matrix = np.frombuffer(_random_bytes(rows * sum(widths)), np.uint8).reshape(rows, -1)
        device.staging(matrix.nbytes)[:] = matrix.reshape(-1).data
        buffers, uploads, column = [], [], 0
        for width in widths:
            buffers.append(device.allocate(rows * width + 1))
            span = Span(buffers[-1], 1, rows * width)
            uploads.append(Upload(column, matrix.shape[1], span, rows))
            column += width
        device.block_hashes([], [device.upload(uploads)])
        column = 0
        for width, buffer in zip(widths, buffers, strict=True):
            expected = matrix[:, column : column + width].tobytes()
            assert bytes(device.read(buffer, 1, rows * width)) == expected
            column += width
            device.free(buffer)

    def test_many_spans_are_hashed_at_once(self) -> None:
        """Of every kind of length that XXH3 treats by itself, at every alignment, empty ones too."""
        device = self.open()
        lengths = [0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 511, 512, 513, 1024, 1025, 16383]
        lengths += [BLOCK_BYTES, BLOCK_BYTES + 1, 0, 3 * BLOCK_BYTES, 7]
        data = _random_bytes(sum(lengths) + len(lengths))
        buffer = self.filled(device, data)
        for shift in (0, 1):
            spans, expected, offset = [], [], 0
            for length in lengths:
                spans.append(Span(buffer, offset, length))
                expected.append(hash_blocks(memoryview(data)[offset : offset + length]))
                offset += length + shift
            assert device.block_hashes(spans) == expected
        device.free(buffer)

    def test_many_copies_are_made_at_once(self) -> None:
        """Between buffers of any alignment, empty ones too."""
        device = self.open()
        lengths = [0, 1, 2, 15, 16, 17, 4096, 65535, 65536, 65537, 0, 200_001]
        data = _random_bytes(sum(lengths))
        source = self.filled(device, data)
        targets = [self.filled(device, bytes(length + 5)) for length in lengths]
        copies, offset = [], 0
        for number, (length, target) in enumerate(zip(lengths, targets, strict=True)):
            copies.append(Copy(source, offset, target, number % 4, length))
            offset += length
        device.copy(copies)
        offset = 0
        for number, (length, target) in enumerate(zip(lengths, targets, strict=True)):
            before, after = bytes(number % 4), bytes(5 - number % 4)
            expected = before + data[offset : offset + length] + after
            assert bytes(device.read(target, 0, length + 5)) == expected
            offset += length
            device.free(target)
        device.free(source)

    def test_threads_never_get_more_than_the_limit_and_lose_no_byte(self) -> None:
        """Half of what they ask for does not fit."""
        device = self.open(LIMIT_BYTES)

        def work(_: int) -> None:
            for _ in range(4):
                buffers = []
                for _ in range(4):
                    with contextlib.suppress(DeviceOutOfMemoryError):
                        buffers.append(device.allocate(MIB))
                    assert device.memory().allocated_bytes <= LIMIT_BYTES
                for buffer in buffers:
                    device.free(buffer)

        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(work, range(THREADS)))
        assert device.memory().allocated_bytes == 0

    def test_threads_work_side_by_side_on_buffers_of_their_own(self) -> None:
        """In threads that have never used the device before."""
        device = self.open()
        size = 5 * MIB + 3
        sent = [_random_bytes(size, seed) for seed in range(THREADS)]
        buffers = [self.filled(device, data) for data in sent]

        def work(number: int) -> None:
            copy = device.allocate(size)
            device.zero(copy, 0, size)
            assert not any(bytes(device.read(copy, 0, 1000)))
            device.copy([Copy(buffers[number], 0, copy, 0, size)])
            assert bytes(device.read(copy, 0, size)) == sent[number]
            assert device.block_hashes([Span(copy, 0, size)]) == [
                hash_blocks(memoryview(sent[number]))
            ]
            device.free(copy)

        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(work, range(THREADS)))
        for buffer in buffers:
            device.free(buffer)
        assert device.memory().allocated_bytes == 0
