"""What is too much must cost nobody else an answer: texts of megabytes, manifests, short deadlines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from loader_service.channel import FAILURE_KEY, from_rpc_error
from loader_service.client import AsyncLoaderClient
from loader_service.errors import InternalError, LoaderError, PlanRefused
from loader_service.serving.options import ServingOptions
from loader_service.serving.server import Server
from loader_service.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from loader_worker.servicer import WorkerServicer
from loader_worker.worker import Worker
from tests.checkpoints import RawTensor, random_tensor, write_config, write_file, write_index
from tests.control_plane import control_plane, last_of

HUGE = 5 << 20
"""More than a message may have."""


class Raising(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Raises what a test says."""

    def __init__(self, error: LoaderError) -> None:
        self._error = error

    async def GetLoad(self, request: Any, context: Any) -> Any:
        raise self._error


@pytest.mark.parametrize("letter", ["x", "ä", "漢", "%", "\n"])
@pytest.mark.parametrize("facts", [0, 1, 40])
@pytest.mark.parametrize("field", ["path", ""])
async def test_an_error_arrives_however_much_it_tells(letter: str, facts: int, field: str) -> None:
    metadata = {f"fact_{number}": letter * 9000 for number in range(facts)}
    if field:
        metadata["field"] = field
    error = PlanRefused(letter * 50_000, reason="TP_NOT_DIVISIBLE", **metadata, valid_tp="1,2,4")
    server = Server([], ServingOptions())
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(Raising(error), server.grpc)  # type: ignore[abstract]
    address = await server.start("127.0.0.1:0")
    try:
        async with AsyncLoaderClient(address) as client:
            with pytest.raises(PlanRefused) as caught:
                await client.get_load("x")
    finally:
        await server.grpc.stop(None)
    assert caught.value.reason == "TP_NOT_DIVISIBLE"
    assert caught.value.valid_tp == (1, 2, 4)
    assert caught.value.metadata.get("field", "") == field
    assert len(caught.value.message) > 100


