"""Measures a load on this machine beside plain copies and the safetensors library.

A Llama-shaped BF16 checkpoint of about 2 GiB lies in the page cache. Five rounds, in each of which all
contenders run once, one after another; medians are printed, and ratios to single-thread memcpy into
freshly allocated memory, because absolute rates of shared machines drift.

    make bench
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.llama_checkpoint import LLAMA_1B, write_checkpoint  # noqa: E402
from tests.bench.perftest import perftest  # noqa: E402
from tests.cluster import Cluster, cluster  # noqa: E402

TP = 2
GIB = 1 << 30
PERFTEST_BYTES = 32 << 20
FREE_BYTES = 4 * GIB


@dataclasses.dataclass
class Result:
    """Figures of one contender over the rounds; byte counts are payload bytes."""

    name: str
    copies: str
    seconds: list[float] = dataclasses.field(default_factory=list)
    cpu_seconds: list[float] = dataclasses.field(default_factory=list)
    host_bytes: list[int] = dataclasses.field(default_factory=list)
    nbytes: int = 0

    def rate(self) -> float:
        """Median GB/s."""
        return self.nbytes / statistics.median(self.seconds) / 1e9


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "loader-bench")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    folder = options.folder / "llama-2g"
    write_checkpoint(folder)
    files = sorted(folder.glob("*.safetensors"))
    nbytes = sum(file.stat().st_size for file in files)
    with tempfile.TemporaryDirectory() as logs, cluster(options.folder, Path(logs), TP) as running:
        ours = _Ours(running, folder)
        contenders: list[tuple[Result, Callable[[Result], None]]] = [
            (Result("memcpy, 1 thread, fresh memory", "1"), _memcpy),
            (Result("ucx_perftest tag, all transports", "1"), _perftest),
            (Result("safetensors get_slice + clone", "2"), lambda r: _safetensors(r, files)),
            (Result("loader-service, digests on", "2 (column: 3)"), ours.run),
        ]
        for number in range(options.rounds + 1):
            for file in files:
                _warm(file)
            for result, run in contenders:
                result.nbytes = result.nbytes or nbytes
                _touch_free_memory()
                run(result)
                if number == 0:  # a round to warm up
                    result.seconds.clear()
                    result.cpu_seconds.clear()
                    result.host_bytes.clear()
            print(f"round {number} of {options.rounds}", file=sys.stderr)
        _print_results([result for result, _ in contenders])
        ours.print_where_time_goes()


def _warm(file: Path) -> None:
    """Bring a file into the page cache."""
    buffer = bytearray(16 << 20)
    with file.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass


def _touch_free_memory() -> None:
    """Use and give back more memory than any contender needs.

    A virtual machine hands memory that was free for seconds back to its host, and gets it again page
    by page: whoever comes first would pay for it. Now nobody does.
    """
    memory = np.ones(FREE_BYTES, np.uint8)
    del memory


def _memcpy(result: Result) -> None:
    source = np.ones(GIB, np.uint8)
    start, cpu = time.perf_counter(), time.process_time()
    target = np.empty(GIB, np.uint8)
    np.copyto(target, source)
    result.seconds.append(time.perf_counter() - start)
    result.cpu_seconds.append(time.process_time() - cpu)
    result.host_bytes.append(0)
    result.nbytes = GIB


def _perftest(result: Result) -> None:
    """Take the rate that UCX's own benchmark prints."""
    result.nbytes = GIB
    result.seconds.append(GIB / 1e9 / perftest(PERFTEST_BYTES))
    result.host_bytes.append(0)


def _safetensors(result: Result, files: list[Path]) -> None:
    """Let the library cut the checkpoint, one process a rank, all ranks at the same time."""
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(TP + 1)
    usage = context.Queue()
    ranks = [
        context.Process(target=_safetensors_rank, args=(rank, files, ready, usage))
        for rank in range(TP)
    ]
    for rank in ranks:
        rank.start()
    ready.wait()
    start = time.perf_counter()
    ready.wait()
    result.seconds.append(time.perf_counter() - start)
    figures = [usage.get() for _ in ranks]
    for rank in ranks:
        rank.join()
    result.cpu_seconds.append(sum(cpu for cpu, _ in figures))
    result.host_bytes.append(sum(extra for _, extra in figures))


