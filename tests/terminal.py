"""`loaderctl` in a real terminal: a pseudo-terminal whose screen pyte keeps."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pexpect
import pyte

from tests.cluster import BIN

WAIT_SECONDS = 10.0
QUIET_SECONDS = 0.05


class Terminal:
    """A running `loaderctl` and what its user sees."""

    def __init__(self, process: Any, columns: int, lines: int) -> None:
        self.process = process
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""

    @property
    def rows(self) -> list[str]:
        """The lines of the screen, blank ones at the end left out."""
        return "\n".join(row.rstrip() for row in self._screen.display).rstrip("\n").split("\n")

    @property
    def cursor_hidden(self) -> bool:
        return bool(self._screen.cursor.hidden)

    def colours(self) -> set[str]:
        """Colours of all characters on the screen."""
        return {cell.fg for row in self._screen.buffer.values() for cell in row.values()}

    def wait_for(self, ready: Callable[[list[str]], bool]) -> list[str]:
        """Return the screen once it is as wanted, and whole: nothing more comes for a moment."""
        deadline = time.monotonic() + WAIT_SECONDS
        quiet = False
        while not (quiet and ready([row.rstrip() for row in self._screen.display])):
            assert time.monotonic() < deadline, "\n".join(["the screen is", *self.rows])
            before = len(self.raw)
            self._read()
            quiet = len(self.raw) == before
        return self.rows

    def exit_code(self) -> int:
        """Read to the end, and return the exit code."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self._read():
            assert time.monotonic() < deadline, "\n".join(["it does not end", *self.rows])
        self.process.close()
        assert self.process.exitstatus is not None, f"signal {self.process.signalstatus}"
        return int(self.process.exitstatus)

    def _read(self) -> bool:
        try:
            data = self.process.read_nonblocking(65536, timeout=QUIET_SECONDS)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += data
        self._stream.feed(data)
        return True


@contextlib.contextmanager
def terminal(
    endpoint: str,
    *arguments: str,
    columns: int = 80,
    lines: int = 24,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Terminal]:
    """Run `loaderctl` in a terminal of the given size."""
    # pytest's own terminal says nothing about this one.
    inherited = {
        key: value
        for key, value in os.environ.items()
        if key not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    }
    process = pexpect.spawn(
        str(BIN / "loaderctl"),
        list(arguments),
        dimensions=(lines, columns),
        env={
            **inherited,
            "LOADER_ENDPOINT": endpoint,
            "TERM": "xterm-256color",
            **(environment or {}),
        },
    )
    # It has ended by then, or is killed.
    process.ptyproc.delayafterclose = process.ptyproc.delayafterterminate = 0.01
    try:
        yield Terminal(process, columns, lines)
    finally:
        process.close(force=True)
