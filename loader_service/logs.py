"""Logging of the server processes."""

from __future__ import annotations

import logging
import sys
from typing import Any

from loader_service.texts import cut, printable

__all__ = ["log_to_stderr"]

MOST_BYTES = 8192


def log_to_stderr(name: str) -> None:
    """Send the log of a server called `name` to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    name = name.replace("%", "%%")
    handler.setFormatter(_OneLine(f"%(asctime)s %(levelname)s {name}: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)


class _OneLine(logging.Formatter):
    """Keeps a message on one line, and every line bounded: parts come from others, who could forge lines.

    A traceback follows on lines of its own, which are indented, so that none looks like a message.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        return printable(cut(super().formatMessage(record), MOST_BYTES))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  {printable(cut(line, MOST_BYTES))}" for line in lines)
