"""Loads checkpoints to a GPU over the real service, checks every byte, and measures.

    python tests/gpu/load_on_gpu.py                    # cuda:0
    python tests/gpu/load_on_gpu.py --device numpy --layers 1    # a rehearsal without a GPU

Runs the device contract; loads small checkpoints and a large one at tp=1 and tp=2 (two workers on the
one device); compares the SHA-256 of every tensor, read back from the device, with the independent
cutter of tests/oracle.py; checks that device memory grows by what is loaded and goes back at unload;
kills a worker in the middle of a load; times loads beside copies that anyone could do. Exits with 1 when
any check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime as dt
import hashlib
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from loader_service.client import AsyncLoaderClient  # noqa: E402
from loader_service.v1 import types_pb2  # noqa: E402
from tests.bench.llama_checkpoint import LLAMA_1B, write_checkpoint  # noqa: E402
from tests.bench.perftest import perftest  # noqa: E402
from tests.checkpoints import (  # noqa: E402
    ModelOptions,
    save_model,
    tensors_of_every_dtype,
    write_file,
)
from tests.cluster import Cluster, cluster, wait_for  # noqa: E402
from tests.oracle import ExpectedSlice, expected_slices  # noqa: E402

LOAD_SECONDS = 90.0
GIB = 1 << 30
MIB = 1 << 20
PERFTEST_BYTES = 32 * MIB
SLACK_BYTES = 64 * MIB
"""What drivers and UCX may take or give back beside the tensors between two readings."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A folder, and by tp what each rank must hold of it: (dtype, shape, SHA-256, ...) by name."""

    folder: Path
    expected: dict[int, list[dict[str, tuple[Any, ...]]]]


class Report:
    """Checks and rates; prints them as they come."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str, str]] = []
        self.failed: list[str] = []

    def check(self, ok: bool, what: str) -> None:
        """Note one check."""
        print(f"{'ok  ' if ok else 'FAIL'} {what}", flush=True)
        if not ok:
            self.failed.append(what)

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Make an exception of the block a failed check, and go on."""
        start = time.monotonic()
        try:
            yield
        except Exception:  # noqa: BLE001 - one failed step must not hide what the others find
            traceback.print_exc()
            self.check(False, what)
        print(f"     {what}: {time.monotonic() - start:.1f} s", flush=True)

    def measure(self, what: str, nbytes: int, seconds: list[float], note: str = "") -> None:
        """Add a row of rates."""
        rates = [nbytes / second / 1e9 for second in sorted(seconds, reverse=True)]
        spread = f"{rates[0]:.2f} - {rates[-1]:.2f}" if len(rates) > 1 else ""
        self.rows.append((what, f"{statistics.median(rates):.2f}", spread, note))
        print(f"     {what}: {self.rows[-1][1]} GB/s {note}", flush=True)

    def skip(self, what: str, reason: str) -> None:
        """Add a row that says why there is no rate."""
        self.rows.append((what, "-", "", f"skipped: {reason}"))

    def print_table(self) -> None:
        """Print all rows as a markdown table."""
        print("| what | GB/s, median | min - max | note |\n|---|---|---|---|")
        for row in self.rows:
            print("| " + " | ".join(row) + " |")


