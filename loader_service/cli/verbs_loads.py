"""Verbs that start, follow and end loads."""

from __future__ import annotations

import asyncio
import enum
import sys
from typing import Annotated

import typer

from loader_service.cli import documents
from loader_service.cli.hints import hint
from loader_service.cli.names import complete_workers
from loader_service.cli.options import (
    AllowTrailingBytes,
    LoadId,
    Path,
    RequestId,
    new_app,
    seconds,
    verb,
)
from loader_service.cli.output import LOAD, PLAN, Format
from loader_service.cli.progress import LoadProgress
from loader_service.cli.session import EXIT_FAILED, Session, exit_code
from loader_service.errors import LoaderError, WrongState, from_fields
from loader_service.v1 import types_pb2

__all__ = [
    "Source",
    "Tied",
    "Unknown",
    "app",
    "cancel",
    "load",
    "plan",
    "unload",
    "watch",
]

app = new_app("Loads.")

_ONE = (Format.TABLE, Format.WIDE, Format.JSON, Format.YAML, Format.NAME)
_FOLLOWED = (*_ONE, Format.JSONL)


class Tied(enum.StrEnum):
    """What to do with a head that the config says is tied."""

    VERIFY = "verify"
    OBEY_FILE = "obey-file"
    TRUST_CONFIG = "trust-config"


class Unknown(enum.StrEnum):
    """What to do with tensors that no plan knows."""

    REFUSE = "refuse"
    REPLICATE = "replicate"


class Source(enum.StrEnum):
    """Where the bytes may come from."""

    AUTO = "auto"
    COORDINATOR = "coordinator"
    LOCAL = "local"


Tp = Annotated[int, typer.Option(min=1, help="Ranks of the group.")]
Workers = Annotated[
    str,
    typer.Option(
        metavar="A,B",
        help="Workers in rank order.",
        show_default="idle ones",
        autocompletion=complete_workers,
    ),
]
Progress = Annotated[bool, typer.Option("--progress/--no-progress", help="Show how far it is.")]
TiedOption = Annotated[Tied, typer.Option("--tied", help="A head in the file although it is tied.")]
UnknownOption = Annotated[Unknown, typer.Option("--unknown", help="Tensors without a plan.")]


@verb(app, _FOLLOWED, example="loaderctl load llama-8b --tp 4 --wait-for-workers 60s")
async def load(
    session: Session,
    path: Path,
    tp: Tp = 1,
    workers: Workers = "",
    wait_for_workers: Annotated[
        float,
        typer.Option(
            metavar="TIME",
            parser=seconds,
            show_default=False,
            help="Wait for idle workers, e.g. 60s.  [default: 0s]",
        ),
    ] = 0.0,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Follow the load.")] = True,
    cancel_on_interrupt: Annotated[
        bool,
        typer.Option(
            "--cancel-on-interrupt", help="Cancel the load when this program ends before it."
        ),
    ] = False,
    progress: Progress = True,
    source: Annotated[
        Source,
        typer.Option(help="Who reads: the coordinator for all, or each worker what it keeps."),
    ] = Source.AUTO,
    tied: TiedOption = Tied.VERIFY,
    unknown: UnknownOption = Unknown.REFUSE,
    allow_trailing_bytes: AllowTrailingBytes = False,
    request_id: RequestId = "",
) -> None:
    """Put a checkpoint on a group of workers."""
    try:
        started = await session.client.load(
            path,
            tp,
            worker_ids=_names(workers),
            wait_for_workers_seconds=wait_for_workers,
            options=_plan_options(tied, unknown, allow_trailing_bytes),
            source=types_pb2.WeightSource.Value(f"WEIGHT_SOURCE_{source.name}"),
            request_id=request_id,
        )
    except asyncio.CancelledError:
        session.note("the load may have begun all the same; `loaderctl get loads` shows it")
        raise
    if not wait:
        session.show(LOAD, documents.load_document(started))
        return
    try:
        last = await _follow(session, started.load_id, progress, cancel_on_interrupt)
    except asyncio.CancelledError:
        await _interrupted(session, started.load_id, cancel_on_interrupt)
        raise
    _finish(session, last)


@verb(app, _FOLLOWED, example="loaderctl watch load-1a2b3c4d -o jsonl")
async def watch(session: Session, load_id: LoadId, progress: Progress = True) -> None:
    """Follow a load until it serves or has ended."""
    _finish(session, await _follow(session, load_id, progress, cancel_when_gone=False))


@verb(app, _ONE, example="loaderctl cancel load-1a2b3c4d")
async def cancel(session: Session, load_id: LoadId, request_id: RequestId = "") -> None:
    """End a load that does not serve yet."""
    ended = await session.client.cancel(load_id, request_id=request_id)
    session.show(LOAD, documents.load_document(ended))


