"""The JSON of `loaderctl`: a golden file for each verb, and rules that hold for all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from typer.testing import CliRunner

from loader_service.cli import documents, tables
from loader_service.cli.main import app
from loader_service.errors import PlanRefused, WorkerBusy
from loader_service.v1 import coordinator_pb2, types_pb2
from loader_service.version import __version__
from tests.golden_files import check_golden
from tests.messages import CHECKPOINT, PLAN, SLICES, failed, streaming, succeeded, worker

GOLDEN = Path(__file__).with_name("golden")

DOCUMENTS: dict[str, Callable[[], Any]] = {
    "load": lambda: documents.load_document(succeeded()),
    "load-streaming": lambda: documents.load_document(streaming()),
    "load-failed": lambda: documents.load_document(failed()),
    "get-loads": lambda: documents.loads_document([succeeded(), failed()]),
    "get-workers": lambda: documents.workers_document([worker(), types_pb2.Worker()]),
    "tensors": lambda: documents.tensors_document(SLICES),
    "plan": lambda: documents.plan_document(PLAN, explain=False),
    "plan-explain": lambda: documents.plan_document(PLAN, explain=True),
    "inspect": lambda: documents.checkpoint_document(CHECKPOINT),
    "refusal": lambda: documents.refusal_document(PlanRefused("no", valid_tp="1,2")),
    "refusal-without-sizes": lambda: documents.refusal_document(WorkerBusy("busy")),
}


def dump(document: object) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("verb", DOCUMENTS)
def test_a_verbs_document_is_its_golden_file(verb: str) -> None:
    check_golden(GOLDEN / f"{verb}.json", dump(DOCUMENTS[verb]()))


def test_every_golden_file_belongs_to_a_verb() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == DOCUMENTS.keys()


def keys(document: object) -> list[str]:
    """All keys of a document, those of free-form facts left out."""
    if isinstance(document, dict):
        nested = [
            key for name, value in document.items() if name != "metadata" for key in keys(value)
        ]
        return [*document, *nested]
    return [key for value in document for key in keys(value)] if isinstance(document, list) else []


@pytest.mark.parametrize("verb", DOCUMENTS)
def test_keys_are_lower_camel_case(verb: str) -> None:
    found = keys(DOCUMENTS[verb]())
    assert found
    assert [key for key in found if not re.fullmatch(r"[a-z]+([A-Z][a-z]*|\d+)*", key)] == []


@pytest.mark.parametrize("verb", DOCUMENTS)
def test_byte_counts_are_whole_numbers(verb: str) -> None:
    def check(document: object) -> None:
        if isinstance(document, list):
            for value in document:
                check(value)
        elif isinstance(document, dict):
            for key, value in document.items():
                if key == "bytes" or key.endswith("Bytes"):
                    assert type(value) is int, key
                check(value)

    check(DOCUMENTS[verb]())


@pytest.mark.parametrize(
    ("make", "full", "empty"),
    [
        (documents.load_document, succeeded(), types_pb2.Load()),
        (documents.workers_document, [worker()], [types_pb2.Worker()]),
        (
            documents.checkpoint_document,
            CHECKPOINT,
            coordinator_pb2.InspectCheckpointResponse(tensors=[coordinator_pb2.CatalogTensor()]),
        ),
        (
            lambda plan: documents.plan_document(plan, explain=True),
            PLAN,
            coordinator_pb2.PlanLoadResponse(
                ranks=[coordinator_pb2.RankPlan()],
                tensors=[coordinator_pb2.TensorPlan()],
                admission=coordinator_pb2.Admission(
                    refusal=types_pb2.Failure(), ranks=[coordinator_pb2.RankAdmission()]
                ),
            ),
        ),
        (
            documents.tensors_document,
            SLICES,
            {0: [types_pb2.TensorSlice()]},
        ),
    ],
    ids=["load", "workers", "inspect", "plan", "tensors"],
)
def test_empty_messages_have_all_fields(make: Callable[[Any], Any], full: Any, empty: Any) -> None:
    if isinstance(empty, types_pb2.Load):
        empty.ranks.add()
    assert set(keys(make(empty))) == set(keys(make(full)))


@pytest.mark.parametrize("message", [types_pb2.Load(), types_pb2.Worker()])
def test_enums_have_no_prefix(message: Message) -> None:
    field = message.DESCRIPTOR.fields_by_name["state"]
    assert field.enum_type is not None
    prefix = {"Load": "LOAD_STATE_", "Worker": "WORKER_STATE_"}[message.DESCRIPTOR.name]
    for value in field.enum_type.values:
        setattr(message, "state", value.number)  # noqa: B010 (the field differs by message)
        if isinstance(message, types_pb2.Load):
            shown = documents.load_document(message)["state"]
        else:
            assert isinstance(message, types_pb2.Worker)
            shown = documents.workers_document([message])["workers"][0]["state"]
        assert prefix + shown == value.name


def test_the_load_document_has_the_fields_that_were_promised() -> None:
    promised = (
        "loadId, state, tp, replicas, sourceBytes, wireBytes, residentBytes, transferSeconds, "
        "totalSeconds, ranks"
    )
    document = documents.load_document(succeeded())
    assert set(promised.split(", ")) <= document.keys()
    of_a_rank = (
        "rank, replica, workerId, tensors, residentBytes, wireBytes, transport, bytesBySource"
    )
    assert set(of_a_rank.split(", ")) <= document["ranks"][0].keys()
    assert list(document["ranks"][0]["bytesBySource"]) == ["coordinator", "local", "peer"]


def test_tensors_are_sorted_by_rank_and_name() -> None:
    document = documents.tensors_document(SLICES)
    assert [(entry["rank"], entry["name"]) for entry in document] == [(0, "a"), (0, "b"), (1, "a")]


@pytest.mark.parametrize("loads", [documents.loads_document, documents.workers_document])
def test_lists_without_entries_are_empty_lists(loads: Callable[[list[Any]], Any]) -> None:
    ((_, entries),) = loads([]).items()
    assert entries == []


def test_version_prints_a_document_too() -> None:
    result = CliRunner().invoke(app, ["version", "-o", "json"])
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"version": __version__})


def test_a_state_of_a_later_release_is_its_number() -> None:
    assert documents.load_document(types_pb2.Load(state=99))["state"] == "99"  # type: ignore[arg-type]


def test_a_load_that_has_lost_a_rank_is_described_with_its_worker() -> None:
    load = succeeded()
    load.state, load.ranks[1].state = types_pb2.LOAD_STATE_DEGRADED, types_pb2.RANK_STATE_LOST
    lines = tables.describe_load_lines(documents.load_document(load))
    (told,) = [line for line in lines if line.startswith("Lost:")]
    assert told.split(maxsplit=1)[1] == f"rank 1 on {load.ranks[1].worker_id}"
