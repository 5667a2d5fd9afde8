"""Loads checkpoints into the memory of a GPU, checks every byte, and times it beside other ways.

One call does everything and fails when a check does:

    python tests/gpu/load_on_gpu.py

It starts a coordinator and workers as processes, loads a small checkpoint (tp 1 and 2, both ranks on the
one card) and a large one (tp 1, several times), compares the SHA-256 of every slice, read back from the
device, with an independent cutter, watches the card's memory come and go, and kills a worker in the
middle of a load. The table at the end is for docs/benchmarks.md. With `--device numpy` everything but
the GPU's own rows runs on a machine without one.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from loader_service.v1 import types_pb2  # noqa: E402
from tests.bench.llama_checkpoint import write_checkpoint  # noqa: E402
from tests.cluster import Cluster, cluster, wait_for  # noqa: E402
from tests.oracle import expected_slices  # noqa: E402

SMALL_LAYERS, LARGE_LAYERS = 2, 33
ROUNDS = 5
COPY_BYTES = 1 << 30
CONTEXT_SLACK_BYTES = 64 << 20


class Card:
    """The GPU as this program sees it from outside of the workers."""

    def __init__(self, device: str) -> None:
        self.is_there = device.startswith("cuda")
        if self.is_there:
            import cupy

            self._cupy = cupy

    @property
    def name(self) -> str:
        """Name of the card, or of the processor's memory."""
        if not self.is_there:
            return "host memory (no GPU)"
        properties = self._cupy.cuda.runtime.getDeviceProperties(0)
        return str(properties["name"].decode())

    def used_bytes(self) -> int:
        """Bytes in use on the card by all processes."""
        if not self.is_there:
            return 0
        free, total = self._cupy.cuda.runtime.memGetInfo()
        return int(total - free)

    def pinned_copy_seconds(self) -> float:
        """Time to copy `COPY_BYTES` from pinned host memory: the limit of the link."""
        cuda = self._cupy.cuda
        host = np.frombuffer(cuda.alloc_pinned_memory(COPY_BYTES), np.uint8, COPY_BYTES)
        device = self._cupy.empty(COPY_BYTES, np.uint8)
        return _best(lambda: self._set(device, host))

    def pageable_copy_seconds(self) -> float:
        """Time to copy `COPY_BYTES` from ordinary host memory."""
        host = np.ones(COPY_BYTES, np.uint8)
        device = self._cupy.empty(COPY_BYTES, np.uint8)
        return _best(lambda: self._set(device, host))

    def _set(self, device: Any, host: Any) -> None:
        device.set(host)
        self._cupy.cuda.runtime.deviceSynchronize()


class Checks:
    """What was checked; a failed check is remembered and ends the program with 1."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def that(self, holds: bool, what: str) -> None:
        """Print a check and its outcome."""
        print(f"{'ok    ' if holds else 'FAILED'} {what}", flush=True)
        if not holds:
            self.failed.append(what)


def main() -> int:
    """Run everything and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written")
    parser.add_argument("--large-layers", type=int, default=LARGE_LAYERS)
    options = parser.parse_args()
    checks, card = Checks(), Card(options.device)
    if card.is_there:
        code = pytest.main(
            ["-q", "-c", os.devnull, f"--rootdir={ROOT}", "-p", "no:cacheprovider",
             "-W", "ignore::pytest.PytestUnknownMarkWarning",
             str(Path(__file__).with_name("test_cupy_device.py"))]
        )  # fmt: skip
        checks.that(code == 0, "device contract")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        write_checkpoint(folder / "small", SMALL_LAYERS)
        write_checkpoint(folder / "large", options.large_layers)
        rows = _run(folder, options.device, card, checks)
    print(f"\n{dt.datetime.now(dt.UTC):%Y-%m-%d}, {card.name}, {os.cpu_count()} CPUs\n")
    print("| what | GB/s |\n|---|---|")
    for what, value in rows:
        print(f"| {what} | {value} |")
    if checks.failed:
        print(f"\n{len(checks.failed)} checks failed: {'; '.join(checks.failed)}")
    return 1 if checks.failed else 0


def _run(folder: Path, device: str, card: Card, checks: Checks) -> list[tuple[str, str]]:
    empty = card.used_bytes()
    with cluster(folder, folder, 0) as running:
        for number in range(2):
            running.start_worker(f"w{number}", f"--device={device}")
        running.wait_for_workers(2)
        started = card.used_bytes()
        _warm_up(running, folder / "small")
        # UCX keeps what it has staged the first chunks in; that is not the loads' memory.
        idle = card.used_bytes()
        print(
            f"two workers: contexts {(started - empty) >> 20} MiB of the card, kept by UCX after "
            f"a first load {(idle - started) >> 20} MiB",
            flush=True,
        )
        for tp in (1, 2):
            _load_and_compare(running, folder / "small", tp, card, checks, idle)
        times = _time_large(running, folder / "large", card, checks, idle)
        _kill_in_the_middle(running, folder / "large", device, card, checks)
        log = running.log("w0")
        checks.that("Traceback" not in log, "no traceback in a worker's log")
    nbytes = sum(path.stat().st_size for path in (folder / "large").glob("*.safetensors"))
    rows = [
        (
            f"loader-service, {nbytes / 1e9:.1f} GB, tp 1, digests on, median of {len(times)}",
            _rate(nbytes, statistics.median(times)),
        ),
    ]
    rows += _others(folder / "large", nbytes, card)
    return rows


def _warm_up(running: Cluster, checkpoint: Path) -> None:
    load = running.load(checkpoint, 2)
    running.unload(load.load_id)
    for rank in load.ranks:
        running.wait_for_empty(rank.worker_id, 5.0)