def main() -> int:
    """Run everything and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or numpy for a rehearsal")
    parser.add_argument("--layers", type=int, default=32, help="of the large model; 32 are 4 GB")
    parser.add_argument("--rounds", type=int, default=5, help="of every measurement")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "gpu-load")
    parser.add_argument("--logs", type=Path, help="where the processes' logs are kept")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    logs = options.logs or options.folder / "logs"
    report = Report()
    device = _Cuda(options.device) if options.device.startswith("cuda") else None
    run = _Run(report, options, device, logs)
    with report.step("device contract"):
        _run_contract(report, options.device)
    with report.step("small checkpoints"):
        run.load_small_ones()
    with report.step("large checkpoint"):
        run.load_large_one()
    with report.step("killed worker"):
        run.kill_a_worker()
    with report.step("copies beside it"):
        _measure_baselines(report, run.large.folder, device, options.rounds)
    print(f"\n{dt.datetime.now(tz=dt.UTC).date()}, {_machine(device)}")
    report.print_table()
    print("\n".join(f"FAILED: {what}" for what in report.failed) or "all checks passed")
    return 1 if report.failed else 0


class _Cuda:
    """The device as this script sees it: free memory, and copies to compare with."""

    def __init__(self, name: str) -> None:
        import cupy

        self.cupy = cupy
        self.name = name
        self.index = int(name.partition(":")[2] or 0)
        cupy.cuda.Device(self.index).use()
        cupy.cuda.runtime.free(0)

    def free_bytes(self) -> int:
        """Free bytes of the device, whoever uses it."""
        return int(self.cupy.cuda.runtime.memGetInfo()[0])

    def card(self) -> str:
        """What the device is called."""
        name = self.cupy.cuda.runtime.getDeviceProperties(self.index)["name"]
        version = self.cupy.cuda.runtime.driverGetVersion()
        return f"{name.decode()}, CUDA {version // 1000}.{version % 1000 // 10}"

    def process_bytes(self, process_id: int) -> int | None:
        """Device memory of a process by nvidia-smi, None where that shows no processes."""
        query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
        listed = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        for line in listed.splitlines():
            pid, used = line.split(",")
            if int(pid) == process_id and used.split()[0].isdigit():
                return int(used.split()[0]) * MIB
        return None


def _machine(device: _Cuda | None) -> str:
    card = device.card() if device else "no GPU"
    return f"{card}, {os.cpu_count()} CPUs, kernel {platform.release()}"


def _run_contract(report: Report, device: str) -> None:
    name = "TestCupyDevice" if device.startswith("cuda") else "TestNumpyDevice"
    tests = ROOT / "tests" / "contract" / "test_device.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    # Not the settings of the project: they need plugins that a GPU machine may lack.
    command += ["-c", os.devnull, f"--rootdir={ROOT}", f"{tests}::{name}"]
    done = subprocess.run(
        [*command, "-W", "default"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    last = done.stdout.strip().splitlines()[-1:]
    if done.returncode:
        print(done.stdout, done.stderr)
    report.check(done.returncode == 0 and "skipped" not in str(last), f"device contract: {last}")


class _Run:
    """Loads of one run of this script."""

    def __init__(
        self, report: Report, options: argparse.Namespace, device: _Cuda | None, logs: Path
    ) -> None:
        self._report = report
        self._options = options
        self._device = device
        self._logs = logs
        self.large = Checkpoint(options.folder / f"llama-{options.layers}", {})

    @contextmanager
    def _cluster(self, name: str, workers: int) -> Iterator[Cluster]:
        logs = self._logs / name
        logs.mkdir(parents=True, exist_ok=True)
        device = f"--device={self._options.device}"
        with cluster(self._options.folder, logs, workers, worker=[device]) as running:
            yield running

    def load_small_ones(self) -> None:
        """Every dtype whole, and a model with padding rows and shared heads cut in two."""
        dtypes, model = self._options.folder / "dtypes", self._options.folder / "tiny"
        write_file(dtypes / "model.safetensors", tensors_of_every_dtype())
        if not model.exists():
            save_model(model, ModelOptions(kv_heads=1, tied=True))
        with self._cluster("small", workers=2) as running:
            for folder, tp in ((dtypes, 1), (model, 1), (model, 2)):
                checkpoint = Checkpoint(folder, {tp: _expected(folder, tp)})
                load = self._load(running, folder, tp)
                self._compare(running, load, checkpoint, tp)
                running.unload(load.load_id)

    def load_large_one(self) -> None:
        """Check, then measure: first load of the processes, repeats, one from the disk."""
        folder = self.large.folder
        write_checkpoint(folder, LLAMA_1B._replace(layers=self._options.layers))
        for tp in (1, 2):
            self.large.expected[tp] = _expected(folder, tp)
        for tp in (1, 2):
            _read_all(folder)
            with self._cluster(f"large-tp{tp}", workers=tp) as running:
                idle = self._device.free_bytes() if self._device else 0
                first = self._load(running, folder, tp)
                self._compare(running, first, self.large, tp)
                running.unload(first.load_id)
                if self._device:
                    kept = idle - self._device.free_bytes()
                    print(f"     large tp={tp}: {kept} bytes stay in use after the first unload")
                self._measure(f"tp={tp}, first load of its processes", [first])
                self._check_memory(running, tp)
                self._measure_repeats(running, tp)

    def kill_a_worker(self) -> None:
        """The load ends at once, and neither rank's memory stays."""
        with self._cluster("killed", workers=2) as running:
            # What the processes keep for later loads, the streamer's ring above all, is there then.
            running.unload(self._load(running, self.large.folder, 2).load_id)
            running.wait_for_workers(2)
            before = self._device.free_bytes() if self._device else 0
            running.call(lambda client: client.load(str(self.large.folder), 2))
            wait_for(lambda: self._half_landed(running) or None)
            running.workers["w1"].kill()
            start = time.monotonic()
            load = wait_for(lambda: self._failed(running))
            seconds = time.monotonic() - start
            self._report.check(
                load.failure.reason == "WORKER_LOST" and seconds < 2,
                f"killed worker: the load ended {seconds:.2f} s later, {load.failure.message}",
            )
            running.wait_for_empty("w0", 5.0)
            if self._device:
                self._check_given_back(self._device, before)

    def _check_given_back(self, device: _Cuda, before: int) -> None:
        # The dead worker's context goes too, so there is more than before, once the driver has done it.
        with suppress(TimeoutError):
            wait_for(lambda: device.free_bytes() > before or None, 10.0)
        more = device.free_bytes() - before
        self._report.check(more > 0, f"killed worker: {more} bytes more are free than before")

    def _half_landed(self, running: Cluster) -> bool:
        load, *_ = running.call(lambda client: client.list_loads())
        return bool(load.ranks) and all(
            0 < rank.done_bytes < rank.total_bytes for rank in load.ranks
        )

    def _failed(self, running: Cluster) -> types_pb2.Load | None:
        load, *_ = running.call(lambda client: client.list_loads())
        return load if load.state == types_pb2.LOAD_STATE_FAILED else None

    def _measure_repeats(self, running: Cluster, tp: int) -> None:
        folder = self.large.folder
        loads = []
        for _ in range(self._options.rounds):
            loads.append(self._load(running, folder, tp))
            running.unload(loads[-1].load_id)
        self._measure(f"tp={tp}, repeated", loads)
        if tp == 1:
            _drop_from_page_cache(folder)
            cold = self._load(running, folder, tp)
            self._measure("tp=1, file not in the page cache", [cold])
            running.unload(cold.load_id)

    def _measure(self, what: str, loads: list[types_pb2.Load]) -> None:
        total = statistics.median(load.total_duration.ToNanoseconds() / 1e9 for load in loads)
        note = (
            f"{loads[0].resident_bytes / 1e9:.2f} GB resident, {total:.2f} s from request to "
            f"committed, lanes {loads[0].ranks[0].transport}"
        )
        seconds = [load.transfer_duration.ToNanoseconds() / 1e9 for load in loads]
        self._report.measure(f"loader-service {what}", loads[0].wire_bytes, seconds, note)

    def _load(self, running: Cluster, folder: Path, tp: int) -> types_pb2.Load:
        async def work(client: AsyncLoaderClient) -> types_pb2.Load:
            async with asyncio.timeout(LOAD_SECONDS):
                started = await client.load(str(folder), tp)
                return [load async for load in client.watch(started.load_id)][-1]

        try:
            load = running.call(work)
        except TimeoutError:
            print(running.log("coordinator")[-4000:], running.log("w0")[-4000:])
            raise
        if load.state != types_pb2.LOAD_STATE_SUCCEEDED:
            raise RuntimeError(f"{folder.name} at tp={tp}: {load.failure}")
        return load

    def _compare(
        self, running: Cluster, load: types_pb2.Load, checkpoint: Checkpoint, tp: int
    ) -> None:
        held = running.call(lambda client: client.list_tensors(load.load_id, include_sha256=True))
        wrong = []
        for rank, expected in enumerate(checkpoint.expected[tp]):
            found = {tensor.name: _facts(tensor, tensor.sha256) for tensor in held[rank]}
            wrong += [name for name in found | expected if found.get(name) != expected.get(name)]
        count = sum(len(tensors) for tensors in held.values())
        self._report.check(
            not wrong and count > 0,
            f"{checkpoint.folder.name} tp={tp}: SHA-256 of {count} tensors from the device"
            + (f", wrong: {wrong[:5]}" if wrong else ""),
        )

    def _check_memory(self, running: Cluster, tp: int) -> None:
        """Compare what the worker counts, what the device says and what is resident."""
        for number in range(tp):
            running.wait_for_empty(f"w{number}", 10)
        before = self._readings(running)
        load = self._load(running, self.large.folder, tp)
        counted = sum(self._counted(running, f"w{number}") for number in range(tp))
        held = self._readings(running)
        running.unload(load.load_id)
        after = self._readings(running)
        resident = load.resident_bytes
        what = f"large tp={tp}: {resident} bytes resident, {counted} counted by the workers"
        self._report.check(resident <= counted <= resident + SLACK_BYTES, what)
        if not before:
            print("     device memory by CUDA and nvidia-smi: skipped, no GPU")
        for source, start in before.items():
            grown, left = held[source] - start, after[source] - start
            what = f"large tp={tp}: {source}: {grown} bytes more while loaded, {left} after unload"
            self._report.check(
                abs(grown - counted) <= SLACK_BYTES and abs(left) <= SLACK_BYTES, what
            )

    def _readings(self, running: Cluster) -> dict[str, int]:
        """Used device bytes by who says so."""
        if self._device is None:
            return {}
        readings = {"cudaMemGetInfo": -self._device.free_bytes()}
        used = [self._device.process_bytes(worker.pid) for worker in running.workers.values()]
        if None in used:
            print("     nvidia-smi: skipped, it does not list the workers here")
        else:
            readings["nvidia-smi"] = sum(nbytes for nbytes in used if nbytes is not None)
        return readings

    def _counted(self, running: Cluster, worker_id: str) -> int:
        """The bytes that a worker says are handed out, once a heartbeat since the commit has told."""

        def committed() -> int | None:
            memory = running.memory(worker_id)
            return memory.allocated_bytes if memory.resident_bytes else None

        return wait_for(committed)


