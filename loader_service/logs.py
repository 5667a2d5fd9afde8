"""Logging of the server processes."""

from __future__ import annotations

import logging
import sys

from loader_service.texts import cut, printable

__all__ = ["log_to_stderr"]

MOST_BYTES = 8192


def log_to_stderr(name: str) -> None:
    """Send the log of a server called `name` to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(f"%(asctime)s %(levelname)s {name}: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)


class _OneLine(logging.Formatter):
    """Keeps a message on one line of bounded length: parts of it come from others, who could forge lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        record.message = printable(cut(record.message, MOST_BYTES))
        return super().formatMessage(record)
