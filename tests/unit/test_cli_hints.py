"""What `loaderctl` advises: every reason that the code knows has a hint, or has none on purpose."""

from __future__ import annotations

import ast
import string
from pathlib import Path
from typing import Any

import grpc
import pytest

from loader_service import errors
from loader_service.cli.hints import HINTS, WORKER_HINTS, hint
from loader_service.cli.session import exit_code
from loader_service.errors import LoaderError, PlanRefused, WorkerBusy

ROOT = Path(__file__).parents[2]
SOURCES = [*(ROOT / "loader_service").rglob("*.py"), *(ROOT / "worker").rglob("*.py")]

WITHOUT_HINT = frozenset(
    {
        # The message names the field or the name that is wrong, and the caller typed it.
        "INVALID_REQUEST",
        "INVALID_FILE_NAME",
        # The file itself is bad; the message says where, and no option helps.
        "BAD_HEADER_LENGTH",
        "DUPLICATE_TENSOR",
        "INDEX_MISMATCH",
        "INVALID_CONFIG",
        "INVALID_HEADER",
        "INVALID_INDEX",
        "MISSING_TENSOR",
        "OVERLAPPING_TENSORS",
        "SHAPE_MISMATCH",
        "TENSOR_IN_OTHER_SHARD",
        "TENSOR_NOT_IN_INDEX",
        "TENSOR_NOT_IN_SHARD",
        "UNCOVERED_BYTES",
        "UNKNOWN_DTYPE",
        # For programs; no verb calls after it has closed its client.
        "CLIENT_CLOSED",
        # Between coordinator and workers, or when a server starts: in their logs only.
        "ACCESS_FILE_INVALID",
        "CANNOT_LISTEN",
        "INSECURE_LISTEN",
        "INVALID_MANIFEST",
        "MALFORMED_MESSAGE",
        "WORKER_ID_TAKEN",
        "WORKER_SUPERSEDED",
        # A fault of the service: the message is all there is to say.
        "INTERNAL",
    }
)
"""Reasons for which there is nothing to say beyond the message."""


def subclasses(kind: type[LoaderError]) -> list[type[LoaderError]]:
    return [each for child in kind.__subclasses__() for each in (child, *subclasses(child))]


CLASSES = [kind for kind in subclasses(LoaderError) if kind.__module__ == errors.__name__]


def reasons() -> set[str]:
    """Reasons of the classes, and those that the sources raise errors with."""
    found = {kind.default_reason for kind in CLASSES}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.keyword) or node.arg != "reason":
                continue
            if isinstance(node.value, ast.Constant) and str(node.value.value).isupper():
                found.add(str(node.value.value))
    return found


def test_every_reason_has_a_hint_or_none_on_purpose() -> None:
    found = reasons()
    assert "TLS_REQUIRED" in found
    assert found - HINTS.keys() - WITHOUT_HINT == set()


def test_no_hint_is_for_a_reason_that_nobody_raises() -> None:
    # The planner passes this one on from a table of cuts.
    found = reasons() | {"TP_NOT_DIVISIBLE"}
    assert (HINTS.keys() | WITHOUT_HINT) - found == set()
    assert HINTS.keys() & WITHOUT_HINT == set()


@pytest.mark.parametrize("reason", HINTS)
def test_a_hint_is_one_sentence_with_known_facts(reason: str) -> None:
    check_hint(HINTS[reason])


@pytest.mark.parametrize("reason", WORKER_HINTS)
def test_a_hint_for_a_worker_names_it(reason: str) -> None:
    check_hint(WORKER_HINTS[reason])
    assert reason in HINTS
    told = hint(LoaderError("no", reason=reason, worker_id="w7"), "h:1")
    assert "worker w7" in told
    assert "access file of the coordinator" not in told


def check_hint(text: str) -> None:
    assert not text.endswith((".", " "))
    assert "  " not in text
    fields = {field for _, field, _, _ in string.Formatter().parse(text) if field}
    assert fields <= {"endpoint", "load_id", "too_few", "valid_tp", "worker_id"}


def test_a_hint_names_the_facts_of_the_error() -> None:
    error = WorkerBusy("drained", reason="WORKER_DRAINING", worker_id="w7")
    assert "undrain worker w7`" in hint(error, "h:1")
    assert "undrain worker WORKER`" in hint(WorkerBusy("", reason="WORKER_DRAINING"), "h:1")
    assert "h:1" in hint(errors.ServiceUnavailable("gone"), "h:1")


@pytest.mark.parametrize(
    ("facts", "wanted", "unwanted"),
    [
        ({"needed": 4, "workers": 2, "busy": "a,b"}, ["more workers"], ["wait", "undrain"]),
        ({"needed": 2, "workers": 2, "busy": "a,b"}, ["unload", "workers 60s"], ["more workers"]),
        ({"needed": 2, "workers": 2, "idle": "a", "drained": "b"}, ["undrain worker b`"], ["wait"]),
        ({"needed": 1, "workers": 1, "busy": "a", "waited_seconds": 9}, ["a longer"], ["60s"]),
        ({"needed": 4}, ["get workers"], ["wait", "undrain", "more"]),
    ],
)
def test_a_load_that_lacks_workers_is_told_how_to_get_them(
    facts: dict[str, Any], wanted: list[str], unwanted: list[str]
) -> None:
    told = hint(errors.WorkersUnavailable("too few", **facts), "h:1")
    assert [word for word in wanted if word not in told] == []
    assert [word for word in unwanted if word in told] == []


def test_a_hint_names_no_deadline_that_may_be_shorter_than_the_one_that_passed() -> None:
    """Calls that hash have 300 s."""
    told = hint(errors.DeadlineExceeded("late"), "h:1")
    assert "--timeout" in told
    assert not any(letter.isdigit() for letter in told)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [("1,2,4", "--tp 1, 2 or 4 would fit"), ("1", "--tp 1 would fit"), ("", "")],
)
def test_group_sizes_that_fit_are_named_where_they_are_known(sizes: str, expected: str) -> None:
    refused = PlanRefused("no", reason="TP_NOT_DIVISIBLE", valid_tp=sizes)
    assert hint(refused, "h:1") == expected


def test_a_reason_of_another_release_has_no_hint() -> None:
    assert hint(LoaderError("what", reason="NEVER_HEARD_OF"), "h:1") == ""


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_exit_codes_follow_the_status(kind: type[LoaderError]) -> None:
    code = grpc.StatusCode
    documented = {
        code.NOT_FOUND: 3,
        code.INVALID_ARGUMENT: 4,
        code.FAILED_PRECONDITION: 4,
        code.RESOURCE_EXHAUSTED: 4,
        code.ALREADY_EXISTS: 4,
        code.PERMISSION_DENIED: 5,
        code.UNAUTHENTICATED: 5,
        code.DEADLINE_EXCEEDED: 6,
        code.UNAVAILABLE: 7,
        code.DATA_LOSS: 1,
        code.CANCELLED: 1,
        code.INTERNAL: 1,
    }
    assert exit_code(kind("what")) == documented[kind.status]
