"""What others write is cut, and stays on one line of the log."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from loader_service.logs import log_to_stderr
from loader_service.texts import cut, short_warnings


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
    log_to_stderr("coordinator")
    try:
        raise ValueError("inner")
    except ValueError:
        root.exception("load %s", "x\n2026-12-01 INFO coordinator: all is well\x1b[2J")
    root.error("%s", "z" * 1_000_000)
    first, *trace, last = stream.getvalue().splitlines()
    assert "x\\n2026-12-01 INFO coordinator: all is well\\x1b[2J" in first
    assert trace[0].startswith("Traceback")
    assert len(last) < 10_000