@verb(app, _ONE, example="loaderctl unload load-1a2b3c4d")
async def unload(session: Session, load_id: LoadId, request_id: RequestId = "") -> None:
    """Give the memory of a load that serves back."""
    ended = await session.client.unload(load_id, request_id=request_id)
    session.show(LOAD, documents.load_document(ended))


@verb(
    app,
    (Format.TABLE, Format.WIDE, Format.JSON, Format.YAML),
    example="loaderctl plan llama-8b --tp 4 --workers w0,w1,w2,w3",
)
async def plan(
    session: Session,
    path: Path,
    tp: Tp = 1,
    workers: Workers = "",
    explain: Annotated[bool, typer.Option("--explain", help="Also list each tensor.")] = False,
    tied: TiedOption = Tied.VERIFY,
    unknown: UnknownOption = Unknown.REFUSE,
    allow_trailing_bytes: AllowTrailingBytes = False,
) -> None:
    """Show what a load would move, and whether it fits."""
    answer = await session.client.plan(
        path,
        tp,
        worker_ids=_names(workers),
        options=_plan_options(tied, unknown, allow_trailing_bytes),
        include_tensors=explain,
    )
    session.show(PLAN, documents.plan_document(answer, explain))
    if answer.admission.HasField("refusal"):
        advice = hint(_error(answer.admission.refusal), session.settings.endpoint)
        if advice:
            session.note(f"hint: {advice}")


async def _follow(
    session: Session, load_id: str, progress: bool, cancel_when_gone: bool
) -> types_pb2.Load:
    """Show a load while it runs, and return it as it is at last."""
    by_line = session.invocation.output is Format.JSONL
    # On a terminal the lines themselves tell, and bars would stand among them.
    enabled = progress and not session.invocation.quiet and not (by_line and sys.stdout.isatty())
    last = types_pb2.Load()
    with LoadProgress(enabled=enabled) as display:
        async for last in session.client.watch(load_id, cancel_when_gone=cancel_when_gone):
            document = documents.load_document(last)
            display.update(document)
            if by_line:
                session.show(LOAD, document)
    return last


async def _interrupted(session: Session, load_id: str, cancel: bool) -> None:
    """Say what becomes of a load whose follower is interrupted."""
    if not cancel:
        session.note(
            f"load {load_id} goes on; to cancel it: loaderctl cancel {load_id}; to follow it again: "
            f"loaderctl watch {load_id}"
        )
        return
    try:
        load = await _cancelled(session, load_id)
    except LoaderError as error:
        session.explain(error)
        session.note(f"load {load_id} may go on; to cancel it: loaderctl cancel {load_id}")
        return
    state = documents.enum_name(types_pb2.LoadState, load.state, "LOAD_STATE_")
    if load.state == types_pb2.LOAD_STATE_CANCELLED:
        session.note(f"load {load_id} is cancelled")
    else:
        session.note(f"load {load_id} is {state}; to give it back: loaderctl unload {load_id}")


async def _cancelled(session: Session, load_id: str) -> types_pb2.Load:
    try:
        return await session.client.cancel(load_id)
    except WrongState:
        # The end of the watch has cancelled it already, or it was committed before.
        return await session.client.get_load(load_id)


def _finish(session: Session, load: types_pb2.Load) -> None:
    """Print a settled load; leave with the code of its failure."""
    if session.invocation.output is not Format.JSONL:
        session.show(LOAD, documents.load_document(load))
    if load.state == types_pb2.LOAD_STATE_FAILED:
        error = _error(load.failure)
        session.explain(error)
        raise typer.Exit(exit_code(error))
    if load.state == types_pb2.LOAD_STATE_CANCELLED:
        raise typer.Exit(EXIT_FAILED)


def _error(failure: types_pb2.Failure) -> LoaderError:
    return from_fields(failure.reason, failure.message, failure.metadata)


def _names(text: str) -> list[str]:
    """Return the workers of a list; an empty text leaves the choice to the coordinator."""
    names = [name.strip() for name in text.split(",")] if text else []
    if not all(names):
        raise typer.BadParameter(f"--workers {text!r} has an empty name; it is A,B in rank order")
    return names


def _plan_options(
    tied: Tied, unknown: Unknown, allow_trailing_bytes: bool
) -> types_pb2.PlanOptions:
    tied_name = f"TIED_HEAD_POLICY_{tied.name}"
    unknown_name = f"UNKNOWN_TENSOR_POLICY_{unknown.name}"
    return types_pb2.PlanOptions(
        tied_head=types_pb2.TiedHeadPolicy.Value(tied_name),
        unknown_tensors=types_pb2.UnknownTensorPolicy.Value(unknown_name),
        allow_trailing_bytes=allow_trailing_bytes,
    )
