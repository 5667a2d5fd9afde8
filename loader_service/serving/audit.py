"""The audit log: one JSON line for every call that changes something, refused ones included."""

from __future__ import annotations

import datetime as dt
import json
import logging
import os
from pathlib import Path
from typing import Any

import grpc

__all__ = ["AuditLog"]

_log = logging.getLogger(__name__)

_MOST_CHARACTERS, _MOST_VALUES = 256, 64
"""Longer texts and lists are cut: callers choose them, and the log must not grow by their choice."""

_FIELDS = ("load_id", "worker_id", "path", "tp", "worker_ids", "address")


class AuditLog:
    """Appends to a file, or to the process's log without one.

    The file is opened for every line, so that it can be moved away at any time.
    """

    def __init__(self, path: str) -> None:
        """Write to `path`; an empty one is the process's log.

        Raises:
            OSError: the file cannot be written.
        """
        self._path = Path(path) if path else None
        if self._path is not None:
            os.close(_open_private(str(self._path), os.O_WRONLY | os.O_CREAT))

    def write(
        self,
        *,
        method: str,
        identity: str,
        peer: str,
        request_id: str,
        code: grpc.StatusCode,
        reason: str,
        request: Any,
        response: Any,
    ) -> None:
        """Record a call; a log that cannot be written is reported, and the call goes on."""
        entry: dict[str, Any] = {
            "time": dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
            "identity": identity,
            "peer": peer,
            "method": method.rpartition("/")[2],
            "requestId": request_id,
            "code": code.name,
        }
        if reason:
            entry["reason"] = reason
        # A request of many messages begins with a header.
        about = getattr(request, "header", request)
        for field in _FIELDS:
            value = getattr(about, field, None)
            if value:
                entry[field] = _cut(value)
        # A load gets its name from the answer.
        if load := getattr(response, "load", None):
            entry["load_id"] = load.load_id
        line = json.dumps(entry)
        if self._path is None:
            _log.info("%s", line)
            return
        try:
            with open(self._path, "a", encoding="utf-8", opener=_open_private) as file:
                file.write(f"{line}\n")
        except OSError as error:
            _log.error("the audit log cannot be written: %s; %s", error, line)


def _open_private(path: str, flags: int) -> int:
    """Open for nobody but the owner, also when the file was moved away and is made anew."""
    return os.open(path, flags, 0o600)


def _cut(value: Any) -> Any:
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        return value[:_MOST_CHARACTERS]
    return [text[:_MOST_CHARACTERS] for text in value[:_MOST_VALUES]]
