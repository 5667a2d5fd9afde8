"""One verb that calls the coordinator: connection, exit codes, what is said when it fails."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import typer

from loader_service.channel_security import ChannelSecurity
from loader_service.cli import connection, documents
from loader_service.cli.connection import EXIT_USAGE, ConnectionSettings, SettingsError
from loader_service.cli.contexts import read_contexts
from loader_service.cli.hints import hint
from loader_service.cli.invocation import Invocation
from loader_service.cli.output import Format, View, complain, show
from loader_service.client import AsyncLoaderClient
from loader_service.errors import InvalidRequest, LoaderError

__all__ = ["EXIT_FAILED", "EXIT_UNAVAILABLE", "Session", "exit_code", "run", "security_of"]

EXIT_FAILED = 1
EXIT_UNAVAILABLE = 7
EXIT_INTERRUPTED = 130
_EXIT_CODES = {
    grpc.StatusCode.NOT_FOUND: 3,
    grpc.StatusCode.INVALID_ARGUMENT: 4,
    grpc.StatusCode.FAILED_PRECONDITION: 4,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 4,
    grpc.StatusCode.ABORTED: 4,
    grpc.StatusCode.ALREADY_EXISTS: 4,
    grpc.StatusCode.PERMISSION_DENIED: 5,
    grpc.StatusCode.UNAUTHENTICATED: 5,
    grpc.StatusCode.DEADLINE_EXCEEDED: 6,
    grpc.StatusCode.UNAVAILABLE: EXIT_UNAVAILABLE,
}
_DOCUMENTS = (Format.JSON, Format.JSONL, Format.YAML)
_REFUSAL = View(lambda _: [])


def exit_code(error: LoaderError) -> int:
    """Return the exit code that tells a script what kind of error it was."""
    return _EXIT_CODES.get(error.status, EXIT_FAILED)


@dataclasses.dataclass(frozen=True, slots=True)
class Session:
    """What a verb works with.

    Attributes:
        client: the coordinator's.
        security: how other servers of the cluster are called.
        settings: where all of that came from.
        invocation: how to print.
    """

    client: AsyncLoaderClient
    security: ChannelSecurity
    settings: ConnectionSettings
    invocation: Invocation

    def show(self, view: View, document: Any) -> None:
        """Print a document."""
        show(view, document, self.invocation.output)

    def note(self, text: str) -> None:
        """Print a line to stderr that `--quiet` leaves out."""
        if not self.invocation.quiet:
            complain(text)

    def explain(self, error: LoaderError) -> None:
        """Print why something failed, and what to do about it."""
        _explain(error, self.settings.endpoint, self.invocation)


def run(invocation: Invocation, work: Callable[[Session], Coroutine[Any, Any, None]]) -> None:
    """Run a verb's coroutine with a connection.

    Raises:
        typer.Exit: it failed or was interrupted; all has been said.
    """
    try:
        settings = connection.resolve(invocation.flags, os.environ, read_contexts(os.environ))
    except SettingsError as error:
        complain(str(error))
        raise typer.Exit(EXIT_USAGE) from None
    try:
        asyncio.run(_connected(settings, invocation, work))
    except _MisconfiguredError as error:
        _refuse(error.cause, settings, invocation)
        raise typer.Exit(EXIT_USAGE) from None
    except LoaderError as error:
        _refuse(error, settings, invocation)
        raise typer.Exit(exit_code(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


class _MisconfiguredError(Exception):
    """The connection settings cannot work, whatever the server says."""

    def __init__(self, cause: LoaderError) -> None:
        super().__init__(cause.message)
        self.cause = cause


async def _connected(
    settings: ConnectionSettings,
    invocation: Invocation,
    work: Callable[[Session], Coroutine[Any, Any, None]],
) -> None:
    try:
        security = security_of(settings)
        client = AsyncLoaderClient(settings.endpoint, settings.timeout_seconds, security)
    except InvalidRequest as error:
        raise _MisconfiguredError(error) from error
    if invocation.verbose:
        tls = "TLS" if security.uses_tls else "no TLS"
        complain(f"calling {settings.endpoint} ({settings.origins['endpoint']}, {tls})")
    async with client:
        await work(Session(client, security, settings, invocation))


def security_of(settings: ConnectionSettings) -> ChannelSecurity:
    """Return how servers are called.

    Raises:
        InvalidRequest: a file cannot be used, which is found before anything is sent.
    """
    security = ChannelSecurity(
        tls=settings.tls,
        ca_cert=settings.tls_ca_cert,
        cert=settings.tls_cert,
        key=settings.tls_key,
        server_name=settings.tls_server_name,
        token_file=settings.token_file,
    )
    security.token()
    if security.uses_tls:
        security.credentials()
    return security


def _refuse(error: LoaderError, settings: ConnectionSettings, invocation: Invocation) -> None:
    """Print an error: as a document where one was asked for, and for people in any case."""
    if invocation.output in _DOCUMENTS:
        show(_REFUSAL, documents.refusal_document(error), invocation.output)
    _explain(error, settings.endpoint, invocation)


def _explain(error: LoaderError, endpoint: str, invocation: Invocation) -> None:
    complain(f"{error.reason}: {error.message}")
    if invocation.verbose:
        for key, value in sorted(error.metadata.items()):
            complain(f"  {key}: {value}")
    if advice := hint(error, endpoint):
        complain(f"hint: {advice}")
