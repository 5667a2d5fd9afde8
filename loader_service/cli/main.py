"""Verbs of `loaderctl`. Data goes to stdout, progress and errors to stderr.

Exit codes: 0 done, 1 the operation failed, 2 usage, 3 not found, 4 precondition or conflict,
5 not allowed, 6 deadline, 7 unavailable, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import enum
import json
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any, TextIO

import grpc
import typer
from rich.console import Console

from loader_service.cli import documents, tables
from loader_service.cli.progress import LoadProgress
from loader_service.client import AsyncLoaderClient
from loader_service.errors import LoaderError, from_fields
from loader_service.v1 import types_pb2
from loader_service.version import __version__

__all__ = ["app", "main"]

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_EXIT_CODES = {
    grpc.StatusCode.NOT_FOUND: 3,
    grpc.StatusCode.INVALID_ARGUMENT: 4,
    grpc.StatusCode.FAILED_PRECONDITION: 4,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 4,
    grpc.StatusCode.ABORTED: 4,
    grpc.StatusCode.PERMISSION_DENIED: 5,
    grpc.StatusCode.UNAUTHENTICATED: 5,
    grpc.StatusCode.DEADLINE_EXCEEDED: 6,
    grpc.StatusCode.UNAVAILABLE: 7,
}


class Format(enum.StrEnum):
    """How data is printed."""

    TABLE = "table"
    JSON = "json"


class Tied(enum.StrEnum):
    """What to do with a head that the config says is tied."""

    VERIFY = "verify"
    OBEY_FILE = "obey-file"
    TRUST_CONFIG = "trust-config"


class Unknown(enum.StrEnum):
    """What to do with tensors that no plan knows."""

    REFUSE = "refuse"
    REPLICATE = "replicate"


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Loads checkpoints onto groups of workers, and shows what they hold.",
)
get_app = typer.Typer(no_args_is_help=True, help="List loads or workers.")
app.add_typer(get_app, name="get")

Endpoint = Annotated[
    str, typer.Option(envvar="LOADER_ENDPOINT", metavar="HOST:PORT", help="The coordinator.")
]
Output = Annotated[Format, typer.Option("--output", "-o", help="How to print.")]
TiedOption = Annotated[Tied, typer.Option("--tied", help="A head in the file although it is tied.")]
UnknownOption = Annotated[Unknown, typer.Option("--unknown", help="Tensors without a plan.")]
Trailing = Annotated[
    bool, typer.Option("--allow-trailing-bytes", help="Accept bytes after a file's last tensor.")
]
LoadId = Annotated[str, typer.Argument(metavar="LOAD")]
Path = Annotated[str, typer.Argument(help="On the coordinator, inside its model root.")]
DEFAULT_ENDPOINT = "127.0.0.1:50051"


@app.command()
def load(
    path: Path,
    tp: Annotated[int, typer.Option(min=1, help="Ranks of the group.")] = 1,
    workers: Annotated[str, typer.Option(metavar="A,B", help="Workers in rank order.")] = "",
    wait_for_workers: Annotated[
        str, typer.Option(metavar="TIME", help="Wait for idle workers, e.g. 60s.")
    ] = "0s",
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Follow the load.")] = True,
    cancel_on_interrupt: Annotated[
        bool, typer.Option("--cancel-on-interrupt", help="Ctrl-C cancels the load.")
    ] = False,
    progress: Annotated[bool, typer.Option("--progress/--no-progress")] = True,
    request_id: Annotated[str, typer.Option(help="Repeat with the same id: same load.")] = "",
    tied: TiedOption = Tied.VERIFY,
    unknown: UnknownOption = Unknown.REFUSE,
    allow_trailing_bytes: Trailing = False,
    output: Output = Format.TABLE,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
) -> None:
    """Put a checkpoint on a group of workers."""

    async def work(client: AsyncLoaderClient) -> None:
        started = await client.load(
            path,
            tp,
            worker_ids=[worker for worker in workers.split(",") if worker],
            wait_for_workers_seconds=_seconds(wait_for_workers),
            options=_options(tied, unknown, allow_trailing_bytes),
            request_id=request_id,
        )
        if not wait:
            _show_load(started, output)
            return
        interrupted = _Interrupted(client, started.load_id, cancel_on_interrupt)
        _finish(await _follow(client, started.load_id, progress, interrupted), output)

    _run(endpoint, work, output)


@app.command()
def watch(
    load_id: LoadId,
    progress: Annotated[bool, typer.Option("--progress/--no-progress")] = True,
    output: Output = Format.TABLE,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
) -> None:
    """Follow a load until it serves or has ended."""

    async def work(client: AsyncLoaderClient) -> None:
        _finish(await _follow(client, load_id, progress, None), output)

    _run(endpoint, work, output)


@app.command()
def cancel(
    load_id: LoadId, output: Output = Format.TABLE, endpoint: Endpoint = DEFAULT_ENDPOINT
) -> None:
    """End a load that is not committed yet."""

    async def work(client: AsyncLoaderClient) -> None:
        _show_load(await client.cancel(load_id), output)

    _run(endpoint, work, output)


@app.command()
def unload(
    load_id: LoadId, output: Output = Format.TABLE, endpoint: Endpoint = DEFAULT_ENDPOINT
) -> None:
    """Give a committed load's memory back."""

    async def work(client: AsyncLoaderClient) -> None:
        _show_load(await client.unload(load_id), output)

    _run(endpoint, work, output)


