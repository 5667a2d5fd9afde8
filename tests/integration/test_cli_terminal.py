"""`loaderctl` as people see it: the screen of a real terminal while loads and `top` run."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from loader_service import demo
from loader_service.v1 import coordinator_pb2, types_pb2
from tests.cluster import Cluster, wait_for
from tests.fake_coordinator import FakeCoordinator, fake_coordinator
from tests.messages import failed, streaming
from tests.terminal import CTRL_C, Terminal, terminal


@pytest.fixture
def fake() -> Iterator[FakeCoordinator]:
    with fake_coordinator() as running:
        yield running


def committed() -> types_pb2.Load:
    load = streaming((1.0, 1.0))
    load.state = types_pb2.LOAD_STATE_SUCCEEDED
    load.ClearField("slowest_rank")
    load.ClearField("eta_duration")
    for rank in load.ranks:
        rank.state = types_pb2.RANK_STATE_COMMITTED
        rank.verified = True
        rank.bytes_per_second = 0.0
    return load


def bars(rows: list[str]) -> list[str]:
    return [row for row in rows if re.search("[━┄]", row)]


def check_tidy(shown: Terminal, columns: int) -> None:
    """The cursor is back, nothing is left over, and no bar has been drawn twice."""
    assert not shown.cursor_hidden
    assert shown.raw.endswith(b"\n")
    assert len(bars(shown.rows)) == 2
    assert all(len(row) <= columns for row in shown.rows)
    assert "\x1b" not in "".join(shown.rows)


@pytest.mark.parametrize("columns", [80, 40])
def test_a_load_has_a_bar_a_rank_and_a_mark_while_one_stalls(
    fake: FakeCoordinator, columns: int
) -> None:
    with terminal(fake.endpoint, "load", "m", "--tp", "2", columns=columns) as shown:
        fake.put(types_pb2.Load(load_id="load-5e5e5e5e", state=types_pb2.LOAD_STATE_PENDING))
        assert shown.wait_for(lambda rows: "pending" in rows[0]) == ["load-5e5e5e5e pending"]
        assert shown.cursor_hidden
        fake.put(streaming((0.5, 0.25)))
        rows = shown.wait_for(lambda rows: "streaming" in rows[0])
        assert len(rows) == 3
        first, second = bars(rows)
        assert first.count("━") > second.count("━") > 0
        fake.put(streaming((0.9, 0.25), stalled=[1]))
        first, second = bars(shown.wait_for(lambda rows: "STALLED" in rows[2]))
        assert "STALLED" not in first
        assert ("nothing for 4 s" in second) == (columns == 80)
        fake.put(streaming((1.0, 0.5)))
        rows = shown.wait_for(lambda rows: "50 %" in rows[0])
        assert "STALLED" not in "".join(rows)
        assert len(rows) == 3
        fake.put(committed())
        assert shown.exit_code() == 0
        check_tidy(shown, columns)
        assert shown.rows[0].startswith("load-5e5e5e5e succeeded 100 %"[: columns - 1])
        assert shown.rows[3].startswith("load-5e5e5e5e  SUCCEEDED")


def test_a_load_that_fails_leaves_a_tidy_screen_with_the_reason(fake: FakeCoordinator) -> None:
    with terminal(fake.endpoint, "load", "m", "--tp", "2") as shown:
        fake.put(streaming())
        shown.wait_for(lambda rows: len(bars(rows)) == 2)
        load = streaming((0.8, 0.3))
        load.state = types_pb2.LOAD_STATE_FAILED
        load.failure.CopyFrom(failed().failure)
        load.ranks[0].state = types_pb2.RANK_STATE_FAILED
        load.ranks[1].state = types_pb2.RANK_STATE_CANCELLED
        fake.put(load)
        assert shown.exit_code() == 1
        check_tidy(shown, 80)
        assert [row.split()[2] for row in bars(shown.rows)] == ["failed", "cancelled"]
        assert "DIGEST_MISMATCH" in "".join(shown.rows[3:])


@pytest.mark.parametrize("colours", [True, False])
def test_colours_are_left_out_where_nobody_wants_them(fake: FakeCoordinator, colours: bool) -> None:
    environment = {} if colours else {"NO_COLOR": "1"}
    with terminal(fake.endpoint, "watch", "load-1", environment=environment) as shown:
        fake.put(streaming((0.5, 0.5), stalled=[1]), committed())
        assert shown.exit_code() == 0
        assert (shown.colours() == {"default"}) == (not colours)
        assert len(bars(shown.rows)) == 2


def test_a_dumb_terminal_gets_lines(fake: FakeCoordinator) -> None:
    with terminal(fake.endpoint, "watch", "load-1", environment={"TERM": "dumb"}) as shown:
        fake.put(streaming(), committed())
        assert shown.exit_code() == 0
        assert bars(shown.rows) == []
        assert b"\x1b" not in shown.raw
        assert shown.rows[0].startswith("load-5e5e5e5e streaming 25 %")


@pytest.mark.parametrize("cancel", [False, True])
def test_ctrl_c_says_what_becomes_of_the_load(fake: FakeCoordinator, cancel: bool) -> None:
    options = ["--cancel-on-interrupt"] if cancel else []
    with terminal(fake.endpoint, "load", "m", *options) as shown:
        fake.put(streaming())
        shown.wait_for(lambda rows: len(bars(rows)) == 2)
        shown.press(CTRL_C)
        assert shown.exit_code() == 130
        check_tidy(shown, 80)
        told = "".join(shown.rows)
        asked = [
            each for each in fake.requests if isinstance(each, coordinator_pb2.CancelLoadRequest)
        ]
        assert len(asked) == cancel
        if cancel:
            assert "load-5e5e5e5e is cancelled" in told
        else:
            assert "goes on; to cancel it: loaderctl cancel load-5e5e5e5e" in told
            assert "loaderctl watch load-5e5e5e5e" in told


def test_ctrl_c_is_130_also_when_the_load_cannot_be_cancelled(fake: FakeCoordinator) -> None:
    with terminal(fake.endpoint, "load", "m", "--cancel-on-interrupt") as shown:
        fake.put(streaming())
        shown.wait_for(lambda rows: len(bars(rows)) == 2)
        fake.away = True
        shown.press(CTRL_C)
        assert shown.exit_code() == 130
        told = "".join(shown.rows)
        assert "SHUTTING_DOWN" in told
        assert "may go on; to cancel it: loaderctl cancel load-5e5e5e5e" in told


def test_ctrl_c_before_the_load_is_accepted_says_where_it_would_be(fake: FakeCoordinator) -> None:
    with terminal(fake.endpoint, "load", "hang") as shown:
        wait_for(lambda: fake.requests or None)
        shown.press(CTRL_C)
        assert shown.exit_code() == 130
        assert "loaderctl get loads" in "".join(shown.rows)


def test_the_bars_of_a_real_load(shared_cluster: Cluster) -> None:
    model = str(demo.model_folder())
    with terminal(shared_cluster.endpoint, "load", model, "--tp", "2") as shown:
        assert shown.exit_code() == 0
        check_tidy(shown, 80)
        assert [row.split()[:3] for row in bars(shown.rows)] == [
            ["rank", "0", "committed"],
            ["rank", "1", "committed"],
        ]
        (load_id,) = {row.split()[0] for row in shown.rows if row.startswith("load-")}
    shared_cluster.unload(load_id)


@pytest.mark.parametrize(("columns", "key", "code"), [(80, "q", 0), (40, CTRL_C, 130)])
def test_top_fills_the_screen_and_gives_it_back(
    fake: FakeCoordinator, columns: int, key: str, code: int
) -> None:
    with terminal(fake.endpoint, "top", "--interval", "200ms", columns=columns) as shown:
        rows = shown.wait_for(lambda rows: any(row.startswith("host-1") for row in rows))
        assert shown.cursor_hidden
        assert rows[0].startswith(fake.endpoint)
        assert rows[2].startswith("3 loads: 1 FAILED, 1 STREAMING")
        fake.loads = [streaming((0.6, 0.5), stalled=[0])]
        rows = shown.wait_for(lambda rows: rows[2].startswith("1 load: 1 STREAMING"))
        assert rows[4].startswith("load-5e5e5e5e  STREAMING  50 %")
        assert not any(row.startswith("load-ffffffff") for row in rows)
        shown.press(key)
        assert shown.exit_code() == code
        # The cursor comes back, then the screen as it was before.
        assert shown.raw.endswith(b"\x1b[?25h\x1b[?1049l")


def test_top_goes_on_while_the_coordinator_is_away() -> None:
    with fake_coordinator() as fake, terminal(fake.endpoint, "top", "--interval", "200ms") as shown:
        shown.wait_for(lambda rows: any(row.startswith("host-1") for row in rows))
        fake.away = True
        rows = shown.wait_for(lambda rows: "SHUTTING_DOWN" in rows[1])
        assert any(row.startswith("host-1") for row in rows)
        fake.away = False
        shown.wait_for(lambda rows: not rows[1])
        shown.press("q")
        assert shown.exit_code() == 0


def test_top_of_a_coordinator_that_is_not_there_is_an_error_like_any_other() -> None:
    with terminal("127.0.0.1:1", "top") as shown:
        assert shown.exit_code() == 7
        assert "UNAVAILABLE" in "".join(shown.rows)
        assert b"1049h" not in shown.raw
