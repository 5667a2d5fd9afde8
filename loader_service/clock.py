"""The Clock port: time that tests can move."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Two clocks, both in seconds."""

    def monotonic(self) -> float:
        """Time that never jumps."""
        ...

    def time(self) -> float:
        """Wall-clock time since the epoch."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """Time that never jumps."""
        return time.monotonic()

    def time(self) -> float:
        """Wall-clock time since the epoch."""
        return time.time()
