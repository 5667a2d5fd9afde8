"""Writes the sync client from the async one, so that their surfaces cannot drift apart.

Run by `make generate`. Names and keywords are replaced token by token; the text in between stays.
"""

from __future__ import annotations

import io
import tokenize
from pathlib import Path

__all__ = ["SOURCE", "TARGET", "make_sync"]

SOURCE = Path(__file__).with_name("_async.py")
TARGET = Path(__file__).with_name("_sync.py")

_DROPPED = {"async", "await"}
_RENAMED = {
    "AsyncGenerator": "Generator",
    "AsyncEndpoint": "SyncEndpoint",
    "AsyncIterator": "Iterator",
    "AsyncLoaderClient": "LoaderClient",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
}
_TEXTS = {
    '"""The client for asyncio. `_sync.py` is made from this file by `make generate`."""': (
        '"""The client for ordinary code. Made from `_async.py` by `make generate`; do not edit."""'
    ),
    "Calls one coordinator, from one event loop. An async context manager.": (
        "Calls one coordinator; threads may share it. A context manager."
    ),
    '"AsyncLoaderClient"': '"LoaderClient"',
    "AsyncGenerator[types_pb2.Load, None]": "Generator[types_pb2.Load, None, None]",
}


def make_sync(source: str) -> str:
    """Return the sync twin of the async module `source`."""
    for text, replacement in _TEXTS.items():
        source = source.replace(text, replacement)
    lines = source.splitlines(keepends=True)
    # From the end, so that earlier positions stay valid.
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(source).readline))):
        row, start = token.start[0] - 1, token.start[1]
        if token.type != tokenize.NAME:
            continue
        if token.string in _DROPPED:
            line = lines[row]
            lines[row] = line[:start] + line[token.end[1] :].removeprefix(" ")
        elif token.string in _RENAMED:
            line = lines[row]
            lines[row] = line[:start] + _RENAMED[token.string] + line[token.end[1] :]
    return "".join(lines)


if __name__ == "__main__":
    TARGET.write_text(make_sync(SOURCE.read_text(encoding="utf-8")), encoding="utf-8")
