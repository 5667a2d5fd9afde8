"""Showing a load while it runs: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from loader_service.cli.documents import load_state
from loader_service.sizes import format_size
from loader_service.v1 import types_pb2

__all__ = ["LoadProgress"]

LINE_SECONDS = 1.0
"""Least time between two lines where there is no terminal."""


class LoadProgress:
    """Shows one load on `console`; a context manager, so that the cursor comes back."""

    def __init__(self, console: Console, *, enabled: bool) -> None:
        """Show nothing when not `enabled`."""
        self._console = console
        self._enabled = enabled
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TextColumn("{task.fields[rate]}"),
            console=console,
            disable=not (enabled and console.is_terminal),
        )
        self._tasks: dict[int, TaskID] = {}
        self._state = ""
        self._printed = 0.0

    def __enter__(self) -> LoadProgress:
        """Start the display."""
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the display."""
        self._bars.stop()

    def update(self, load: types_pb2.Load) -> None:
        """Show the load as it is now."""
        if self._console.is_terminal:
            self._update_bars(load)
        elif self._enabled:
            self._print_line(load)

    def _update_bars(self, load: types_pb2.Load) -> None:
        for rank in load.ranks:
            if rank.rank not in self._tasks:
                self._tasks[rank.rank] = self._bars.add_task("", total=None, rate="")
            self._bars.update(
                self._tasks[rank.rank],
                description=f"rank {rank.rank} {load_state(load).lower():<10}",
                total=rank.total_bytes or None,
                completed=rank.done_bytes,
                rate=f"{format_size(rank.bytes_per_second)}/s" if rank.bytes_per_second else "",
            )

    def _print_line(self, load: types_pb2.Load) -> None:
        state = load_state(load)
        now = time.monotonic()
        if state == self._state and now - self._printed < LINE_SECONDS:
            return
        self._state, self._printed = state, now
        done = sum(rank.done_bytes for rank in load.ranks)
        rate = sum(rank.bytes_per_second for rank in load.ranks)
        line = (
            f"{load.load_id} {state.lower()} {format_size(done)} of {format_size(load.wire_bytes)}"
        )
        self._console.print(
            f"{line} at {format_size(rate)}/s" if rate else line, highlight=False, markup=False
        )
