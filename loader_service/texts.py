"""Texts that others choose, cut to what a message or a log can carry and a terminal can show."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MOST_NAME_BYTES", "cut", "printable", "short_warnings"]

MOST_NAME_BYTES = 256
_MOST_WARNINGS, _MOST_WARNING_BYTES = 100, 1000


def cut(text: str, most_bytes: int) -> str:
    """Return `text` if it has at most `most_bytes` in UTF-8, else its beginning and an ellipsis."""
    raw = text.encode(errors="backslashreplace")
    if len(raw) <= most_bytes:
        return raw.decode()
    return raw[: most_bytes - 3].decode(errors="ignore") + "…"


def printable(text: str) -> str:
    """Return `text` on one line, with escapes for what would steer a terminal or reorder letters."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def short_warnings(warnings: Sequence[str]) -> list[str]:
    """Return the first warnings of a checkpoint, each of bounded length: they quote what it holds."""
    return [cut(text, _MOST_WARNING_BYTES) for text in warnings[:_MOST_WARNINGS]]
