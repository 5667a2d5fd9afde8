"""How a load in progress and `top` are laid out; no line is wider than the terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import sys
import termios
import types

import pytest

from loader_service.cli import progress, tables
from loader_service.cli.documents import load_document, top_document
from loader_service.cli.top import _keys, screen
from loader_service.v1 import types_pb2
from tests.messages import failed, streaming, succeeded, worker


def bars(load: types_pb2.Load, width: int = 80, height: int = 24, plain: bool = False) -> list[str]:
    return [row.plain for row in progress.bars(load_document(load), width, height, plain=plain)]


@pytest.mark.parametrize("width", [20, 40, 63, 64, 80, 200])
@pytest.mark.parametrize("tp", [1, 2, 64])
def test_no_line_is_too_wide_and_none_too_many(width: int, tp: int) -> None:
    load = streaming([1 / (rank + 1) for rank in range(tp)], stalled=[0], tp=tp)
    rows = bars(load, width, 24)
    assert max(map(len, rows)) <= width
    assert len(rows) == min(tp + 1, 24)


def test_a_bar_is_as_long_as_the_rank_has_come() -> None:
    _, first, second = bars(streaming((0.75, 0.25)), plain=True)
    length = first.count("#") + first.count("-")
    assert length > 20
    assert first.count("#") == int(length * 0.75)
    assert (second.count("#"), second.count("-")) == (length // 4, length - length // 4)


def test_a_rank_shows_bytes_rate_and_time() -> None:
    head, first, second = bars(streaming((0.75, 0.25)))
    assert head == "load-5e5e5e5e streaming 25 %, 4.0/8.0 GiB, 512.0 MiB/s, 12 s left"
    assert first.startswith("rank 0 receiving ")
    assert first.endswith(" 3.0/4.0 GiB 256.0 MiB/s 4 s")
    assert second.endswith(" 1.0/4.0 GiB 256.0 MiB/s 12 s")


def test_a_stalled_rank_is_marked_in_wide_and_narrow_terminals() -> None:
    for width in (80, 40):
        _, first, second = bars(streaming((0.75, 0.25), stalled=[1]), width)
        assert "STALLED" not in first
        assert second.split(" ━")[0].endswith("1 STALLED  ")
    assert "nothing for 4 s" in bars(streaming((0.75, 0.25), stalled=[1]))[2]


def test_where_ranks_do_not_fit_those_behind_and_stalled_are_shown() -> None:
    shares = [0.9, 0.1, 0.8, 0.2, 0.7, 0.95]
    rows = bars(streaming(shares, stalled=[5], tp=6), height=5)
    assert [row.split()[1] for row in rows[1:4]] == ["1", "3", "5"]
    assert rows[4] == "and 3 ranks that are further"


def test_a_load_without_a_plan_is_one_line() -> None:
    load = types_pb2.Load(load_id="load-1", state=types_pb2.LOAD_STATE_PENDING)
    assert bars(load) == ["load-1 pending"]


def test_a_line_names_the_slowest_and_the_stalled_ranks() -> None:
    text = progress.line(load_document(streaming((0.9, 0.25, 0.5), stalled=[0, 2], tp=3)))
    assert "slowest rank 1 at 25 %" in text
    assert "rank 0 stalled for 4 s" in text
    assert "rank 2 stalled for 4 s" in text
    assert "rank 1 stalled" not in text


def told(capsys: pytest.CaptureFixture[str], *loads: types_pb2.Load, enabled: bool = True) -> int:
    """Lines printed for these updates."""
    with progress.LoadProgress(enabled=enabled) as display:
        for load in loads:
            display.update(load_document(load))
    captured = capsys.readouterr()
    assert captured.out == ""
    return len(captured.err.splitlines())


def test_elsewhere_than_on_a_terminal_lines_come_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    moving = [streaming((share / 10, 0.0)) for share in range(10)]
    assert told(capsys, *moving) == 1
    assert told(capsys, *moving, streaming((0.9, 0.0), stalled=[1]), *moving, succeeded()) == 4
    with progress.LoadProgress(enabled=True) as display:
        for load in moving:
            display.update(load_document(load))
            now[0] += progress.LINE_SECONDS / 2
    assert len(capsys.readouterr().err.splitlines()) == len(moving) / 2


def test_nothing_is_shown_where_it_is_not_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, streaming(), succeeded(), enabled=False) == 0


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 24), (80, 8), (20, 6)])
def test_top_fits_any_terminal(width: int, height: int) -> None:
    document = top_document([streaming(), succeeded(), failed()] * 10, [worker()] * 30)
    rows = screen(document, "header", "trouble", width, height)
    assert len(rows) <= height
    assert max(len(row) for row in rows) <= width
    assert rows[1].plain == "trouble"


def test_top_shows_loads_that_have_ended_last_and_says_what_it_leaves_out() -> None:
    document = top_document([failed(), succeeded(), failed(), streaming()], [worker()] * 4)
    lines = tables.top_lines(document, most=9)
    assert lines[0] == "4 loads: 2 FAILED, 1 STREAMING, 1 SUCCEEDED (2 not shown)"
    assert [line.split()[0] for line in lines[2:4]] == ["load-0a1b2c3d", "load-5e5e5e5e"]
    assert lines[5] == "4 workers: 4 BUSY (2 not shown)"
    assert len(lines) == 9
    assert "not shown" not in "".join(tables.top_lines(document))


async def test_top_ends_with_its_terminal_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that has hung up can be read for ever, and must not count as a key each time."""
    controller, side = pty.openpty()
    with os.fdopen(side, encoding="utf-8") as line:
        monkeypatch.setattr(sys, "stdin", line)
        with _keys() as keys:
            os.write(controller, b"x")
            async with asyncio.timeout(5):
                assert await keys.get() == "x"
            os.close(controller)
            async with asyncio.timeout(5):
                assert await keys.get() == "q"
            await asyncio.sleep(0.05)
            assert keys.empty()
        assert signal.getsignal(signal.SIGWINCH) is signal.SIG_DFL
        assert not asyncio.get_running_loop().remove_reader(side)


async def test_top_gives_the_terminal_back_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, side = pty.openpty()
    with os.fdopen(side, encoding="utf-8") as line:
        monkeypatch.setattr(sys, "stdin", line)
        before = termios.tcgetattr(side)
        with _keys():
            assert termios.tcgetattr(side) != before
        assert termios.tcgetattr(side) == before
    os.close(controller)
