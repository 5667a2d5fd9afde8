"""The metadata of the checkpoint that was looked at last, so that its pages do not read it again."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from loader_service.checkpoint.catalog import Checkpoint
from loader_service.checkpoint.files import resolve_path

__all__ = ["LatestCheckpoint"]

_Stamp = tuple[tuple[str, int, int, int], ...]


class LatestCheckpoint:
    """Remembers one checkpoint until a file of its folder changes. Thread-safe.

    For looking only: a load reads everything anew.
    """

    def __init__(self, model_root: str, read: Callable[[str, bool], Checkpoint]) -> None:
        """Remember what `read(path, allow_trailing_bytes)` returns."""
        self._model_root = model_root
        self._read = read
        self._lock = threading.Lock()
        self._key: tuple[str, bool, _Stamp] | None = None
        self._checkpoint: Checkpoint | None = None

    def read(self, path: str, allow_trailing_bytes: bool) -> Checkpoint:
        """Return the checkpoint at `path`; blocking.

        Raises:
            LoaderError: what reading raises; nothing is remembered then.
        """
        key = (path, allow_trailing_bytes, self._stamp(path))
        with self._lock:
            if key == self._key and self._checkpoint is not None:
                return self._checkpoint
        checkpoint = self._read(path, allow_trailing_bytes)
        with self._lock:
            # The stamp is older than what was read: a file changed in between is read again.
            self._key, self._checkpoint = key, checkpoint
        return checkpoint

    def _stamp(self, path: str) -> _Stamp:
        """Return names, sizes, times and inodes of all files of the checkpoint's folder."""
        real = resolve_path(path, self._model_root)
        folder = real if real.is_dir() else real.parent
        stamps = []
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    status = entry.stat()
                except OSError:
                    continue  # A dangling link; reading says what is wrong with it.
                stamps.append((entry.name, status.st_size, status.st_mtime_ns, status.st_ino))
        return tuple(sorted(stamps))
