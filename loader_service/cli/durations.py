"""Spans of time as people write and read them."""

from __future__ import annotations

import re

__all__ = ["format_seconds", "parse_seconds"]

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}


def parse_seconds(text: str) -> float:
    """Return the seconds of `500ms`, `60s`, `2m`, `1.5h`; a bare number is seconds.

    Raises:
        ValueError: it is no such text.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|)", text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a time such as 500ms, 60s or 2m")
    return float(match[1]) * _UNITS[match[2]]


def format_seconds(seconds: float) -> str:
    """Return whole seconds as `12 s`, `3:05` or `1:02:03`."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
