"""`loaderctl` in a real terminal: a pseudo-terminal whose screen pyte keeps."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pexpect
import pexpect.fdpexpect
import pyte

from tests.cluster import BIN

WAIT_SECONDS = 10.0
QUIET_SECONDS = 0.05
CTRL_C = "\x03"

_TAKE_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Makes the terminal that stdin is the one whose Ctrl-C counts, and becomes the program.

pexpect itself would fork this process, whose gRPC threads do not survive that well.
"""


class Terminal:
    """A running `loaderctl` and what its user sees."""

    def __init__(
        self, process: subprocess.Popen[bytes], controller: int, columns: int, lines: int
    ) -> None:
        self.raw = b""
        self._process = process
        self._line: Any = pexpect.fdpexpect.fdspawn(controller)
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)

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

    def press(self, key: str) -> None:
        """Press a key."""
        self._line.send(key)

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
        return self._process.wait(WAIT_SECONDS)

    def _read(self) -> bool:
        try:
            data = self._line.read_nonblocking(65536, timeout=QUIET_SECONDS)
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
    controller, side = pty.openpty()
    termios.tcsetwinsize(controller, (lines, columns))
    process = subprocess.Popen(
        [sys.executable, "-c", _TAKE_TERMINAL, str(BIN / "loaderctl"), *arguments],
        stdin=side,
        stdout=side,
        stderr=side,
        env={
            **inherited,
            "LOADER_ENDPOINT": endpoint,
            "TERM": "xterm-256color",
            **(environment or {}),
        },
    )
    os.close(side)
    try:
        yield Terminal(process, controller, columns, lines)
    finally:
        process.kill()
        process.wait()
        os.close(controller)
