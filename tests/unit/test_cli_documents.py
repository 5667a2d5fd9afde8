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

from loader_service.cli import documents
from loader_service.cli.main import app
from loader_service.errors import CLASS_KEY, PlanRefused, WorkerBusy
from loader_service.v1 import coordinator_pb2, types_pb2
from loader_service.version import __version__

GOLDEN = Path(__file__).with_name("golden")

RANKS = (
    types_pb2.RankProgress(
        rank=0,
        worker_id="host-0",
        tensor_count=3,
        resident_bytes=5_000_000_000,
        total_bytes=4_999_999_999,
        done_bytes=4_999_999_999,
        transport="posix/memory,cma/memory",
        bytes_by_source=types_pb2.BytesBySource(coordinator_bytes=4_999_999_999),
        verified=True,
    ),
    types_pb2.RankProgress(
        rank=1,
        replica=1,
        worker_id="host-1",
        tensor_count=2,
        resident_bytes=10,
        total_bytes=8,
        done_bytes=4,
        bytes_per_second=2.5,
        transport="tcp/eth0",
        bytes_by_source=types_pb2.BytesBySource(coordinator_bytes=1, local_bytes=2, peer_bytes=1),
    ),
)


def succeeded() -> types_pb2.Load:
    load = types_pb2.Load(
        load_id="load-0a1b2c3d",
        state=types_pb2.LOAD_STATE_SUCCEEDED,
        path="/models/wörter",
        architecture="LlamaForCausalLM",
        tp=2,
        replicas=1,
        source_bytes=9_007_199_254_740_993,
        wire_bytes=5_000_000_007,
        resident_bytes=5_000_000_010,
        ranks=RANKS,
        warnings=["3 bytes follow the last tensor"],
        revision=17,
    )
    load.create_time.FromJsonString("2026-12-01T05:06:07.250Z")
    load.transfer_duration.FromMilliseconds(1250)
    load.total_duration.FromMilliseconds(2000)
    return load


def failed() -> types_pb2.Load:
    load = types_pb2.Load(
        load_id="load-ffffffff",
        state=types_pb2.LOAD_STATE_FAILED,
        path="m",
        tp=1,
        replicas=1,
        failure=types_pb2.Failure(
            reason="DIGEST_MISMATCH",
            message="tensor 't' on rank 0: the landed bytes are not the bytes that were read",
            metadata={"tensor": "t", "rank": "0", CLASS_KEY: "DigestMismatch"},
        ),
    )
    load.create_time.FromJsonString("2026-12-01T00:00:00Z")
    return load


def worker() -> types_pb2.Worker:
    message = types_pb2.Worker(
        worker_id="host-0",
        address="10.0.0.1:4000",
        host="host",
        device="numpy",
        state=types_pb2.WORKER_STATE_BUSY,
        incarnation="0123456789abcdef",
        memory=types_pb2.MemoryUsage(
            resident_bytes=1,
            loaded_bytes=2,
            allocated_bytes=3,
            free_bytes=4,
            total_bytes=80 << 30,
        ),
        load_id="load-0a1b2c3d",
        rank=1,
        transport="tcp/eth0",
        package_version="0.1.0",
    )
    message.heartbeat_time.FromJsonString("2026-12-01T05:06:08Z")
    return message


SLICES = {
    1: [types_pb2.TensorSlice(name="a", dtype="F8_E4M3", shape=[0, 4])],
    0: [
        types_pb2.TensorSlice(name="b", dtype="I64", bytes=8, sha256="ab" * 32),
        types_pb2.TensorSlice(
            name="a",
            dtype="BF16",
            shape=[19, 16],
            bytes=608,
            padding_rows=1,
            aliases=["lm_head.weight"],
            sha256="00" * 32,
        ),
    ],
}

PLAN = coordinator_pb2.PlanLoadResponse(
    path="/models/m",
    architecture="BertModel",
    tp=2,
    source_bytes=100,
    tied_head_present=True,
    warnings=["'lm_head.weight' is tied and stands in the file"],
    ranks=[
        coordinator_pb2.RankPlan(
            rank=rank,
            source_bytes=60 + rank,
            wire_bytes=50 + rank,
            resident_bytes=52,
            replicated_bytes=10,
            staging_peak_bytes=400,
            deferred_bytes=rank,
            tensor_count=7,
        )
        for rank in range(2)
    ],
    tensors=[
        coordinator_pb2.TensorPlan(
            name="encoder.weight",
            role="query",
            storage="dense",
            cut="column",
            reason="whole heads go to ranks",
        )
    ],
)

CHECKPOINT = coordinator_pb2.InspectCheckpointResponse(
    path="/models/m",
    architecture="BertModel",
    tensor_count=1,
    payload_bytes=24,
    files=["model.safetensors"],
    warnings=["odd"],
    tensors=[
        coordinator_pb2.CatalogTensor(
            name="w",
            dtype="F32",
            shape=[2, 3],
            bytes=24,
            file="model.safetensors",
            offset_bytes=128,
        )
    ],
)

DOCUMENTS: dict[str, Callable[[], Any]] = {
    "load": lambda: documents.load_document(succeeded()),
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
    assert dump(DOCUMENTS[verb]()) == (GOLDEN / f"{verb}.json").read_text(encoding="utf-8")


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
                ranks=[coordinator_pb2.RankPlan()], tensors=[coordinator_pb2.TensorPlan()]
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