def _facts(tensor: types_pb2.TensorSlice | ExpectedSlice, sha256: str) -> tuple[Any, ...]:
    return (tensor.dtype, tuple(tensor.shape), tensor.padding_rows, tuple(tensor.aliases), sha256)


def _expected(folder: Path, tp: int) -> list[dict[str, tuple[Any, ...]]]:
    """Hash what each rank must hold, cut from the file by the independent cutter."""
    ranks = []
    with ThreadPoolExecutor() as threads:
        for tensors in expected_slices(folder, tp):
            digests = threads.map(lambda piece: hashlib.sha256(piece.data), tensors.values())
            ranks.append(
                {
                    name: _facts(piece, sha256.hexdigest())
                    for (name, piece), sha256 in zip(tensors.items(), digests, strict=True)
                }
            )
    return ranks


# ---------------------------------------------------------------- beside it


def _measure_baselines(report: Report, folder: Path, device: _Cuda | None, rounds: int) -> None:
    source = np.ones(GIB, np.uint8)
    target = np.ones(GIB, np.uint8)
    report.measure(
        "memcpy on the host, 1 thread", GIB, _timed(lambda: np.copyto(target, source), rounds)
    )
    if device is None:
        report.skip("everything on the device", "no GPU")
    else:
        _measure_copies(report, device, source, rounds)
        _measure_safetensors(report, folder, device, rounds)
    for name, options in (
        ("ucx_perftest, error handling off", ()),
        ("ucx_perftest, error handling on", ("-e",)),
    ):
        memory = ("-m", "host,cuda" if device else "host,host")
        try:
            seconds = [1 / perftest(PERFTEST_BYTES, *memory, *options) for _ in range(rounds)]
        except (StopIteration, OSError, subprocess.SubprocessError, ValueError) as error:
            report.skip(name, str(error))
        else:
            report.measure(name, 10**9, seconds, f"tag_bw, 32 MiB, {memory[1]}")


