"""What is too much must cost nobody else an answer: texts of megabytes, manifests, short deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from loader_service.channel import FAILURE_KEY, from_rpc_error
from loader_service.channel_security import ChannelSecurity
from loader_service.client import AsyncLoaderClient
from loader_service.errors import (
    InternalError,
    InvalidRequest,
    LimitExceeded,
    LoaderError,
    PlanRefused,
    QuotaExceeded,
)
from loader_service.serving.options import ServingOptions
from loader_service.serving.server import Server
from loader_service.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from loader_worker import servicer
from loader_worker.servicer import WorkerServicer
from loader_worker.worker import Worker
from tests.certificates import (
    write_token,
)
from tests.checkpoints import RawTensor, random_tensor, write_config, write_file, write_index
from tests.control_plane import (
    control_plane,
    last_of,
    registration,
)

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


@pytest.mark.parametrize(
    "page",
    [
        worker_pb2.ManifestPage(),
        worker_pb2.ManifestPage(
            chunks=[worker_pb2.ManifestChunk(extents=[worker_pb2.ManifestExtent()] * 100)]
        ),
        worker_pb2.ManifestPage(slices=[worker_pb2.ManifestSlice(shape=[1] * 100)]),
        worker_pb2.ManifestPage(slices=[worker_pb2.ManifestSlice(aliases=[""] * 100)]),
        worker_pb2.ManifestPage(slices=[worker_pb2.ManifestSlice(name="n" * 9000)]),
    ],
)
async def test_whatever_a_manifests_pages_hold_counts(
    page: worker_pb2.ManifestPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "MAX_MANIFEST_BYTES", 100 * servicer.PART_BYTES)

    async def pages() -> AsyncIterator[worker_pb2.PrepareLoadRequest]:
        header = worker_pb2.ManifestHeader(slice_count=1000, chunk_count=1000)
        yield worker_pb2.PrepareLoadRequest(header=header)
        for _ in range(101):
            yield worker_pb2.PrepareLoadRequest(body=page)

    refusing = WorkerServicer(cast("Worker", None), "127.0.0.1")
    with pytest.raises(InvalidRequest, match="the manifest takes more than 6400 bytes"):
        await refusing.PrepareLoad(pages(), cast("Any", None))


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


async def test_names_and_paths_are_short_and_on_one_line(tmp_path: Path) -> None:
    """They stand in logs, where a line break would forge lines, and in every list."""
    async with control_plane(tmp_path) as plane, AsyncLoaderClient(plane.address) as client:
        for field, value in (
            ("worker_id", "evil\n2026-12-01 INFO all is well"),
            ("worker_id", "x" * 257),
            ("host", "h" * (1 << 20)),
            ("device", "\x1b[31m"),
            ("address", "a\nb:1"),
            ("address", f"h:{'9' * 5000}"),
        ):
            request = registration("w0")
            setattr(request, field, value)
            with pytest.raises(InvalidRequest) as caught:
                await plane.coordinator.register(request)
            assert caught.value.metadata["field"] == field
        with pytest.raises(InvalidRequest, match="path is longer"):
            await client.load("p" * (2 << 20))
        assert await client.list_workers() == []
        assert await client.list_loads() == []


async def test_metadata_over_the_limit_is_refused(tmp_path: Path) -> None:
    async with (
        control_plane(tmp_path) as plane,
        grpc.aio.insecure_channel(plane.address) as channel,
    ):
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListWorkers(
                coordinator_pb2.ListWorkersRequest(),
                metadata=(("x-large", "x" * (40 << 10)),),
                timeout=5,
            )
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await stub.ListWorkers(coordinator_pb2.ListWorkersRequest(), timeout=5)


async def test_a_message_over_the_limit_is_refused(tmp_path: Path) -> None:
    async with (
        control_plane(tmp_path) as plane,
        grpc.aio.insecure_channel(plane.address) as channel,
    ):
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        request = coordinator_pb2.LoadRequest(path="x" * (5 << 20), tp=1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Load(request, timeout=5)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_nonsense_is_refused_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        control_plane(tmp_path) as plane,
        grpc.aio.insecure_channel(plane.address) as channel,
    ):
        for method in ("Load", "WatchLoad", "Heartbeat"):
            call: Any = channel.stream_stream(f"/loader_service.v1.CoordinatorService/{method}")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call(iter([b"\xff\xff\xff"]), timeout=5):
                    pass
            failure = from_rpc_error(caught.value)
            assert (type(failure), failure.reason) == (InvalidRequest, "MALFORMED_MESSAGE")
    assert "Traceback" not in caplog.text


async def test_headers_and_tensors_over_the_limits_are_refused(tmp_path: Path) -> None:
    tensors = [random_tensor(f"t{number}", "U8", (1,)) for number in range(20)]
    write_file(tmp_path / "model.safetensors", tensors)
    limits: tuple[dict[str, Any], ...] = ({"max_header_bytes": 100}, {"max_tensors": 19})
    for limit in limits:
        async with (
            control_plane(tmp_path, **limit) as plane,
            AsyncLoaderClient(plane.address) as client,
        ):
            with pytest.raises(LimitExceeded) as caught:
                await client.inspect("model.safetensors")
            assert caught.value.reason == "LIMIT"


async def test_an_error_with_a_long_text_arrives_with_its_reason(tmp_path: Path) -> None:
    """More than 8 KiB of trailing metadata would be lost, and the error with it."""
    async with control_plane(tmp_path) as plane, AsyncLoaderClient(plane.address) as client:
        with pytest.raises(LoaderError) as caught:
            await client.get_load("x" * 100_000)
        assert caught.value.reason == "LOAD_NOT_FOUND"
        assert len(caught.value.message) <= 1000


async def test_a_request_id_cannot_forge_lines_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "loader_service.calls")
    async with (
        control_plane(tmp_path) as plane,
        grpc.aio.insecure_channel(plane.address) as channel,
    ):
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        for given in ("fine-1", "x" * 1000, "a b", "a;b"):
            await stub.ListWorkers(
                coordinator_pb2.ListWorkersRequest(), metadata=(("x-request-id", given),)
            )
    lines = [record.getMessage() for record in caplog.records if "ListWorkers" in record.message]
    assert lines[0].endswith("request=fine-1")
    assert all(len(line) < 200 and "a b" not in line and ";" not in line for line in lines)


async def test_one_identity_may_have_so_many_streams(tmp_path: Path, access: str) -> None:
    write_file(tmp_path / "model.safetensors", [random_tensor("t", "U8", (10,))])
    serving = ServingOptions(access_file=access, max_streams=2)
    async with (
        control_plane(tmp_path, workers=["w0"], serving=serving) as plane,
        contextlib.AsyncExitStack() as stack,
    ):
        clients = {
            role: await stack.enter_async_context(
                AsyncLoaderClient(
                    plane.address,
                    security=ChannelSecurity(
                        token_file=write_token(tmp_path, f"token-of-{role}", role)
                    ),
                )
            )
            for role in ("operator", "viewer")
        }
        load = await clients["operator"].load("model.safetensors")
        await plane.next_stream()
        watches = [clients["viewer"].watch(load.load_id) for _ in range(2)]
        for watch in watches:
            await anext(watch)
        with pytest.raises(QuotaExceeded, match="2 streams"):
            await anext(clients["viewer"].watch(load.load_id))
        other = clients["operator"].watch(load.load_id)
        await anext(other)
        await watches[0].aclose()
        await asyncio.sleep(0.1)
        again = clients["viewer"].watch(load.load_id)
        await anext(again)
        for watch in (watches[1], other, again):
            await watch.aclose()
