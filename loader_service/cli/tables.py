"""Tables for people, made from the same documents as the JSON output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from loader_service.sizes import format_size

__all__ = [
    "print_checkpoint",
    "print_load",
    "print_loads",
    "print_plan",
    "print_tensors",
    "print_workers",
]

_Column = tuple[str, Callable[[Mapping[str, Any]], str]]


def print_load(console: Console, load: Mapping[str, Any]) -> None:
    """Print one load: a line, then a row a rank."""
    seconds = load["transferSeconds"]
    console.print(
        f"{load['loadId']}  {load['state']}  {load['architecture'] or '-'}  tp={load['tp']}  "
        f"{format_size(load['sourceBytes'])} read once, {format_size(load['wireBytes'])} sent in "
        f"{seconds:.2f} s",
        highlight=False,
    )
    rows = [{**rank, "seconds": seconds} for rank in load["ranks"]]
    _print(
        console,
        rows,
        [
            ("RANK", lambda rank: str(rank["rank"])),
            ("WORKER", lambda rank: rank["workerId"]),
            ("TENSORS", lambda rank: str(rank["tensors"])),
            ("RESIDENT", lambda rank: format_size(rank["residentBytes"])),
            ("WIRE", lambda rank: format_size(rank["doneBytes"])),
            ("GB/s", lambda rank: _rate(rank["doneBytes"], rank["seconds"])),
            ("TRANSPORT", lambda rank: rank["transport"] or "-"),
            ("STATUS", lambda rank: _rank_status(load["state"], rank)),
        ],
    )
    for warning in load["warnings"]:
        console.print(f"warning: {warning}", highlight=False)
    if load["failure"]:
        console.print(
            f"{load['failure']['reason']}: {load['failure']['message']}", highlight=False
        )


def print_loads(console: Console, loads: Sequence[Mapping[str, Any]]) -> None:
    """Print a row a load."""
    _print(
        console,
        loads,
        [
            ("LOAD", lambda load: load["loadId"]),
            ("STATE", lambda load: load["state"]),
            ("PATH", lambda load: load["path"]),
            ("TP", lambda load: str(load["tp"])),
            ("RESIDENT", lambda load: format_size(load["residentBytes"])),
            ("WORKERS", lambda load: ",".join(rank["workerId"] for rank in load["ranks"]) or "-"),
        ],
    )


def print_workers(console: Console, workers: Sequence[Mapping[str, Any]]) -> None:
    """Print a row a worker."""
    _print(
        console,
        workers,
        [
            ("WORKER", lambda worker: worker["workerId"]),
            ("STATE", lambda worker: worker["state"]),
            ("DEVICE", lambda worker: worker["device"]),
            ("ADDRESS", lambda worker: worker["address"]),
            ("LOAD", lambda worker: worker["loadId"] or "-"),
            ("RESIDENT", lambda worker: format_size(worker["residentBytes"])),
            ("FREE", lambda worker: format_size(worker["freeBytes"])),
            ("TRANSPORT", lambda worker: worker["transport"] or "-"),
        ],
    )


def print_tensors(console: Console, tensors: Sequence[Mapping[str, Any]]) -> None:
    """Print a row a slice."""
    _print(
        console,
        tensors,
        [
            ("RANK", lambda tensor: str(tensor["rank"])),
            ("NAME", lambda tensor: "=".join([tensor["name"], *tensor["aliases"]])),
            ("DTYPE", lambda tensor: tensor["dtype"]),
            ("SHAPE", lambda tensor: _shape(tensor["shape"])),
            ("BYTES", lambda tensor: str(tensor["bytes"])),
            ("PADDING", lambda tensor: str(tensor["paddingRows"])),
            ("SHA256", lambda tensor: tensor["sha256"] or "-"),
        ],
    )


def print_plan(console: Console, plan: Mapping[str, Any]) -> None:
    """Print a line, a row a rank, and the tensors when they were asked for."""
    console.print(
        f"{plan['architecture']}  tp={plan['tp']}  {format_size(plan['sourceBytes'])} to read",
        highlight=False,
    )
    _print(
        console,
        plan["ranks"],
        [
            ("RANK", lambda rank: str(rank["rank"])),
            ("TENSORS", lambda rank: str(rank["tensors"])),
            ("WIRE", lambda rank: format_size(rank["wireBytes"])),
            ("RESIDENT", lambda rank: format_size(rank["residentBytes"])),
            ("REPLICATED", lambda rank: format_size(rank["replicatedBytes"])),
            ("STAGING", lambda rank: format_size(rank["stagingPeakBytes"])),
        ],
    )
    for warning in plan["warnings"]:
        console.print(f"warning: {warning}", highlight=False)
    if "tensors" in plan:
        _print(
            console,
            plan["tensors"],
            [
                ("NAME", lambda tensor: tensor["name"]),
                ("ROLE", lambda tensor: tensor["role"]),
                ("CUT", lambda tensor: tensor["cut"]),
                ("REASON", lambda tensor: tensor["reason"]),
            ],
        )


def print_checkpoint(console: Console, checkpoint: Mapping[str, Any]) -> None:
    """Print a line and a row a tensor."""
    console.print(
        f"{checkpoint['architecture'] or 'no architecture'}  {checkpoint['tensorCount']} tensors  "
        f"{format_size(checkpoint['payloadBytes'])} in {len(checkpoint['files'])} files",
        highlight=False,
    )
    _print(
        console,
        checkpoint["tensors"],
        [
            ("NAME", lambda tensor: tensor["name"]),
            ("DTYPE", lambda tensor: tensor["dtype"]),
            ("SHAPE", lambda tensor: _shape(tensor["shape"])),
            ("BYTES", lambda tensor: str(tensor["bytes"])),
            ("FILE", lambda tensor: tensor["file"]),
        ],
    )
    for warning in checkpoint["warnings"]:
        console.print(f"warning: {warning}", highlight=False)


def _print(console: Console, rows: Sequence[Mapping[str, Any]], columns: list[_Column]) -> None:
    """Print rows without lines or colours; in a pipe nothing is cut off or wrapped."""
    table = Table(box=None, pad_edge=False, header_style="")
    for title, _ in columns:
        table.add_column(title, overflow="fold", no_wrap=not console.is_terminal)
    for row in rows:
        table.add_row(*(text(row) for _, text in columns))
    if console.is_terminal:
        console.print(table, highlight=False, markup=False)
    else:
        console.print(table, highlight=False, markup=False, width=10_000, soft_wrap=True)


def _rank_status(state: str, rank: Mapping[str, Any]) -> str:
    if rank["verified"]:
        return "verified"
    return "not verified" if state in ("FAILED", "CANCELLED") else "receiving"


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.2f}" if seconds else "-"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