def _safetensors_rank(
    rank: int, files: list[Path], ready: Barrier, usage: multiprocessing.Queue[tuple[float, int]]
) -> None:
    import torch
    from safetensors import safe_open

    torch.set_num_threads(1)
    ready.wait()
    cpu = time.process_time()
    base = _anonymous_peak()
    held: list[torch.Tensor] = []
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - the library's object is no mapping
                part = opened.get_slice(name)
                held.append(_cut(name, part, rank).contiguous().clone())
    ready.wait()
    payload = sum(tensor.nbytes for tensor in held)
    usage.put((time.process_time() - cpu, max(0, _anonymous_peak() - base - payload)))


def _cut(name: str, part: Any, rank: int) -> Any:
    shape = part.get_shape()
    if len(shape) == 1:
        return part[:]
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        size = shape[1] // TP
        return part[:, rank * size : (rank + 1) * size]
    size = shape[0] // TP
    return part[rank * size : (rank + 1) * size]


def _anonymous_peak(process_id: int | str = "self") -> int:
    """Return the anonymous memory of a process in bytes; mapped files do not count."""
    status = Path(f"/proc/{process_id}/status").read_text(encoding="ascii")
    (kilobytes,) = re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kilobytes) * 1024


class _Ours:
    """Loads over the real service, clock from request to committed."""

    def __init__(self, running: Cluster, folder: Path) -> None:
        self._running = running
        self._folder = folder
        self._streamer = running.streamer()
        self._workers = [psutil.Process(worker.pid) for worker in running.workers.values()]
        assert running.coordinator is not None
        self._coordinator = psutil.Process(running.coordinator.pid)
        self._base = {p.pid: _anonymous_peak(p.pid) for p in (self._streamer, *self._workers)}
        self._shares: list[dict[str, float]] = []

    def run(self, result: Result) -> None:
        before = self._cpu()
        start = time.perf_counter()
        load = self._running.load(self._folder, TP)
        result.seconds.append(load.total_duration.ToNanoseconds() / 1e9)
        wall = time.perf_counter() - start
        after = self._cpu()
        shares = {key: after[key] - before[key] for key in after}
        shares["request to committed"] = result.seconds[-1]
        shares["of it transfer"] = load.transfer_duration.ToNanoseconds() / 1e9
        shares["seen by the client"] = wall
        self._shares.append(shares)
        result.cpu_seconds.append(sum(after.values()) - sum(before.values()))
        extra = _anonymous_peak(self._streamer.pid) - self._base[self._streamer.pid]
        for worker, rank in zip(self._workers, load.ranks, strict=True):
            held = _anonymous_peak(worker.pid) - self._base[worker.pid]
            extra += max(0, held - rank.resident_bytes)
        result.host_bytes.append(extra)
        result.nbytes = load.wire_bytes
        self._running.unload(load.load_id)

    def print_where_time_goes(self) -> None:
        print("\nwhere the time of a load goes (medians, seconds)")
        for key in self._shares[0]:
            values = [shares[key] for shares in self._shares[1:]]
            print(f"  {key:<28} {statistics.median(values):6.2f}")

    def _cpu(self) -> dict[str, float]:
        streamer = self._streamer.cpu_times()
        workers = [worker.cpu_times() for worker in self._workers]
        coordinator = self._coordinator.cpu_times()
        return {
            "CPU streamer, user": streamer.user,
            "CPU streamer, kernel": streamer.system,
            "CPU workers, user": sum(times.user for times in workers),
            "CPU workers, kernel": sum(times.system for times in workers),
            "CPU coordinator": coordinator.user + coordinator.system,
        }


def _print_results(results: list[Result]) -> None:
    base = results[0].rate()
    print(
        f"{'what':<34} {'GB/s':>6} {'min':>6} {'max':>6} {'x memcpy':>9} {'copies/byte':>14} "
        f"{'CPU s/GiB':>10} {'extra host':>11}"
    )
    for result in results:
        rates = sorted(result.nbytes / seconds / 1e9 for seconds in result.seconds)
        cpu = (
            f"{statistics.median(result.cpu_seconds) / (result.nbytes / GIB):.2f}"
            if result.cpu_seconds
            else "-"
        )
        host = max(result.host_bytes) / 2**20
        print(
            f"{result.name:<34} {result.rate():>6.2f} {rates[0]:>6.2f} {rates[-1]:>6.2f} "
            f"{result.rate() / base:>9.2f} {result.copies:>14} {cpu:>10} {host:>7.0f} MiB"
        )


if __name__ == "__main__":
    assert LLAMA_1B.heads % TP == LLAMA_1B.kv_heads % TP == 0
    main()
