"""Tables for people, made from the same documents as the JSON output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

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


def print_load(out: TextIO, load: Mapping[str, Any]) -> None:
    """Print one load: a line, then a row a rank."""
    seconds = load["transferSeconds"]
    print(
        f"{load['loadId']}  {load['state']}  {load['architecture'] or '-'}  tp={load['tp']}  "
        f"{format_size(load['sourceBytes'])} read once, {format_size(load['wireBytes'])} sent in "
        f"{seconds:.2f} s",
        file=out,
    )
    rows = [{**rank, "seconds": seconds} for rank in load["ranks"]]
    _print(
        out,
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
        print(f"warning: {warning}", file=out)
    if load["failure"]:
        print(f"{load['failure']['reason']}: {load['failure']['message']}", file=out)


def print_loads(out: TextIO, loads: Sequence[Mapping[str, Any]]) -> None:
    """Print a row a load."""
    _print(
        out,
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


def print_workers(out: TextIO, workers: Sequence[Mapping[str, Any]]) -> None:
    """Print a row a worker."""
    _print(
        out,
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


def print_tensors(out: TextIO, tensors: Sequence[Mapping[str, Any]]) -> None:
    """Print a row a slice."""
    _print(
        out,
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


def print_plan(out: TextIO, plan: Mapping[str, Any]) -> None:
    """Print a line, a row a rank, and the tensors when they were asked for."""
    print(
        f"{plan['architecture']}  tp={plan['tp']}  {format_size(plan['sourceBytes'])} to read",
        file=out,
    )
    _print(
        out,
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
        print(f"warning: {warning}", file=out)
    if "tensors" in plan:
        _print(
            out,
            plan["tensors"],
            [
                ("NAME", lambda tensor: tensor["name"]),
                ("ROLE", lambda tensor: tensor["role"]),
                ("CUT", lambda tensor: tensor["cut"]),
                ("REASON", lambda tensor: tensor["reason"]),
            ],
        )


def print_checkpoint(out: TextIO, checkpoint: Mapping[str, Any]) -> None:
    """Print a line and a row a tensor."""
    print(
        f"{checkpoint['architecture'] or 'no architecture'}  {checkpoint['tensorCount']} tensors  "
        f"{format_size(checkpoint['payloadBytes'])} in {len(checkpoint['files'])} files",
        file=out,
    )
    _print(
        out,
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
        print(f"warning: {warning}", file=out)


def _print(out: TextIO, rows: Sequence[Mapping[str, Any]], columns: list[_Column]) -> None:
    """Print rows as plain columns; no cell is ever cut, so that the output can be piped on."""
    cells = [[title for title, _ in columns]] + [[text(row) for _, text in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(padded).rstrip(), file=out)


def _rank_status(state: str, rank: Mapping[str, Any]) -> str:
    if rank["verified"]:
        return "verified"
    return "not verified" if state in ("FAILED", "CANCELLED") else "receiving"


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.2f}" if seconds else "-"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
