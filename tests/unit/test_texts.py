"""What others write is cut, and stays on one line of the log."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from loader_service.cli.documents import workers_document
from loader_service.cli.output import WORKERS, Format, complain, show
from loader_service.logs import log_to_stderr
from loader_service.texts import cut, short_warnings
from loader_service.v1 import types_pb2


def test_a_text_is_cut_to_bytes_between_characters() -> None:
    assert cut("short", 5) == "short"
    assert cut("longer", 5) == "lo…"
    for most in range(3, 40):
        assert len(cut("ä漢🙂" * 20, most).encode()) <= most
    assert cut("\udcff", 10) == "\\udcff"


def test_warnings_are_few_and_short() -> None:
    short = short_warnings(["w" * 5000] * 5000)
    assert len(short) == 100
    assert max(map(len, short)) <= 1000


def test_a_message_cannot_forge_a_line_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    log_to_stderr("coordinator 100%d")
    try:
        raise ValueError(
            "2026-12-01\n2026-12-01 INFO coordinator: all is well\x1b[2J" + "z" * 10**6
        )
    except ValueError:
        root.exception("load %s", "x\n2026-12-01 INFO coordinator: all is well\x1b[2J")
    root.error("%s", "z" * 1_000_000)
    first, *trace, last = stream.getvalue().splitlines()
    assert "x\\n2026-12-01 INFO coordinator: all is well\\x1b[2J" in first
    assert trace[0] == "  Traceback (most recent call last):"
    assert all(line.startswith("  ") and line.isprintable() for line in trace)
    assert max(map(len, trace)) < 10_000
    assert "ERROR coordinator 100%d: zzz" in last
    assert len(last) < 10_000


def test_what_others_write_does_not_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    name = "evil\x1b[2J\r\n\u202ename"
    workers = [types_pb2.Worker(worker_id=each) for each in (name, "ä漢🙂")]
    document = workers_document(workers)
    for output in (Format.TABLE, Format.WIDE, Format.NAME):
        show(WORKERS, document, output)
    complain(f"no such worker: {name}")
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert set(text) - {"\n"} == {letter for letter in text if letter.isprintable()}
        assert "evil\\x1b[2J\\r" in text
    assert printed.out.count("ä漢🙂") == 3
