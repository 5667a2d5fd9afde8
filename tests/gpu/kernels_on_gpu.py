"""Checks the CUDA kernels on a GPU and measures them beside plain copies on the device.

python tests/gpu/kernels_on_gpu.py
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from loader_kernels.cupy_device import CupyDevice  # noqa: E402
from loader_kernels.device import Copy, Span  # noqa: E402
from loader_kernels.digest import hash_blocks  # noqa: E402

MIB = 1 << 20
ROUNDS = 20


def seconds(work: Callable[[], object]) -> float:
    """Return the median time of `work`, which waits for the device itself."""
    work()
    taken = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def main() -> int:
    """Check, measure and print a table; 1 when a hash or a copy is wrong."""
    import cupy

    device = CupyDevice(0)
    print("| what | spans | MiB | GB/s |\n|---|---|---|---|")
    wrong = 0
    for mib, parts in ((4, 1), (64, 1), (64, 22), (64, 4096), (1024, 1), (1024, 64)):
        total = mib * MIB
        source, target = device.allocate(total), device.allocate(total)
        view = cupy.asarray(device.window(source, 0, total))
        view[:] = cupy.random.randint(0, 256, total, dtype=cupy.uint8)
        length = total // parts
        spans = [Span(source, number * length, length) for number in range(parts)]
        copies = [Copy(source, at, target, at, size) for _, at, size in spans]
        hashed = seconds(functools.partial(device.block_hashes, spans))
        copied = seconds(functools.partial(device.copy, copies))
        whole = memoryview(cupy.asnumpy(view))
        expected = [hash_blocks(whole[at : at + size]) for _, at, size in spans]
        same = np.array_equal(device.read(target, 0, parts * length), whole[: parts * length])
        wrong += device.block_hashes(spans) != expected or not same
        print(f"| digest | {parts} | {mib} | {total / hashed / 1e9:.0f} |")
        print(f"| copy | {parts} | {mib} | {total / copied / 1e9:.0f} |")
        other = cupy.empty(total, cupy.uint8)

        def plain(other: cupy.ndarray = other, view: cupy.ndarray = view) -> None:
            other[:] = view
            cupy.cuda.Stream.null.synchronize()

        print(f"| plain copy of CuPy | 1 | {mib} | {total / seconds(plain) / 1e9:.0f} |")
        device.free(source)
        device.free(target)
    print(f"{wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