def _load_and_compare(
    running: Cluster, checkpoint: Path, tp: int, card: Card, checks: Checks, idle: int
) -> None:
    """Load, compare what the device holds slice by slice, and give it back."""
    load = running.load(checkpoint, tp)
    what = f"{checkpoint.name} at tp {tp}"
    checks.that(load.state == types_pb2.LOAD_STATE_SUCCEEDED, f"{what}: loaded {load.failure}")
    listed = running.call(lambda client: client.list_tensors(load.load_id, include_sha256=True))
    expected = expected_slices(checkpoint, tp)
    same = all(
        {tensor.name: tensor.sha256 for tensor in listed[rank]}
        == {name: piece.sha256 for name, piece in expected[rank].items()}
        for rank in range(tp)
    )
    count = sum(len(tensors) for tensors in listed.values())
    checks.that(same, f"{what}: {count} slices on the device have the bytes of the file")
    if card.is_there:
        grown = card.used_bytes() - idle
        checks.that(grown >= load.resident_bytes, f"{what}: the card holds {grown >> 20} MiB more")
    print(f"       transport {load.ranks[0].transport}", flush=True)
    _unload(running, load, what, card, checks, idle)


def _unload(
    running: Cluster, load: types_pb2.Load, what: str, card: Card, checks: Checks, idle: int
) -> None:
    running.unload(load.load_id)
    for rank in load.ranks:
        running.wait_for_empty(rank.worker_id, 5.0)
    if card.is_there:
        left = card.used_bytes() - idle
        checks.that(left < CONTEXT_SLACK_BYTES, f"{what}: given back, {left >> 20} MiB are left")


def _time_large(
    running: Cluster, checkpoint: Path, card: Card, checks: Checks, idle: int
) -> list[float]:
    """Load the large checkpoint several times; compare the bytes of the first."""
    _load_and_compare(running, checkpoint, 1, card, checks, idle)
    times = []
    for _ in range(ROUNDS):
        load = running.load(checkpoint, 1, wait_for_workers_seconds=5.0)
        checks.that(load.state == types_pb2.LOAD_STATE_SUCCEEDED, "large: loaded again")
        times.append(load.total_duration.ToNanoseconds() / 1e9)
        transfer = load.transfer_duration.ToNanoseconds() / 1e9
        print(f"       {times[-1]:.2f} s, {transfer:.2f} s of it the transfer", flush=True)
        _unload(running, load, "large", card, checks, idle)
    return times


def _kill_in_the_middle(
    running: Cluster, checkpoint: Path, device: str, card: Card, checks: Checks
) -> None:
    """A worker that is killed takes its share of the card along, and nothing of the other's stays."""
    before = card.used_bytes()

    def half_way() -> types_pb2.Load | None:
        (load, *_) = running.call(lambda client: client.list_loads())
        landed = load.ranks and all(0 < rank.done_bytes < rank.total_bytes for rank in load.ranks)
        return load if landed else None

    running.call(lambda client: client.load(str(checkpoint), 2, wait_for_workers_seconds=5.0))
    load = wait_for(half_way)
    running.workers["w1"].kill()
    started = time.monotonic()
    ended = running.call(lambda client: _end_of(client, load.load_id))
    seconds = time.monotonic() - started
    checks.that(ended.failure.reason == "WORKER_LOST", f"killed: {ended.failure.message}")
    checks.that(seconds < 2.0, f"killed: the load ended {seconds:.2f} s later")
    running.wait_for_empty("w0", 5.0)
    if card.is_there:
        # The driver takes a moment to clear a dead process's context away.
        with contextlib.suppress(TimeoutError):
            wait_for(lambda: card.used_bytes() < before or None, 10.0)
        checks.that(card.used_bytes() < before, "killed: the card's memory is back")
    running.start_worker("w1", f"--device={device}")
    running.wait_for_workers(2)


async def _end_of(client: object, load_id: str) -> types_pb2.Load:
    return [load async for load in client.watch(load_id)][-1]  # type: ignore[attr-defined]


def _others(folder: Path, nbytes: int, card: Card) -> list[tuple[str, str]]:
    """Time what the machine and others do with the same bytes."""
    source = np.ones(COPY_BYTES, np.uint8)
    target = np.empty_like(source)
    rows = [("memcpy, 1 thread", _rate(COPY_BYTES, _best(lambda: np.copyto(target, source))))]
    if card.is_there:
        rows += [
            ("pinned host memory to device", _rate(COPY_BYTES, card.pinned_copy_seconds())),
            ("ordinary host memory to device", _rate(COPY_BYTES, card.pageable_copy_seconds())),
            ("safetensors to cuda:0, no check", _rate(nbytes, _safetensors_seconds(folder))),
        ]
    return rows


def _safetensors_seconds(folder: Path) -> float:
    """Time `safetensors.torch.load_file` of all shards in a process of its own, second of two."""
    script = (
        "import sys, time, torch\nfrom safetensors.torch import load_file\n"
        "torch.zeros(1, device='cuda')\n"
        "for _ in range(2):\n"
        "    start = time.perf_counter()\n"
        "    parts = [load_file(name, device='cuda:0') for name in sys.argv[1:]]\n"
        "    torch.cuda.synchronize()\n"
        "    seconds = time.perf_counter() - start\n"
        "    del parts\n"
        "    torch.cuda.empty_cache()\n"
        "print(seconds)\n"
    )
    files = sorted(map(str, folder.glob("*.safetensors")))
    done = subprocess.run(
        [sys.executable, "-c", script, *files], stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout)


def _best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.2f}"


if __name__ == "__main__":
    sys.exit(main())
