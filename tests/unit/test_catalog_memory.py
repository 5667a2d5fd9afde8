"""A wild number in a file must not become memory or time: measured in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from tests.checkpoints import entry, lfs_pointer, raw_file

MIB = 1024  # in the KiB that the kernel counts in

READER = """
import json, pathlib, sys, time
from loader_service.checkpoint.files import read_checkpoint
from loader_service.errors import LoaderError

def peak():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])

def reset_peak():
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass  # the peak so far stays the base, which importing set

def read(path):
    start = time.perf_counter()
    try:
        read_checkpoint(path, path)
    except LoaderError as error:
        return type(error).__name__, error.reason, time.perf_counter() - start
    return "", "", time.perf_counter() - start

paths = sys.argv[1:]
read(paths[0])  # what the first read imports and caches is not of interest
results = {}
for path in paths:
    reset_peak()
    before = peak()
    kind, reason, seconds = read(path)
    growth = peak() - before
    seconds = min(seconds, *(read(path)[2] for _ in range(2)))  # a busy machine is not the reader
    results[pathlib.Path(path).name] = [kind, reason, growth, seconds]
print(json.dumps(results))
"""


@dataclasses.dataclass(frozen=True)
class Reading:
    """How one file was refused, the growth of the peak in KiB, and the time."""

    error: str
    reason: str
    growth_kib: int
    seconds: float


FILES: dict[str, tuple[bytes, str]] = {
    "a01-stub": (lfs_pointer(4096), "LFS_POINTER"),
    "a03-empty": (b"", "FILE_TOO_SHORT"),
    "a03-seven-bytes": (b"\1" * 7, "FILE_TOO_SHORT"),
    "a03-zero-length": (bytes(8), "BAD_HEADER_LENGTH"),
    "a03-huge-length": ((2**63 - 1).to_bytes(8, "little") + b"{}", "BAD_HEADER_LENGTH"),
    "a03-past-the-end": ((100).to_bytes(8, "little") + b"{}", "BAD_HEADER_LENGTH"),
    "a09-shape-too-big": (
        raw_file({"t": entry("F32", [1000, 1000], 0, 4)}, bytes(4)),
        "INVALID_HEADER",
    ),
    "a09-range-too-big": (raw_file({"t": entry("F32", [2], 0, 16)}, bytes(16)), "INVALID_HEADER"),
    "a10-shape-overflows": (
        raw_file({"t": entry("F32", [4611686018427387904, 4], 0, 4)}, bytes(4)),
        "INVALID_HEADER",
    ),
    "payload-not-there": (raw_file({"t": entry("U8", [2**50], 0, 2**50)}), "FILE_TRUNCATED"),
    "control": (raw_file(b"{" + b" " * (4 << 20) + b"]"), "INVALID_HEADER"),
}


@pytest.fixture(scope="module")
def readings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reading]:
    root = tmp_path_factory.mktemp("wild")
    for name, (content, _) in FILES.items():
        (root / name).mkdir()
        (root / name / "model.safetensors").write_bytes(content)
    paths = [str(root / name) for name in FILES]
    done = subprocess.run(
        [sys.executable, "-c", READER, *paths], capture_output=True, text=True, check=True
    )
    return {name: Reading(*result) for name, result in json.loads(done.stdout).items()}


@pytest.mark.parametrize("name", [name for name in FILES if name != "control"])
def test_refusal_costs_neither_memory_nor_time(name: str, readings: dict[str, Reading]) -> None:
    """A01, A03 and A09: less than 1 MiB, and for A03 less than 50 ms."""
    reading = readings[name]
    assert reading.reason == FILES[name][1]
    assert reading.growth_kib < MIB
    assert reading.seconds < 0.05


def test_measurement_sees_a_header_that_was_really_read(readings: dict[str, Reading]) -> None:
    assert readings["control"].growth_kib > MIB
