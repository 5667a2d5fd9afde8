"""The formats that data is printed in. Data goes to stdout, everything else to stderr."""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

from loader_service.cli import tables
from loader_service.texts import printable

__all__ = [
    "CHECKPOINT",
    "CONTEXTS",
    "HEALTH",
    "LOAD",
    "LOADS",
    "LOAD_DETAILS",
    "PLAN",
    "SETTINGS_VIEW",
    "SETTINGS_WITH_ORIGIN",
    "TENSORS",
    "TOP",
    "VERSION",
    "WORKER",
    "WORKERS",
    "WORKER_DETAILS",
    "Format",
    "View",
    "complain",
    "show",
]


class Format(enum.StrEnum):
    """How data is printed."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    JSONL = "jsonl"
    YAML = "yaml"
    NAME = "name"


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """How one kind of document is shown.

    Attributes:
        lines: makes the table; takes `wide` where there is a wide form.
        entries: the objects that JSONL prints one a line and NAME prints the names of.
        name: name of such an object.
    """

    lines: Callable[..., list[str]]
    entries: Callable[[Any], Iterable[Any]] = lambda document: [document]
    name: Callable[[Any], str] = str


LOAD = View(tables.load_lines, name=lambda load: load["loadId"])
LOAD_DETAILS = View(tables.describe_load_lines)
LOADS = View(tables.loads_lines, lambda document: document["loads"], lambda load: load["loadId"])
WORKER = View(
    # One worker as a row, as a list shows it.
    lambda worker, wide=False: tables.workers_lines({"workers": [worker]}, wide),
    name=lambda worker: worker["workerId"],
)
WORKER_DETAILS = View(tables.describe_worker_lines)
WORKERS = View(
    tables.workers_lines, lambda document: document["workers"], lambda worker: worker["workerId"]
)
TENSORS = View(tables.tensors_lines, lambda tensors: tensors)
PLAN = View(tables.plan_lines)
CHECKPOINT = View(
    tables.checkpoint_lines, lambda document: document["tensors"], lambda tensor: tensor["name"]
)
HEALTH = View(tables.health_lines, lambda document: document["servers"])
TOP = View(tables.top_lines)
SETTINGS_VIEW = View(lambda document: tables.settings_lines(document, show_origin=False))
SETTINGS_WITH_ORIGIN = View(lambda document: tables.settings_lines(document, show_origin=True))
CONTEXTS = View(
    tables.contexts_lines, lambda document: document["contexts"], lambda context: context["name"]
)
VERSION = View(lambda document: [document["version"]])


def show(view: View, document: Any, output: Format) -> None:
    """Print a document to stdout."""
    for text in _texts(view, document, output):
        print(text)
    # Whoever reads a pipe gets each update when it comes.
    sys.stdout.flush()


def complain(text: str) -> None:
    """Print a message to stderr, which may have several lines."""
    lines = map(printable, f"loaderctl: {text}".split("\n"))
    print(*lines, sep="\n", file=sys.stderr)


def _texts(view: View, document: Any, output: Format) -> Iterable[str]:
    match output:
        case Format.TABLE:
            return map(printable, view.lines(document))
        case Format.WIDE:
            return map(printable, view.lines(document, wide=True))
        case Format.JSON:
            return [json.dumps(document, indent=2)]
        case Format.JSONL:
            return map(json.dumps, view.entries(document))
        case Format.NAME:
            return map(printable, map(view.name, view.entries(document)))
        case Format.YAML:
            # Imported here: no other format needs it.
            import yaml

            text: str = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
            return [text.rstrip("\n")]
