"""Verbs that show the cluster, and those that take workers out of service."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

import typer

from loader_service import addresses
from loader_service.cli import documents
from loader_service.cli import health as checks
from loader_service.cli.names import complete_worker
from loader_service.cli.options import (
    AllowTrailingBytes,
    LoadId,
    Path,
    RequestId,
    new_app,
    seconds_above_0,
    verb,
)
from loader_service.cli.output import (
    CHECKPOINT,
    HEALTH,
    LOAD_DETAILS,
    LOADS,
    TENSORS,
    WORKER,
    WORKER_DETAILS,
    WORKERS,
    Format,
)
from loader_service.cli.session import EXIT_UNAVAILABLE, Session
from loader_service.cli.top import follow
from loader_service.errors import InvalidRequest

__all__ = [
    "app",
    "describe_load",
    "describe_worker",
    "drain_worker",
    "get_loads",
    "get_workers",
    "health",
    "inspect",
    "tensors",
    "top",
    "undrain_worker",
]

app = new_app("The cluster.")
_get = new_app("List loads or workers.", example="loaderctl get loads")
_describe = new_app(
    "Show everything about a load or a worker.", example="loaderctl describe load load-1a2b3c4d"
)
_drain = new_app("Give a worker no new loads.", example="loaderctl drain worker w0")
_undrain = new_app("Let a drained worker take loads again.", example="loaderctl undrain worker w0")
app.add_typer(_get, name="get")
app.add_typer(_describe, name="describe")
app.add_typer(_drain, name="drain")
app.add_typer(_undrain, name="undrain")

_LIST = (Format.TABLE, Format.WIDE, Format.JSON, Format.JSONL, Format.YAML, Format.NAME)
_DETAILS = (Format.TABLE, Format.JSON, Format.YAML)
_ONE = (Format.TABLE, Format.WIDE, Format.JSON, Format.YAML, Format.NAME)

WorkerId = Annotated[
    str,
    typer.Argument(metavar="WORKER", help="Name of the worker.", autocompletion=complete_worker),
]


@verb(_get, _LIST, example="loaderctl get loads -o name", name="loads")
async def get_loads(session: Session) -> None:
    """List loads, newest first."""
    session.show(LOADS, documents.loads_document(await session.client.list_loads()))


@verb(_get, _LIST, example="loaderctl get workers -o wide", name="workers")
async def get_workers(session: Session) -> None:
    """List workers with their memory."""
    session.show(WORKERS, documents.workers_document(await session.client.list_workers()))


@verb(_describe, _DETAILS, example="loaderctl describe load load-1a2b3c4d", name="load")
async def describe_load(session: Session, load_id: LoadId) -> None:
    """Show everything about a load."""
    session.show(LOAD_DETAILS, documents.load_document(await session.client.get_load(load_id)))


@verb(_describe, _DETAILS, example="loaderctl describe worker w0", name="worker")
async def describe_worker(session: Session, worker_id: WorkerId) -> None:
    """Show everything about a worker."""
    worker = await session.client.get_worker(worker_id)
    session.show(WORKER_DETAILS, documents.worker_document(worker))


@verb(_drain, _ONE, example="loaderctl drain worker w0", name="worker")
async def drain_worker(session: Session, worker_id: WorkerId, request_id: RequestId = "") -> None:
    """Give a worker no new load; one that it holds stays."""
    worker = await session.client.drain_worker(worker_id, request_id=request_id)
    session.show(WORKER, documents.worker_document(worker))


@verb(_undrain, _ONE, example="loaderctl undrain worker w0", name="worker")
async def undrain_worker(session: Session, worker_id: WorkerId, request_id: RequestId = "") -> None:
    """Let a drained worker take loads again."""
    worker = await session.client.undrain_worker(worker_id, request_id=request_id)
    session.show(WORKER, documents.worker_document(worker))


@verb(
    app,
    (Format.TABLE, Format.JSON, Format.JSONL, Format.YAML),
    example="loaderctl tensors load-1a2b3c4d --digest",
)
async def tensors(
    session: Session,
    load_id: LoadId,
    digest: Annotated[bool, typer.Option("--digest", help="SHA-256 of each slice.")] = False,
) -> None:
    """List the slices that a load's workers hold."""
    slices = await session.client.list_tensors(load_id, include_sha256=digest)
    session.show(TENSORS, documents.tensors_document(slices))


@verb(app, _LIST, example="loaderctl inspect llama-8b")
async def inspect(
    session: Session,
    path: Path,
    allow_trailing_bytes: AllowTrailingBytes = False,
) -> None:
    """List a checkpoint's tensors from its headers."""
    answer = await session.client.inspect(path, allow_trailing_bytes=allow_trailing_bytes)
    session.show(CHECKPOINT, documents.checkpoint_document(answer))


@verb(app, (Format.TABLE, Format.JSON, Format.JSONL), example="loaderctl top --interval 1s")
async def top(
    session: Session,
    interval: Annotated[
        float,
        typer.Option(
            metavar="TIME",
            parser=seconds_above_0,
            show_default=False,
            help="Between two looks.  [default: 2s]",
        ),
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
) -> None:
    """Show loads and workers over and over; q or Ctrl-C ends it."""
    await follow(session, interval, once=once)


@verb(
    app,
    (Format.TABLE, Format.JSON, Format.JSONL, Format.YAML),
    example="loaderctl health --worker 10.0.0.7:50052 --timeout 2s",
)
async def health(
    session: Session,
    worker: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Ask this worker, not the coordinator.")
    ] = "",
    all_servers: Annotated[
        bool, typer.Option("--all", help="Ask the coordinator and every worker that it lists.")
    ] = False,
) -> None:
    """Ask servers whether they serve: exit code 0 or 7."""
    if worker and all_servers:
        raise typer.BadParameter("--worker and --all exclude each other")
    targets: Sequence[checks.Target]
    if worker:
        try:
            addresses.split(worker)
        except InvalidRequest:
            raise typer.BadParameter(
                f"--worker {worker!r} is not HOST:PORT; `loaderctl get workers -o wide` shows addresses"
            ) from None
        targets = [checks.Target("worker", worker, checks.WORKER, session.security)]
    else:
        endpoint = session.settings.endpoint
        targets = [checks.Target("coordinator", endpoint, checks.COORDINATOR, session.security)]
    answers = [await checks.check(session, target) for target in targets]
    if all_servers and answers[0].serving:
        listed = await session.client.list_workers()
        security = session.security.for_other_servers()
        workers = [
            checks.Target(each.worker_id, each.address, checks.WORKER, security) for each in listed
        ]
        answers += await asyncio.gather(*(checks.check(session, each) for each in workers))
    document = documents.health_document(answers)
    session.show(HEALTH, document)
    if not document["serving"]:
        raise typer.Exit(EXIT_UNAVAILABLE)