@get_app.command("loads")
def get_loads(output: Output = Format.TABLE, endpoint: Endpoint = DEFAULT_ENDPOINT) -> None:
    """List loads, newest first."""

    async def work(client: AsyncLoaderClient) -> None:
        document = documents.loads_document(await client.list_loads())
        _print(output, document, lambda out: tables.print_loads(out, document["loads"]))

    _run(endpoint, work, output)


@get_app.command("workers")
def get_workers(output: Output = Format.TABLE, endpoint: Endpoint = DEFAULT_ENDPOINT) -> None:
    """List workers with their memory."""

    async def work(client: AsyncLoaderClient) -> None:
        document = documents.workers_document(await client.list_workers())
        _print(output, document, lambda out: tables.print_workers(out, document["workers"]))

    _run(endpoint, work, output)


@app.command()
def tensors(
    load_id: LoadId,
    digest: Annotated[bool, typer.Option("--digest", help="SHA-256 of each slice.")] = False,
    output: Output = Format.TABLE,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
) -> None:
    """List the slices that a load's workers hold."""

    async def work(client: AsyncLoaderClient) -> None:
        slices = await client.list_tensors(load_id, include_sha256=digest)
        document = documents.tensors_document(slices)
        _print(output, document, lambda out: tables.print_tensors(out, document))

    _run(endpoint, work, output)


@app.command()
def plan(
    path: Path,
    tp: Annotated[int, typer.Option(min=1, help="Ranks of the group.")] = 1,
    explain: Annotated[bool, typer.Option("--explain", help="Also list each tensor.")] = False,
    tied: TiedOption = Tied.VERIFY,
    unknown: UnknownOption = Unknown.REFUSE,
    allow_trailing_bytes: Trailing = False,
    output: Output = Format.TABLE,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
) -> None:
    """Show what a load would move, without moving it."""

    async def work(client: AsyncLoaderClient) -> None:
        options = _options(tied, unknown, allow_trailing_bytes)
        answer = await client.plan(path, tp, options=options, include_tensors=explain)
        document = documents.plan_document(answer, explain)
        _print(output, document, lambda out: tables.print_plan(out, document))

    _run(endpoint, work, output)


