"""Telling whether files have changed since they were read."""

from __future__ import annotations

from pathlib import Path

__all__ = ["file_stamp"]


def file_stamp(*names: str) -> tuple[tuple[int, int, int], ...]:
    """Return a value that changes with any of the files: time, size and inode of each.

    Time alone is not enough: the kernel's clock for files ticks every few milliseconds. Links are
    followed, so that a link that is turned to another file counts. A file that is not there is zeros.
    """
    stamps = []
    for name in names:
        try:
            status = Path(name).stat()
            stamps.append((status.st_mtime_ns, status.st_size, status.st_ino))
        except OSError:
            stamps.append((0, 0, 0))
    return tuple(stamps)
