"""UCX's own benchmark, from the wheel that UCX comes in."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from importlib import metadata
from pathlib import Path

ITERATIONS = 64
SECONDS = 60.0


def perftest(nbytes: int, *options: str) -> float:
    """Send tagged messages of `nbytes` from one process to another; the GB/s that it prints.

    Args:
        nbytes: bytes of a message.
        options: more options of `ucx_perftest`, for both processes.
    """
    program = _program()
    program.chmod(0o755)
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(program.parents[1] / "lib"),
        "UCX_TLS": "all",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    server = subprocess.Popen(
        [program, "-p", port, *options],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        time.sleep(0.5)
        test = ["-t", "tag_bw", "-s", str(nbytes), "-n", str(ITERATIONS), "-w", "4"]
        client = subprocess.run(
            [program, "127.0.0.1", "-p", port, *test, *options],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=SECONDS,
        )
        server.wait(SECONDS)
    finally:
        server.kill()
        server.wait()
    (final,) = re.findall(r"^Final:.*$", client.stdout, re.MULTILINE)
    return float(final.split()[6]) * 2**20 / 1e9


def _program() -> Path:
    names = {distribution.name for distribution in metadata.distributions()}
    return next(
        Path(str(file.locate()))
        for name in ("libucx-cu12", "libucx-cu13")
        if name in names
        for file in metadata.files(name) or ()
        if file.name == "ucx_perftest"
    )