@app.command()
def inspect(
    path: Path,
    allow_trailing_bytes: Trailing = False,
    output: Output = Format.TABLE,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
) -> None:
    """List a checkpoint's tensors from its headers."""

    async def work(client: AsyncLoaderClient) -> None:
        answer = await client.inspect(path, allow_trailing_bytes=allow_trailing_bytes)
        document = documents.checkpoint_document(answer)
        _print(output, document, lambda out: tables.print_checkpoint(out, document))

    _run(endpoint, work, output)


@app.command()
def version(output: Output = Format.TABLE) -> None:
    """Print this program's version."""
    _print(output, {"version": __version__}, lambda out: print(__version__, file=out))


class _Interrupted:
    """What Ctrl-C does to a load that is followed."""

    def __init__(self, client: AsyncLoaderClient, load_id: str, cancel: bool) -> None:
        self._client = client
        self._load_id = load_id
        self._cancel = cancel

    async def __call__(self) -> None:
        if self._cancel:
            await self._client.cancel(self._load_id)
            _complain(f"load {self._load_id} is cancelled")
        else:
            _complain(
                f"load {self._load_id} goes on; to cancel it: loaderctl cancel {self._load_id}"
            )


async def _follow(
    client: AsyncLoaderClient,
    load_id: str,
    progress: bool,
    interrupted: Callable[[], Awaitable[None]] | None,
) -> types_pb2.Load:
    last = types_pb2.Load()
    try:
        with LoadProgress(Console(stderr=True), enabled=progress) as display:
            async for last in client.watch(load_id):
                display.update(last)
    except asyncio.CancelledError:
        if interrupted is not None:
            await interrupted()
        raise
    return last


def _finish(load: types_pb2.Load, output: Format) -> None:
    """Print a settled load; leave with the code of its failure."""
    _show_load(load, output)
    if load.state == types_pb2.LOAD_STATE_FAILED:
        failure = load.failure
        raise typer.Exit(_exit_code(from_fields(failure.reason, failure.message, failure.metadata)))
    if load.state == types_pb2.LOAD_STATE_CANCELLED:
        raise typer.Exit(EXIT_FAILED)


def _show_load(load: types_pb2.Load, output: Format) -> None:
    document = documents.load_document(load)
    _print(output, document, lambda out: tables.print_load(out, document))


def _print(output: Format, document: object, print_table: Callable[[TextIO], None]) -> None:
    if output is Format.JSON:
        print(json.dumps(document, indent=2))
    else:
        print_table(sys.stdout)


def _run(
    endpoint: str, work: Callable[[AsyncLoaderClient], Coroutine[Any, Any, None]], output: Format
) -> None:
    async def connected() -> None:
        async with AsyncLoaderClient(endpoint) as client:
            await work(client)

    try:
        asyncio.run(connected())
    except LoaderError as error:
        if output is Format.JSON:
            print(json.dumps(documents.refusal_document(error), indent=2))
        _complain(f"{error.reason}: {error.message}")
        raise typer.Exit(_exit_code(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _exit_code(error: LoaderError) -> int:
    return _EXIT_CODES.get(error.status, EXIT_FAILED)


def _complain(text: str) -> None:
    print(f"loaderctl: {text}", file=sys.stderr)


def _seconds(text: str) -> float:
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
    number = text.rstrip("msh")
    try:
        return float(number) * units[text[len(number) :] or "s"]
    except (ValueError, KeyError):
        raise typer.BadParameter(f"{text!r} is not a time such as 500ms, 60s or 2m") from None


def _options(tied: Tied, unknown: Unknown, allow_trailing_bytes: bool) -> types_pb2.PlanOptions:
    tied_name = f"TIED_HEAD_POLICY_{tied.name}"
    unknown_name = f"UNKNOWN_TENSOR_POLICY_{unknown.name}"
    return types_pb2.PlanOptions(
        tied_head=types_pb2.TiedHeadPolicy.Value(tied_name),
        unknown_tensors=types_pb2.UnknownTensorPolicy.Value(unknown_name),
        allow_trailing_bytes=allow_trailing_bytes,
    )


def main() -> None:
    """Run the command."""
    app()


if __name__ == "__main__":
    main()
