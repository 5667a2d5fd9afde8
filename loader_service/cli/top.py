"""`top`: loads and workers, again and again. The whole screen of a terminal; elsewhere text."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from loader_service.cli import documents, tables
from loader_service.cli.durations import format_seconds
from loader_service.cli.output import TOP, Format
from loader_service.cli.session import Session
from loader_service.errors import LoaderError
from loader_service.texts import printable

__all__ = ["follow", "screen"]

_STYLES = (
    ("FAILED", "red"),
    ("LOST", "red"),
    ("DEGRADED", "red"),
    ("DRAINING", "yellow"),
    ("CANCELLED", "yellow"),
    ("STREAMING", "cyan"),
    ("SUCCEEDED", "green"),
    ("READY", "green"),
)


async def follow(session: Session, interval: float, *, once: bool) -> None:
    """Show snapshots until the user quits; one only with `once`.

    Raises:
        LoaderError: the first snapshot cannot be had.
    """
    on_screen = not once and session.invocation.output is Format.TABLE and sys.stdout.isatty()
    if on_screen:
        await _on_screen(session, interval)
        return
    session.show(TOP, await _snapshot(session))
    while not once:
        await asyncio.sleep(interval)
        document = await _snapshot(session)
        if session.invocation.output is Format.TABLE:
            print()
        session.show(TOP, document)


def screen(
    document: dict[str, Any], header: str, trouble: str, width: int, height: int
) -> list[Text]:
    """Return the lines of the screen, none of them wider than `width`.

    Args:
        document: the last snapshot.
        header: first line.
        trouble: why there is no newer snapshot; empty while all is well.
        width: columns of the terminal.
        height: lines of the terminal.
    """
    rows = [Text(header, style="reverse"), Text(printable(trouble), style="bold red")]
    for line in tables.top_lines(document, height - len(rows)):
        row = Text(printable(line))
        if line.startswith(("LOAD ", "WORKER ")):
            row.stylize("bold")
        for word, style in _STYLES:
            row.highlight_words([f" {word} "], style)
        rows.append(row)
    for row in rows:
        row.no_wrap = True
        row.truncate(width, overflow="ellipsis")
    rows[0].pad_right(max(0, width - len(rows[0])))
    return rows[:height]


async def _snapshot(session: Session) -> dict[str, Any]:
    loads, workers = await asyncio.gather(
        session.client.list_loads(), session.client.list_workers()
    )
    return documents.top_document(loads, workers)


async def _on_screen(session: Session, interval: float) -> None:
    # Before the screen is taken over: an error of the first look is printed like any other.
    document = await _snapshot(session)
    trouble = ""
    console = Console()
    live = Live(
        console=console,
        screen=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with live, _keys() as keys:
        while True:
            now = datetime.now(UTC).astimezone().strftime("%H:%M:%S")
            every = "" if interval < 1 else f"every {format_seconds(interval)}, "
            header = f"{session.settings.endpoint}  {now}  {every}q quits"
            rows = screen(document, header, trouble, console.width, console.height)
            live.update(Text("\n").join(rows), refresh=True)
            if await _quits(keys, interval):
                return
            try:
                document, trouble = await _snapshot(session), ""
            except LoaderError as error:
                trouble = f"{error.reason}: {error.message}"


async def _quits(keys: asyncio.Queue[str], interval: float) -> bool:
    """Wait for the next look; say whether the user has asked to quit. Any other key looks at once."""
    try:
        async with asyncio.timeout(interval):
            return await keys.get() in ("q", "Q")
    except TimeoutError:
        return False


@contextlib.contextmanager
def _keys() -> Iterator[asyncio.Queue[str]]:
    """Yield the keys that are pressed, each as it comes; a change of the size counts as one."""
    keys: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as undo:
        loop.add_signal_handler(signal.SIGWINCH, keys.put_nowait, "")
        undo.callback(loop.remove_signal_handler, signal.SIGWINCH)
        if sys.stdin.isatty():
            terminal = sys.stdin.fileno()
            undo.callback(_restore, terminal, termios.tcgetattr(terminal))
            tty.setcbreak(terminal)
            loop.add_reader(terminal, _read_key, terminal, keys)
            undo.callback(loop.remove_reader, terminal)
        yield keys


def _read_key(terminal: int, keys: asyncio.Queue[str]) -> None:
    try:
        key = os.read(terminal, 1)
    except OSError:
        key = b""
    if not key:
        # It has hung up, and would be ready to read for ever; nobody looks any more.
        asyncio.get_running_loop().remove_reader(terminal)
        key = b"q"
    keys.put_nowait(key.decode("latin-1"))


def _restore(terminal: int, before: list[Any]) -> None:
    # One that has hung up has nothing to restore.
    with contextlib.suppress(termios.error):
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
