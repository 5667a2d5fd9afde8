"""Tables for people, made from the same documents as the JSON output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loader_service.cli.durations import format_seconds
from loader_service.sizes import format_size

__all__ = [
    "checkpoint_lines",
    "contexts_lines",
    "describe_load_lines",
    "describe_worker_lines",
    "health_lines",
    "load_lines",
    "loads_lines",
    "plan_lines",
    "settings_lines",
    "tensors_lines",
    "top_lines",
    "workers_lines",
]

_Row = Mapping[str, Any]
_Column = tuple[str, Callable[[_Row], str]]

_ENDED = ("FAILED", "CANCELLED", "UNLOADED")


def load_lines(load: _Row, wide: bool = False) -> list[str]:
    """Return one load: a line, then a row a rank."""
    head = f"{load['loadId']}  {load['state']}  {load['architecture'] or '-'}  tp={load['tp']}"
    if load["wireBytes"]:
        head = f"{head}  {_moved(load)} in {load['transferSeconds']:.2f} s"
    return [head, *_rank_lines(load, wide=wide), *_warnings(load)]


def describe_load_lines(load: _Row) -> list[str]:
    """Return everything about one load."""
    slowest, eta = load["slowestRank"], load["etaSeconds"]
    facts = [
        ("Load", load["loadId"]),
        ("State", f"{load['state']}, {_percent(load['progress'])}"),
        ("Path", load["path"]),
        ("Architecture", load["architecture"] or "-"),
        ("Group", f"tp={load['tp']}, replicas={load['replicas']}"),
        ("Owner", load["owner"] or "-"),
        ("Created", load["createTime"]),
        (
            "Bytes",
            f"{_moved(load)}, {format_size(load['residentBytes'])} resident",
        ),
        ("Time", f"{load['transferSeconds']:.2f} s transfer, {load['totalSeconds']:.2f} s in all"),
        ("Slowest rank", "-" if slowest is None else str(slowest)),
        ("Time left", "-" if eta is None else format_seconds(eta)),
    ]
    lost = [rank for rank in load["ranks"] if rank["state"] == "LOST"]
    if lost:
        names = ", ".join(f"rank {rank['rank']} on {rank['workerId']}" for rank in lost)
        facts.insert(2, ("Lost", names))
    lines = [*_facts(facts), *_failure_lines(load["failure"]), *_warnings(load)]
    ranks = _rank_lines(load, wide=True)
    return [*lines, "", *ranks] if ranks else lines


def loads_lines(document: _Row, wide: bool = False) -> list[str]:
    """Return a row a load."""
    columns: list[_Column] = [
        ("LOAD", lambda load: load["loadId"]),
        ("STATE", lambda load: load["state"]),
        ("DONE", lambda load: _percent(load["progress"])),
        ("TP", lambda load: str(load["tp"])),
        ("RESIDENT", lambda load: format_size(load["residentBytes"])),
        ("WORKERS", lambda load: ",".join(rank["workerId"] for rank in load["ranks"]) or "-"),
        ("PATH", lambda load: load["path"]),
    ]
    if wide:
        columns += [
            ("ARCHITECTURE", lambda load: load["architecture"] or "-"),
            ("OWNER", lambda load: load["owner"] or "-"),
            ("CREATED", lambda load: load["createTime"]),
            ("REASON", lambda load: load["failure"]["reason"] if load["failure"] else "-"),
        ]
    return _columns(document["loads"], columns)


def workers_lines(document: _Row, wide: bool = False) -> list[str]:
    """Return a row a worker."""
    columns: list[_Column] = [
        ("WORKER", lambda worker: worker["workerId"]),
        ("STATE", lambda worker: worker["state"]),
        ("DEVICE", lambda worker: worker["device"]),
        ("ADDRESS", lambda worker: worker["address"]),
        ("LOAD", lambda worker: worker["loadId"] or "-"),
        ("RESIDENT", lambda worker: format_size(worker["residentBytes"])),
        ("FREE", lambda worker: format_size(worker["freeBytes"])),
        ("TRANSPORT", lambda worker: worker["transport"] or "-"),
    ]
    if wide:
        columns += [
            ("RANK", lambda worker: str(worker["rank"]) if worker["loadId"] else "-"),
            ("TOTAL", lambda worker: format_size(worker["totalBytes"])),
            ("HOST", lambda worker: worker["host"]),
            ("VERSION", lambda worker: worker["packageVersion"]),
            ("HEARTBEAT", lambda worker: worker["heartbeatTime"]),
            ("INCARNATION", lambda worker: worker["incarnation"]),
        ]
    return _columns(document["workers"], columns)


def describe_worker_lines(worker: _Row) -> list[str]:
    """Return everything about one worker."""
    load = f"{worker['loadId']}, rank {worker['rank']}" if worker["loadId"] else "-"
    return _facts(
        [
            ("Worker", worker["workerId"]),
            ("State", worker["state"]),
            ("Address", worker["address"]),
            ("Host", worker["host"]),
            ("Device", worker["device"]),
            ("Load", load),
            ("Transport", worker["transport"] or "-"),
            ("Resident", format_size(worker["residentBytes"])),
            ("Loaded", format_size(worker["loadedBytes"])),
            ("Allocated", format_size(worker["allocatedBytes"])),
            ("Free", f"{format_size(worker['freeBytes'])} of {format_size(worker['totalBytes'])}"),
            ("Heartbeat", worker["heartbeatTime"]),
            ("Incarnation", worker["incarnation"]),
            ("Version", worker["packageVersion"]),
        ]
    )


def tensors_lines(tensors: Sequence[_Row]) -> list[str]:
    """Return a row a slice."""
    return _columns(
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


def plan_lines(plan: _Row, wide: bool = False) -> list[str]:
    """Return a line, a row a rank, whether it would be admitted, and the tensors if asked for."""
    columns: list[_Column] = [
        ("RANK", lambda rank: str(rank["rank"])),
        ("TENSORS", lambda rank: str(rank["tensors"])),
        ("WIRE", lambda rank: format_size(rank["wireBytes"])),
        ("RESIDENT", lambda rank: format_size(rank["residentBytes"])),
        ("REPLICATED", lambda rank: format_size(rank["replicatedBytes"])),
        ("STAGING", lambda rank: format_size(rank["stagingPeakBytes"])),
    ]
    if wide:
        columns += [
            ("SOURCE", lambda rank: format_size(rank["sourceBytes"])),
            ("DEFERRED", lambda rank: format_size(rank["deferredBytes"])),
        ]
    lines = [
        f"{plan['architecture']}  tp={plan['tp']}  {format_size(plan['sourceBytes'])} to read",
        *_columns(plan["ranks"], columns),
        *_warnings(plan),
        "",
        *_admission_lines(plan["admission"]),
    ]
    if "tensors" not in plan:
        return lines
    tensors = _columns(
        plan["tensors"],
        [
            ("NAME", lambda tensor: tensor["name"]),
            ("ROLE", lambda tensor: tensor["role"]),
            ("CUT", lambda tensor: tensor["cut"]),
            ("REASON", lambda tensor: tensor["reason"]),
        ],
    )
    return [*lines, "", *tensors]


def checkpoint_lines(checkpoint: _Row, wide: bool = False) -> list[str]:
    """Return a line and a row a tensor."""
    columns: list[_Column] = [
        ("NAME", lambda tensor: tensor["name"]),
        ("DTYPE", lambda tensor: tensor["dtype"]),
        ("SHAPE", lambda tensor: _shape(tensor["shape"])),
        ("BYTES", lambda tensor: str(tensor["bytes"])),
        ("FILE", lambda tensor: tensor["file"]),
    ]
    if wide:
        columns.append(("OFFSET", lambda tensor: str(tensor["offsetBytes"])))
    head = (
        f"{checkpoint['architecture'] or 'no architecture'}  {checkpoint['tensorCount']} tensors  "
        f"{format_size(checkpoint['payloadBytes'])} in {len(checkpoint['files'])} files"
    )
    return [head, *_columns(checkpoint["tensors"], columns), *_warnings(checkpoint)]


def health_lines(health: _Row) -> list[str]:
    """Return a row a server."""
    return _columns(
        health["servers"],
        [
            ("SERVER", lambda server: server["name"]),
            ("ADDRESS", lambda server: server["address"]),
            ("STATUS", lambda server: server["status"]),
            ("MESSAGE", lambda server: server["message"] or "-"),
        ],
    )


def settings_lines(document: _Row, show_origin: bool) -> list[str]:
    """Return a row a setting."""
    columns: list[_Column] = [
        ("SETTING", lambda setting: setting["name"]),
        ("VALUE", lambda setting: _value(setting["value"])),
    ]
    if show_origin:
        columns.append(("ORIGIN", lambda setting: setting["origin"]))
    return [f"config file: {document['configFile']}", *_columns(document["settings"], columns)]


def contexts_lines(document: _Row) -> list[str]:
    """Return a row a context; the current one has a star."""
    return _columns(
        document["contexts"],
        [
            ("CURRENT", lambda context: "*" if context["current"] else ""),
            ("CONTEXT", lambda context: context["name"]),
            ("ENDPOINT", lambda context: context["endpoint"] or "-"),
        ],
    )


def top_lines(document: _Row, most: int | None = None) -> list[str]:
    """Return how loads and workers stand.

    Args:
        document: the snapshot.
        most: lines that there is room for; None is for any number. Loads that have ended give way
            first.
    """
    loads, workers = document["loads"], document["workers"]
    rows = sorted(loads, key=lambda load: load["state"] in _ENDED)
    if most is not None:
        # Two headings, two counts and an empty line.
        room = max(2, most - 5)
        for_loads = max(1, min(len(rows), max(room - len(workers), room // 2)))
        rows, workers = rows[:for_loads], workers[: max(1, room - for_loads)]
    return [
        _count("load", loads, len(rows)),
        *_columns(rows, _TOP_LOADS),
        "",
        _count("worker", document["workers"], len(workers)),
        *_columns(workers, _TOP_WORKERS),
    ]


def _moved(load: _Row) -> str:
    """Return what has been read and sent, or is to be."""
    sent = sum(rank["doneBytes"] for rank in load["ranks"])
    if sent == load["wireBytes"]:
        return f"{format_size(load['sourceBytes'])} read once, {format_size(sent)} sent"
    whole = f"{format_size(load['sourceBytes'])} to read once"
    return f"{whole}, {format_size(sent)} of {format_size(load['wireBytes'])} sent"


def _rank_lines(load: _Row, *, wide: bool) -> list[str]:
    if not load["ranks"]:
        return []
    seconds = load["transferSeconds"]
    columns: list[_Column] = [
        ("RANK", lambda rank: str(rank["rank"])),
        ("WORKER", lambda rank: rank["workerId"]),
        ("TENSORS", lambda rank: str(rank["tensors"])),
        ("RESIDENT", lambda rank: format_size(rank["residentBytes"])),
        ("WIRE", lambda rank: format_size(rank["doneBytes"])),
        ("GB/s", lambda rank: f"{rank['doneBytes'] / seconds / 1e9:.2f}" if seconds else "-"),
        ("TRANSPORT", lambda rank: rank["transport"] or "-"),
        ("STATUS", _rank_status),
    ]
    if wide:
        columns += [
            ("REPLICA", lambda rank: str(rank["replica"])),
            ("COORDINATOR", lambda rank: format_size(rank["bytesBySource"]["coordinator"])),
            ("LOCAL", lambda rank: format_size(rank["bytesBySource"]["local"])),
            ("PEER", lambda rank: format_size(rank["bytesBySource"]["peer"])),
        ]
    return _columns(load["ranks"], columns)


def _rank_status(rank: _Row) -> str:
    state = str(rank["state"]).lower()
    if rank["stalled"]:
        return f"{state}, stalled for {format_seconds(rank['idleSeconds'] or 0)}"
    return "verified" if state == "committed" and rank["verified"] else state


def _admission_lines(admission: _Row) -> list[str]:
    refusal = admission["refusal"]
    verdict = f"{refusal['reason']}: {refusal['message']}" if refusal else ""
    if admission["admitted"]:
        verdict = "the load would be admitted now"
    rows = _columns(
        admission["ranks"],
        [
            ("RANK", lambda rank: str(rank["rank"])),
            ("WORKER", lambda rank: rank["workerId"]),
            ("NEEDED", lambda rank: format_size(rank["neededBytes"])),
            ("FREE", lambda rank: format_size(rank["freeBytes"])),
            ("FITS", lambda rank: "yes" if rank["fits"] else "no"),
        ],
    )
    return [verdict, *rows] if admission["ranks"] else [verdict]


def _failure_lines(failure: _Row | None) -> list[str]:
    if failure is None:
        return []
    facts = [f"  {key}: {value}" for key, value in failure["metadata"].items()]
    return [f"{failure['reason']}: {failure['message']}", *facts]


def _warnings(document: _Row) -> list[str]:
    return [f"warning: {warning}" for warning in document["warnings"]]


def _facts(facts: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in facts) + 1
    return [f"{name + ':':<{width}}  {value}" for name, value in facts]


def _columns(rows: Sequence[_Row], columns: Sequence[_Column]) -> list[str]:
    """Lay rows out in plain columns; no cell is ever cut, so that the output can be piped on."""
    cells = [[title for title, _ in columns]] + [[text(row) for _, text in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def _count(noun: str, entries: Sequence[_Row], shown: int) -> str:
    """Return `3 loads: 1 STREAMING, 2 SUCCEEDED`."""
    states = [entry["state"] for entry in entries]
    parts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
    head = f"{len(states)} {noun}{'' if len(states) == 1 else 's'}"
    head = f"{head}: {parts}" if parts else head
    return head if shown == len(states) else f"{head} ({len(states) - shown} not shown)"


def _rate_of(load: _Row) -> str:
    rate = sum(rank["bytesPerSecond"] for rank in load["ranks"])
    return f"{format_size(rate)}/s" if rate else "-"


def _stalled(load: _Row) -> str:
    return ",".join(str(rank["rank"]) for rank in load["ranks"] if rank["stalled"]) or "-"


def _percent(share: float) -> str:
    """Return whole percents, rounded down: 100 % is for what is done."""
    return f"{int(share * 100 + 1e-9)} %"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) or "-"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


_TOP_LOADS: list[_Column] = [
    ("LOAD", lambda load: load["loadId"]),
    ("STATE", lambda load: load["state"]),
    ("DONE", lambda load: _percent(load["progress"])),
    ("RATE", _rate_of),
    (
        "LEFT",
        lambda load: "-" if load["etaSeconds"] is None else format_seconds(load["etaSeconds"]),
    ),
    ("SLOWEST", lambda load: "-" if load["slowestRank"] is None else str(load["slowestRank"])),
    ("STALLED", _stalled),
    ("PATH", lambda load: load["path"]),
]
_TOP_WORKERS: list[_Column] = [
    ("WORKER", lambda worker: worker["workerId"]),
    ("STATE", lambda worker: worker["state"]),
    ("LOAD", lambda worker: worker["loadId"] or "-"),
    ("RANK", lambda worker: str(worker["rank"]) if worker["loadId"] else "-"),
    ("RESIDENT", lambda worker: format_size(worker["residentBytes"])),
    ("FREE", lambda worker: format_size(worker["freeBytes"])),
    ("DEVICE", lambda worker: worker["device"]),
    ("TRANSPORT", lambda worker: worker["transport"] or "-"),
]
