"""Showing a load while it runs, on stderr: a bar a rank on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from loader_service.cli.durations import format_seconds
from loader_service.sizes import format_size

__all__ = ["LoadProgress", "bars", "line"]

LINE_SECONDS = 5.0
"""Least time between two lines where there is no terminal, unless something happens."""

NARROW = 64
"""Columns below which a rank's row has only its state, its bar and its share."""

_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_STYLES = {
    "COMMITTED": "green",
    "VERIFIED": "green",
    "FAILED": "red",
    "LOST": "red",
    "CANCELLED": "yellow",
}
_Rank = Mapping[str, Any]


class LoadProgress:
    """Shows one load; a context manager, so that the cursor comes back."""

    def __init__(self, *, enabled: bool) -> None:
        """Show nothing when not `enabled`."""
        self._enabled = enabled
        self._live: Live | None = None
        if enabled and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            self._live = Live(
                console=Console(stderr=True),
                auto_refresh=False,
                # stdout stays what it is: it may be a pipe while stderr is the terminal.
                redirect_stdout=False,
                redirect_stderr=False,
            )
        self._told: tuple[str, list[int]] = ("", [])
        self._told_at = 0.0

    def __enter__(self) -> LoadProgress:
        """Start the display."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the display."""
        if self._live is not None:
            self._live.stop()

    def update(self, load: Mapping[str, Any]) -> None:
        """Show a load's document as it is now."""
        if self._live is not None:
            console = self._live.console
            rows = bars(load, console.width, console.height - 1, plain=console.options.ascii_only)
            self._live.update(Text("\n").join(rows), refresh=True)
        elif self._enabled:
            self._print(load)

    def _print(self, load: Mapping[str, Any]) -> None:
        """Print a line when the state or the stalled ranks change, else every few seconds."""
        told = (load["state"], [rank["rank"] for rank in load["ranks"] if rank["stalled"]])
        now = time.monotonic()
        if told == self._told and now - self._told_at < LINE_SECONDS:
            return
        self._told, self._told_at = told, now
        print(line(load), file=sys.stderr, flush=True)


def line(load: Mapping[str, Any]) -> str:
    """Return a load in one line, with its slowest and its stalled ranks."""
    ranks = {rank["rank"]: rank for rank in load["ranks"]}
    parts = [_summary(load)]
    if load["slowestRank"] in ranks:
        slowest = ranks[load["slowestRank"]]
        parts.append(f"slowest rank {slowest['rank']} at {_percent(slowest)}")
    parts += [
        f"rank {rank['rank']} stalled for {_idle(rank)}"
        for rank in ranks.values()
        if rank["stalled"]
    ]
    return ", ".join(parts)


def bars(load: Mapping[str, Any], width: int, height: int, *, plain: bool = False) -> list[Text]:
    """Return a line for the load and one a rank, none of them wider than `width`.

    Args:
        load: the load's document.
        width: columns of the terminal.
        height: most lines; where ranks outnumber them, those that are furthest behind are shown.
        plain: the terminal shows nothing but ASCII.
    """
    ranks: Sequence[_Rank] = load["ranks"]
    room = max(1, height - 2)
    shown = ranks
    if len(ranks) > room + 1:
        behind = sorted(ranks, key=lambda rank: (not rank["stalled"], _share(rank)))[:room]
        shown = sorted(behind, key=lambda rank: (rank["replica"], rank["rank"]))
    label = max((len(str(rank["rank"])) for rank in ranks), default=1)
    amount = max(
        (len(_fraction(rank["wireBytes"], rank["wireBytes"])) for rank in ranks), default=0
    )
    rows = [Text(_summary(load), style="bold")]
    rows += [_row(rank, label, amount, width, plain) for rank in shown]
    if len(shown) < len(ranks):
        rows.append(Text(f"and {len(ranks) - len(shown)} ranks that are further", style="dim"))
    for row in rows:
        row.no_wrap = True
        row.truncate(width, overflow="ellipsis")
    return rows


def _row(rank: _Rank, label: int, amount: int, width: int, plain: bool) -> Text:
    number = str(rank["rank"]).rjust(label)
    stalled = rank["stalled"]
    state = "STALLED" if stalled else str(rank["state"]).lower()
    style = "bold red" if stalled else _STYLES.get(rank["state"], "")
    if width < NARROW:
        left, right = f"{number} ", f" {_percent(rank):>5}"
    else:
        left, right = f"rank {number} ", f" {_amount(rank):>{amount}} {_pace(rank):<20}"
    room = max(4, width - len(left) - 10 - len(right))
    row = Text(left)
    row.append(f"{state:<10}", style)
    row.append_text(_bar(_share(rank), room, style or "cyan", plain))
    row.append(right)
    row.rstrip()
    return row


def _bar(share: float, room: int, style: str, plain: bool) -> Text:
    """Return a bar that can be read without colours too."""
    full, empty = "#-" if plain else "━┄"
    done = min(room, int(share * room))
    return Text.assemble((full * done, style), (empty * (room - done), "dim"))


def _summary(load: Mapping[str, Any]) -> str:
    """Return `load-1a2b3c4d streaming 45 %, 1.2/3.0 GiB, 1.1 GiB/s, 12 s left`."""
    ranks = load["ranks"]
    done = sum(rank["doneBytes"] for rank in ranks)
    rate = sum(rank["bytesPerSecond"] for rank in ranks)
    head = f"{load['loadId']} {load['state'].lower()}"
    if not load["wireBytes"]:
        return head
    parts = [f"{head} {int(load['progress'] * 100 + 1e-9)} %", _fraction(done, load["wireBytes"])]
    if rate:
        parts.append(f"{format_size(rate)}/s")
    if load["etaSeconds"] is not None:
        parts.append(f"{format_seconds(load['etaSeconds'])} left")
    return ", ".join(parts)


def _pace(rank: _Rank) -> str:
    """Return how fast a rank is and how long it takes, or for how long nothing has come."""
    if rank["stalled"]:
        return f"nothing for {_idle(rank)}"
    rate = rank["bytesPerSecond"]
    if not rate:
        return ""
    left = (rank["wireBytes"] - rank["doneBytes"]) / rate
    return f"{format_size(rate)}/s {format_seconds(left)}" if left else f"{format_size(rate)}/s"


def _share(rank: _Rank) -> float:
    return rank["doneBytes"] / rank["wireBytes"] if rank["wireBytes"] else 0.0


def _percent(rank: _Rank) -> str:
    return f"{int(_share(rank) * 100 + 1e-9)} %"


def _amount(rank: _Rank) -> str:
    return _fraction(rank["doneBytes"], rank["wireBytes"])


def _fraction(done: int, total: int) -> str:
    """Return `1.2/3.0 GiB`: both in the unit of the whole."""
    for size, unit in _UNITS:
        if total >= size:
            return f"{done / size:.1f}/{total / size:.1f} {unit}"
    return f"{done}/{total} B"


def _idle(rank: _Rank) -> str:
    return format_seconds(rank["idleSeconds"] or 0.0)