async def test_a_load_that_fails_over_a_huge_name_can_be_listed(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", [RawTensor("n" * HUGE, "F32", (3, 3), bytes(36))])
    sizes = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    config = {"architectures": ["LlamaForCausalLM"], "intermediate_size": 8}
    write_config(tmp_path, {**config, **dict.fromkeys(sizes, 2)})
    async with (
        control_plane(tmp_path, workers=["w0", "w1"]) as plane,
        AsyncLoaderClient(plane.address) as client,
    ):
        load = await client.load(".", 2)
        ended = await last_of(client, load.load_id)
        assert ended.state == types_pb2.LOAD_STATE_FAILED
        assert ended.failure.reason == "UNKNOWN_TENSOR"
        assert [listed.load_id for listed in await client.list_loads()] == [load.load_id]


async def test_a_load_whose_worker_reports_a_huge_failure_can_be_listed(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", [random_tensor("t", "U8", (10,))])
    async with (
        control_plane(tmp_path, workers=["w0"]) as plane,
        AsyncLoaderClient(plane.address) as client,
    ):
        load = await client.load("model.safetensors")
        await plane.next_stream()
        failure = types_pb2.Failure(
            reason="R" * HUGE, message="m" * HUGE, metadata={"k": "v" * HUGE}
        )
        await plane.heartbeat(
            "w0",
            coordinator_pb2.WorkerLoad(
                load_id=load.load_id,
                state=types_pb2.WORKER_LOAD_STATE_FAILED,
                failure=failure,
            ),
        )
        ended = await last_of(client, load.load_id)
        assert ended.failure.message.startswith("mmm")
        assert ended.ByteSize() < 10_000
        assert len(await client.list_loads()) == 1


@pytest.mark.parametrize("where", ["architectures", "total_size"])
async def test_a_checkpoint_that_tells_much_can_be_loaded_and_listed(
    tmp_path: Path, where: str
) -> None:
    write_file(tmp_path / "model.safetensors", [random_tensor("t", "U8", (10,))])
    if where == "architectures":
        write_config(tmp_path, {"architectures": ["A" * HUGE]})
    else:
        write_index(tmp_path, {"t": "model.safetensors"})
        index = tmp_path / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        index.write_text(json.dumps({**content, "metadata": {"total_size": "9" * HUGE}}))
    async with (
        control_plane(tmp_path, workers=["w0"]) as plane,
        AsyncLoaderClient(plane.address) as client,
    ):
        load = await client.load(".")
        (await plane.next_stream()).finish()
        ended = await last_of(client, load.load_id)
        assert ended.state == types_pb2.LOAD_STATE_SUCCEEDED
        assert len(await client.list_loads()) == 1
        assert (await client.inspect(".")).tensor_count == 1
        await client.plan(".")


class Nonsense(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Answers with an error that is none of ours."""

    async def GetLoad(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.NOT_FOUND, "gone", ((FAILURE_KEY, b"\xff\xff"),))


async def test_nonsense_in_place_of_an_error_is_an_error_too() -> None:
    server = grpc.aio.server()
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(Nonsense(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AsyncLoaderClient(f"127.0.0.1:{port}") as client:
            with pytest.raises(InternalError, match="gone"):
                await client.get_load("x")
    finally:
        await server.stop(None)


class Preparing(worker_pb2_grpc.WorkerServiceServicer):
    """Reads a manifest."""

    async def PrepareLoad(self, request_iterator: Any, context: Any) -> Any:
        async for _ in request_iterator:
            pass
        return worker_pb2.PrepareLoadResponse()


async def test_the_audit_log_says_which_load_was_prepared(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    server = Server([], ServingOptions(audit_log=str(log)))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Preparing(), server.grpc)  # type: ignore[abstract]
    address = await server.start("127.0.0.1:0")
    pages = [
        worker_pb2.PrepareLoadRequest(header=worker_pb2.ManifestHeader(load_id="load-7", tp=2)),
        worker_pb2.PrepareLoadRequest(body=worker_pb2.ManifestPage()),
    ]
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            await worker_pb2_grpc.WorkerServiceStub(channel).PrepareLoad(iter(pages))
    finally:
        await server.grpc.stop(None)
    line = json.loads(log.read_text())
    assert (line["method"], line["load_id"], line["tp"]) == ("PrepareLoad", "load-7", 2)


@pytest.mark.parametrize("entries", [(4_000_001, 0), (3_000_000, 1_000_001), (1, 0)])
async def test_a_manifest_with_too_many_entries_is_not_collected(entries: tuple[int, int]) -> None:
    """Neither more than any load needs, nor more than its own header says."""
    server = Server([], ServingOptions())
    refusing = WorkerServicer(cast("Worker", None), "127.0.0.1")
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(refusing, server.grpc)
    address = await server.start("127.0.0.1:0")
    header = worker_pb2.ManifestHeader(slice_count=entries[0], chunk_count=entries[1])
    page = worker_pb2.ManifestPage(slices=[worker_pb2.ManifestSlice()] * 2)
    pages = [
        worker_pb2.PrepareLoadRequest(header=header),
        worker_pb2.PrepareLoadRequest(body=page),
    ]
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await worker_pb2_grpc.WorkerServiceStub(channel).PrepareLoad(iter(pages))
    finally:
        await server.grpc.stop(None)
    failure = from_rpc_error(caught.value)
    assert failure.reason == "INVALID_MANIFEST"
    assert "entries" in failure.message


class Counting(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Counts the loads that were asked for."""

    def __init__(self) -> None:
        self.calls = 0

    async def Load(self, request: Any, context: Any) -> Any:
        self.calls += 1
        return coordinator_pb2.LoadResponse()


async def test_a_change_that_could_not_be_answered_in_time_is_not_begun() -> None:
    server = Server([], ServingOptions())
    servicer = Counting()  # type: ignore[abstract]
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, server.grpc)
    address = await server.start("127.0.0.1:0")
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            await stub.Load(coordinator_pb2.LoadRequest(), timeout=5)
            for _ in range(20):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Load(coordinator_pb2.LoadRequest(), timeout=0.003)
                assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await stub.Load(coordinator_pb2.LoadRequest(), timeout=5)
    finally:
        await server.grpc.stop(None)
    assert servicer.calls == 2
