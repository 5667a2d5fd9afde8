"""Times loads from the page cache to a GPU beside the feed and the link that bound them.

    python tests/gpu/bench_load.py                      # Llama-3-8B shapes, 16 GB, tp=1 and tp=2

Coordinator and workers are processes, digests are on. The rate of a load is its bytes over the time from
the first read to the last slice verified. The feed is what anybody could do in Python at best: 16 threads
that `preadv` 4 MiB each into pinned memory and have the GPU fetch them; the link is one pinned copy.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from loader_service.v1 import types_pb2  # noqa: E402
from tests.bench.llama_checkpoint import LLAMA_8B, write_checkpoint  # noqa: E402
from tests.cluster import Cluster, cluster  # noqa: E402

MIB = 1 << 20
FEED_THREADS, FEED_BYTES = 16, 4 * MIB
LINK_BYTES = 1 << 30


def main() -> int:
    """Write the checkpoint, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=LLAMA_8B.layers)
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda:0", help="cuda:0, or numpy for a rehearsal")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "bench-load")
    parser.add_argument("--logs", type=Path, help="where the processes' logs are kept")
    options = parser.parse_args()
    checkpoint = options.folder / f"llama-3-8b-{options.layers}"
    write_checkpoint(checkpoint, LLAMA_8B._replace(layers=options.layers))
    logs = options.logs or options.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    rows = []
    if options.device.startswith("cuda"):
        rows += [("link, pinned host to device", link_rates(options.rounds), "")]
        rows += [("feed, preadv 16 x 4 MiB", feed_rates(checkpoint, options.rounds), "")]
    for tp in options.tp:
        with cluster(options.folder, logs, 0) as running:
            for rank in range(tp):
                running.start_worker(f"w{rank}", f"--device={options.device}")
            running.wait_for_workers(tp)
            loads = [load(running, checkpoint, tp) for _ in range(options.rounds + 1)]
        rows.append((f"load, tp={tp}, first", *summary(loads[:1])))
        rows.append((f"load, tp={tp}, repeated", *summary(loads[1:])))
    print(
        f"\n{dt.datetime.now(dt.UTC).date()}, {device_text(options.device)}, kernel {platform.release()}"
    )
    print("| what | GB/s, median | min - max | note |\n|---|---|---|---|")
    for what, rates, note in rows:
        spread = f"{min(rates):.1f} - {max(rates):.1f}" if len(rates) > 1 else ""
        print(f"| {what} | {statistics.median(rates):.1f} | {spread} | {note} |")
    return 0


def load(running: Cluster, checkpoint: Path, tp: int) -> types_pb2.Load:
    """Load and unload once."""
    done = running.load(checkpoint, tp)
    assert done.state == types_pb2.LOAD_STATE_SUCCEEDED, done.failure
    running.unload(done.load_id)
    running.wait_for_workers(tp)
    return done


def summary(loads: list[types_pb2.Load]) -> tuple[list[float], str]:
    """Return the rates of loads, and what else there is to say of them."""
    seconds = [each.transfer_duration.ToNanoseconds() / 1e9 for each in loads]
    more = statistics.median(
        each.total_duration.ToNanoseconds() / 1e9 - second
        for each, second in zip(loads, seconds, strict=True)
    )
    lanes = loads[0].ranks[0].transport
    note = f"{statistics.median(seconds):.2f} s and {more:.2f} s around it; {lanes}"
    return [loads[0].wire_bytes / second / 1e9 for second in seconds], note


def link_rates(rounds: int) -> list[float]:
    """Copy pinned memory to the device."""
    import cupy

    runtime = cupy.cuda.runtime
    pinned = cupy.cuda.alloc_pinned_memory(LINK_BYTES)
    target = cupy.empty(LINK_BYTES, cupy.uint8)
    rates = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        runtime.memcpy(target.data.ptr, pinned.ptr, LINK_BYTES, runtime.memcpyHostToDevice)
        rates.append(LINK_BYTES / (time.perf_counter() - begin) / 1e9)
    return rates[1:]


def feed_rates(checkpoint: Path, rounds: int) -> list[float]:
    """Read the checkpoint's files through pinned memory to the device, unverified and uncut."""
    import cupy

    runtime = cupy.cuda.runtime
    paths = sorted(checkpoint.glob("*.safetensors"))
    files = [os.open(path, os.O_RDONLY) for path in paths]
    pieces = [
        (file, offset, min(FEED_BYTES, path.stat().st_size - offset))
        for file, path in zip(files, paths, strict=True)
        for offset in range(0, path.stat().st_size, FEED_BYTES)
    ]
    target = cupy.empty(FEED_THREADS * FEED_BYTES, cupy.uint8)
    lanes = [_Lane(cupy, target.data.ptr + n * FEED_BYTES) for n in range(FEED_THREADS)]

    def work(number: int) -> None:
        runtime.setDevice(0)
        lane = lanes[number]
        for turn, (file, offset, length) in enumerate(pieces[number::FEED_THREADS]):
            memory, event = lane.memories[turn % 2]
            event.synchronize()
            os.preadv(file, [memory.data[:length]], offset)
            address = memory.ctypes.data
            kind = runtime.memcpyHostToDevice
            runtime.memcpyAsync(lane.target, address, length, kind, lane.stream.ptr)
            event.record(lane.stream)
        lane.stream.synchronize()

    rates = []
    total = sum(length for _, _, length in pieces)
    with ThreadPoolExecutor(FEED_THREADS) as threads:
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            list(threads.map(work, range(FEED_THREADS)))
            rates.append(total / (time.perf_counter() - begin) / 1e9)
    for file in files:
        os.close(file)
    return rates[1:]


class _Lane:
    """What one feeding thread uses."""

    def __init__(self, cupy: Any, target: int) -> None:
        self.target = target
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.memories = []
        for _ in range(2):
            pinned = cupy.cuda.alloc_pinned_memory(FEED_BYTES)
            event = cupy.cuda.Event(disable_timing=True)
            self.memories.append((np.frombuffer(pinned, np.uint8, FEED_BYTES), event))


def device_text(device: str) -> str:
    """Return the name of the card."""
    if not device.startswith("cuda"):
        return device
    import cupy

    return str(cupy.cuda.runtime.getDeviceProperties(0)["name"].decode())


if __name__ == "__main__":
    sys.exit(main())
