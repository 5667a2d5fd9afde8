"""Names for the shell's completion: loads, workers, contexts. Nothing to offer is never an error."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import typer

from loader_service.cli import connection
from loader_service.cli.connection import SETTINGS
from loader_service.cli.contexts import read_contexts

__all__ = ["complete_context", "complete_load", "complete_worker", "complete_workers"]

MOST_SECONDS = 1.0
"""Somebody waits at the keyboard."""


def complete_load(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the loads whose names begin so."""
    return _beginning(incomplete, _listed(ctx, "list_loads", "load_id"))


def complete_worker(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the workers whose names begin so."""
    return _beginning(incomplete, _listed(ctx, "list_workers", "worker_id"))


def complete_workers(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the list of workers that was begun, with each that its last name may become."""
    head, comma, last = incomplete.rpartition(",")
    taken = head.split(",")
    names = complete_worker(ctx, last)
    return [f"{head}{comma}{name}" for name in names if name not in taken]


def complete_context(incomplete: str) -> list[str]:
    """Return the contexts whose names begin so."""
    with contextlib.suppress(Exception):
        return _beginning(incomplete, read_contexts(os.environ).named)
    return []


def _listed(ctx: typer.Context, method: str, field: str) -> list[str]:
    # Whatever goes wrong, the shell must show nothing between the words that are being typed.
    with contextlib.suppress(Exception):
        # Imported here: the module brings gRPC, and verbs complete without it.
        from loader_service.cli.session import security_of
        from loader_service.client import LoaderClient

        flags = dict(_flags(ctx))
        settings = connection.resolve(flags, os.environ, read_contexts(os.environ))
        seconds = min(MOST_SECONDS, settings.timeout_seconds or MOST_SECONDS)
        with LoaderClient(settings.endpoint, seconds, security_of(settings)) as client:
            return [getattr(each, field) for each in getattr(client, method)()]
    return []


def _flags(ctx: Any) -> Iterator[tuple[str, str | bool]]:
    """Yield the connection options of the command line; those behind the verb come last, and count."""
    if ctx.parent is not None:
        yield from _flags(ctx.parent)
    fields = {"context": "context"} | {setting.key: setting.field for setting in SETTINGS}
    for key, field in fields.items():
        if (value := ctx.params.get(field)) is not None:
            yield key, value


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
