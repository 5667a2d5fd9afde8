"""The installed commands: each says in one line which extra it lacks, should that be so."""

from __future__ import annotations

import importlib
import sys

__all__ = ["coordinator", "loaderctl", "worker"]

EXIT_USAGE = 2
_OURS = ("loader_kernels", "loader_service", "loader_worker")


def loaderctl() -> None:
    """Run `loaderctl`."""
    _run("loaderctl", "loader_service.cli.main", "cli")


def coordinator() -> None:
    """Run `loader-coordinator`."""
    _run("loader-coordinator", "loader_service.coordinator.main", "server,ucx12")


def worker() -> None:
    """Run `loader-worker`."""
    _run("loader-worker", "loader_worker.main", "worker,ucx12")


def _run(command: str, module: str, extras: str) -> None:
    try:
        main = importlib.import_module(module).main
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in _OURS:
            raise  # A fault of this package, which no extra mends.
        sys.exit(_missing(command, error.name, extras))
    main()


def _missing(command: str, module: str | None, extras: str) -> int:
    print(  # noqa: T201 - for whoever has typed the command
        f"{command}: the module {module!r} is not installed; pip install "
        f"'loader-service[{extras}]' brings what {command} needs",
        file=sys.stderr,
    )
    return EXIT_USAGE
