"""Logging of the server processes."""

from __future__ import annotations

import logging
import sys

__all__ = ["log_to_stderr"]


def log_to_stderr(name: str) -> None:
    """Send the log of a server called `name` to stderr."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s {name}: %(message)s",
    )