def _measure_copies(
    report: Report, device: _Cuda, pageable: np.ndarray[Any, Any], rounds: int
) -> None:
    cuda = device.cupy.cuda
    pinned = np.frombuffer(cuda.alloc_pinned_memory(GIB), np.uint8, GIB)
    pinned[:] = 1
    memory = cuda.runtime.malloc(GIB)
    for name, host in (("pinned", pinned), ("pageable", pageable)):

        def copy(address: int = host.ctypes.data) -> None:
            cuda.runtime.memcpy(memory, address, GIB, cuda.runtime.memcpyHostToDevice)
            cuda.runtime.deviceSynchronize()

        report.measure(f"cudaMemcpy, {name} host to device", GIB, _timed(copy, rounds))
    cuda.runtime.free(memory)


def _measure_safetensors(report: Report, folder: Path, device: _Cuda, rounds: int) -> None:
    import torch
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))

    def load() -> None:
        held = [load_file(file, device=device.name) for file in files]
        torch.cuda.synchronize()
        del held

    _read_all(folder)
    seconds = _timed(load, rounds)
    torch.cuda.empty_cache()
    report.measure(
        "safetensors load_file", sum(file.stat().st_size for file in files), seconds, "no hashing"
    )


def _timed(work: Callable[[], object], rounds: int) -> list[float]:
    work()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds


def _read_all(folder: Path) -> None:
    """Bring the files into the page cache."""
    buffer = bytearray(16 * MIB)
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _drop_from_page_cache(folder: Path) -> None:
    os.sync()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    sys.exit(main())
