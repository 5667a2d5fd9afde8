"""The sources of the CUDA kernels, built for the CPU and compared with what they are to compute."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loader_kernels
from loader_kernels.digest import BLOCK_BYTES, hash_blocks

SOURCES = Path(loader_kernels.__file__).with_name("cuda")
SHIM = Path(__file__).resolve().parents[1] / "cuda_on_cpu.h"

HASH_BLOCKS = """
extern "C" void run(const Span* spans, u32 count, u64 blocks, u64* hashes) {
    launch(blocks, [=] { hash_blocks(spans, count, blocks, hashes); });
}
"""
COPY_SPANS = """
extern "C" void run(const Copy* copies, u32 count, u64 tiles) {
    launch(tiles, [=] { copy_spans(copies, count); });
}
"""


def build(folder: Path, source: str, entry: str) -> Any:
    """Build a kernel for the CPU and return its entry."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    program = folder / "kernel.cpp"
    text = f'#include "{SHIM}"\n{(SOURCES / source).read_text(encoding="ascii")}\n{entry}'
    program.write_text(text, encoding="ascii")
    library = folder / "kernel.so"
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*command, "-Wno-unknown-pragmas", "-o", library, program], check=True)
    return ctypes.CDLL(str(library)).run


class Memory:
    """Bytes at an address with a chosen distance from a multiple of 16."""

    def __init__(self, data: bytes, shift: int) -> None:
        self._raw = ctypes.create_string_buffer(len(data) + 32)
        self.address = -(-ctypes.addressof(self._raw) // 16) * 16 + shift
        self.length = len(data)
        ctypes.memmove(self.address, data, len(data))

    def __bytes__(self) -> bytes:
        return ctypes.string_at(self.address, self.length)


def call(run: Any, rows: Sequence[Sequence[int]], total: int, *more: int) -> None:
    table = np.array(rows, np.uint64)
    run(
        ctypes.c_void_p(table.ctypes.data),
        ctypes.c_uint32(len(rows)),
        ctypes.c_uint64(total),
        *map(ctypes.c_void_p, more),
    )


def test_block_hashes_are_those_of_xxh3(tmp_path: Path) -> None:
    """Of every length up to 260 and around the limits of rounds and blocks, at every alignment."""
    run = build(tmp_path, "digest.cu", HASH_BLOCKS)
    lengths = [*range(1, 261), 511, 512, 513, 1023, 1024, 1025, 1088, 1089, 2048, 5000]
    lengths += [BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 300]
    rng = np.random.default_rng(0)
    for shift in (0, 1, 2, 4, 8):
        spans = [Memory(rng.bytes(length), shift) for length in lengths]
        expected = [hash_blocks(memoryview(bytes(span))) for span in spans]
        rows, blocks = [], 0
        for span, hashes in zip(spans, expected, strict=True):
            rows.append((span.address, span.length, blocks))
            blocks += len(hashes) // 8
        found = np.zeros(blocks, "<u8")
        call(run, rows, blocks, found.ctypes.data)
        assert found.tobytes() == b"".join(expected)


def test_copies_are_whole_and_touch_nothing_else(tmp_path: Path) -> None:
    run = build(tmp_path, "move.cu", COPY_SPANS)
    rng = np.random.default_rng(0)
    lengths = [1, 2, 15, 16, 17, 1000, 65535, 65536, 65537, 200_003]
    for source_shift, target_shift in ((0, 0), (8, 0), (4, 12), (2, 6), (1, 0), (3, 5)):
        sources = [Memory(rng.bytes(length), source_shift) for length in lengths]
        targets = [Memory(bytes(length + 2), target_shift) for length in lengths]
        rows, tiles = [], 0
        for source, target in zip(sources, targets, strict=True):
            rows.append((source.address, target.address, source.length, tiles))
            tiles += -(-source.length // 65536)
        call(run, rows, tiles)
        for source, target in zip(sources, targets, strict=True):
            assert bytes(target) == bytes(source) + bytes(2)
