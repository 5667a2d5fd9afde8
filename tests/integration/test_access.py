"""Who may do what: tokens, roles, the model root, and what is recorded of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from loader_service.channel_security import ChannelSecurity
from loader_service.client import AsyncLoaderClient, LoaderClient
from loader_service.errors import (
    AccessDenied,
    InvalidRequest,
    LoaderError,
    PathOutsideRoot,
    Unauthenticated,
)
from loader_service.serving.access import METHOD_ROLES, OPEN_METHODS
from loader_service.serving.options import ServingOptions
from loader_service.serving.server import Server
from loader_service.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.certificates import (
    ROLES,
    identity,
    token_identity,
    write_access,
    write_token,
)
from tests.checkpoints import random_tensor, write_file
from tests.control_plane import ControlPlane, control_plane, reflected_services

MAY = {
    "viewer": {
        "InspectCheckpoint", "PlanLoad", "GetLoad", "ListLoads", "WatchLoad", "ListWorkers",
        "GetWorker", "GetStatus", "WatchStatus", "ListTensors",
    },
    "worker": {"RegisterWorker", "Heartbeat", "DeregisterWorker"},
    "coordinator": {"GetStatus", "PrepareLoad", "CommitLoad", "AbortLoad"},
}  # fmt: skip
MAY["operator"] = MAY["viewer"] | {"Load", "CancelLoad", "Unload"}
MAY["admin"] = MAY["operator"] | {"DrainWorker", "UndrainWorker"}

SERVICES = {
    coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"],
    worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
}


# ---------------------------------------------------------------- tokens


@pytest.fixture
async def tokens(tmp_path: Path, access: str) -> AsyncIterator[ControlPlane]:
    serving = ServingOptions(access_file=access)
    async with control_plane(tmp_path, workers=["w0"], serving=serving) as plane:
        yield plane


async def test_a_known_token_is_let_in_and_a_changed_file_counts_at_once(
    tokens: ControlPlane, tmp_path: Path
) -> None:
    security = ChannelSecurity(token_file=write_token(tmp_path, "token-of-viewer"))
    async with AsyncLoaderClient(tokens.address, security=security) as client:
        assert len(await client.list_workers()) == 1
        write_token(tmp_path, "nonsense")
        with pytest.raises(Unauthenticated) as caught:
            await client.list_workers()
        assert caught.value.reason == "TOKEN_UNKNOWN"
        write_token(tmp_path, "token-of-admin")
        assert (await client.drain_worker("w0")).worker_id == "w0"


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Basic token-of-admin", "token-of-admin", "Bearer x", "Bearer ÿ"],
)
async def test_no_token_or_another_one_is_turned_away(tokens: ControlPlane, header: str) -> None:
    metadata = (("authorization", header.encode("ascii", "replace").decode()),) if header else ()
    async with grpc.aio.insecure_channel(tokens.address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListWorkers(coordinator_pb2.ListWorkersRequest(), metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_token_is_not_sent_in_the_clear(tmp_path: Path) -> None:
    security = ChannelSecurity(token_file=write_token(tmp_path, "secret"))
    for address in ("10.0.0.1:1", "coordinator:1", "[fd00::1]:1"):
        with pytest.raises(InvalidRequest) as caught:
            LoaderClient(address, security=security)
        assert caught.value.reason == "TOKEN_NEEDS_TLS"
    for address in ("127.0.0.1:1", "localhost:1", "[::1]:1"):
        LoaderClient(address, security=security).close()


# ---------------------------------------------------------------- roles


def all_methods() -> list[tuple[str, str]]:
    return [
        (service.full_name, method.name)
        for service in sorted(SERVICES, key=lambda service: service.name)
        for method in service.methods
    ]


def test_every_method_has_its_roles_and_no_other_is_listed() -> None:
    ours = {f"/{service}/{method}" for service, method in all_methods()}
    listed = {method for method in METHOD_ROLES if "loader_service" in method}
    assert ours == listed
    assert all(method.startswith("/grpc.health.") for method in OPEN_METHODS)


class NoWorker(worker_pb2_grpc.WorkerServiceServicer):
    """A worker without a single method; who may not call is told before that is noticed."""


@pytest.mark.parametrize("role", ROLES)
async def test_each_role_may_call_its_methods_and_no_other(
    tokens: ControlPlane, access: str, role: str
) -> None:
    metadata = (("authorization", f"Bearer token-of-{role}"),)
    worker = Server([], ServingOptions(access_file=access))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(NoWorker(), worker.grpc)  # type: ignore[abstract]
    address = await worker.start("127.0.0.1:0")
    try:
        for service, method in all_methods():
            target = address if "WorkerService" in service else tokens.address
            async with grpc.aio.insecure_channel(target) as channel:
                code = await code_of(channel, service, method, metadata)
            allowed = code is not grpc.StatusCode.PERMISSION_DENIED
            assert allowed == (method in MAY[role]), (method, code)
    finally:
        await worker.stop()


async def code_of(
    channel: grpc.aio.Channel, service: str, method: str, metadata: Any
) -> grpc.StatusCode:
    """Call a method with an empty message, whatever its kind."""
    call: Any = channel.stream_stream(f"/{service}/{method}")
    try:
        async for _ in call(iter([b""]), metadata=metadata, timeout=1):
            return grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        # gRPC's client, whose message met the end of a call that was refused before it came.
        if error.details() == "internal":
            return await code_of(channel, service, method, metadata)
        return error.code()
    return grpc.StatusCode.OK


async def test_the_refusal_names_who_would_be_let_in(tokens: ControlPlane, tmp_path: Path) -> None:
    security = ChannelSecurity(token_file=write_token(tmp_path, "token-of-viewer"))
    async with AsyncLoaderClient(tokens.address, security=security) as client:
        with pytest.raises(AccessDenied, match="role viewer; Load is for admin, operator"):
            await client.load("model")


async def test_only_who_may_cancel_may_watch_with_that_threat(tmp_path: Path, access: str) -> None:
    write_file(tmp_path / "model.safetensors", [random_tensor("t", "U8", (10,))])
    log = tmp_path / "audit.jsonl"
    serving = ServingOptions(access_file=access, audit_log=str(log))
    async with control_plane(tmp_path, workers=["w0"], serving=serving) as plane:
        operator = ChannelSecurity(token_file=write_token(tmp_path, "token-of-operator", "o"))
        viewer = ChannelSecurity(token_file=write_token(tmp_path, "token-of-viewer", "v"))
        async with (
            AsyncLoaderClient(plane.address, security=operator) as owner,
            AsyncLoaderClient(plane.address, security=viewer) as watcher,
        ):
            load = await owner.load("model.safetensors")
            assert load.owner == "the-operator"
            with pytest.raises(AccessDenied):
                await anext(watcher.watch(load.load_id, cancel_when_gone=True))
            assert (await watcher.get_load(load.load_id)).state != types_pb2.LOAD_STATE_CANCELLED
            watch = owner.watch(load.load_id, cancel_when_gone=True)
            await anext(watch)
            await watch.aclose()
            last = [each async for each in watcher.watch(load.load_id)][-1]
            assert last.state == types_pb2.LOAD_STATE_CANCELLED
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [
        (entry["identity"], entry["code"], entry["load_id"])
        for entry in entries
        if entry["method"] == "WatchLoad"
    ] == [
        ("the-viewer", "PERMISSION_DENIED", load.load_id),
        ("the-operator", "CANCELLED", load.load_id),
    ]


async def test_a_changed_access_file_counts_at_the_next_call(
    tokens: ControlPlane, tmp_path: Path
) -> None:
    security = ChannelSecurity(token_file=write_token(tmp_path, "token-of-viewer"))
    async with AsyncLoaderClient(tokens.address, security=security) as client:
        with pytest.raises(AccessDenied):
            await client.drain_worker("w0")
        write_access(tmp_path, token_identity("admin", "token-of-viewer"))
        await client.drain_worker("w0")
        # A file that cannot be used changes nothing.
        write_access(tmp_path, "[[identity]]\nrole = 'king'")
        await client.undrain_worker("w0")
        write_access(tmp_path, token_identity("viewer", "another"))
        with pytest.raises(Unauthenticated):
            await client.list_workers()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "names no"),
        ("[[identity]\n", "Expected"),
        ("identities = 1", "unknown key 'identities'"),
        (identity("a", "king", certificate="a"), "role is one of"),
        (identity("a", "viewer"), "are needed"),
        (identity("", "viewer", certificate="a"), "are needed"),
        (identity("a", "viewer", certificate="a", token_sha256="0" * 64), "are needed"),
        (identity("a", "viewer", certificate="a", color="red"), "are needed"),
        (identity("a", "viewer", token_sha256="secret"), "64 hexadecimal"),
        (identity("a", "viewer", certificate="x") * 2, "the same certificate"),
        (identity("a", "viewer", service_account="ns:name"), "[kubernetes]"),
        (
            identity("a", "viewer", certificate="x") + identity("a", "admin", certificate="y"),
            "two roles, viewer and admin",
        ),
        ("[[identity]]\nname = 1", "texts only"),
        (f"[[identity]]\nname = {'1' * 5000}", "4300"),
        (identity("a", "viewer", certificate="x") + "[kubernetes]\nurl = 'x'", "audience"),
    ],
)
def test_an_access_file_that_cannot_be_used_is_refused(
    tmp_path: Path, text: str, what: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Server([], ServingOptions(access_file=write_access(tmp_path, text)))
    assert caught.value.reason == "ACCESS_FILE_INVALID"
    assert what in caught.value.message


async def test_health_is_open_and_reflection_is_not(tokens: ControlPlane) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with grpc.aio.insecure_channel(tokens.address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reflected_services(channel)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


# ---------------------------------------------------------------- paths


@pytest.mark.parametrize(
    "path",
    [
        "../outside",
        "inside/../../outside",
        "/etc/passwd",
        "link",
        "inside/link/model.safetensors",
        "..",
        "%2e%2e/outside",
        "..%2foutside",
        "inside\0/../../outside",
        "a" * 4000,
        "~root",
        "file:///etc/passwd",
    ],
)
async def test_no_path_leaves_the_model_root(tmp_path: Path, path: str) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "inside").mkdir(parents=True)
    outside.mkdir()
    write_file(outside / "model.safetensors", [random_tensor("t", "U8", (10,))])
    (root / "link").symlink_to(outside)
    (root / "inside" / "link").symlink_to(outside)
    async with (
        control_plane(root, workers=["w0"]) as plane,
        AsyncLoaderClient(plane.address) as client,
    ):
        with pytest.raises(LoaderError) as planned:
            await client.plan(path)
        with pytest.raises(LoaderError) as caught:
            await client.inspect(path)
        assert planned.value.reason == caught.value.reason
        assert caught.value.reason in {"PATH_OUTSIDE_ROOT", "CHECKPOINT_NOT_FOUND"}
        if "%" not in path and not path.startswith(("a", "~", "file")) and "\0" not in path:
            assert isinstance(caught.value, PathOutsideRoot)
        with pytest.raises(LoaderError) as loaded:
            await client.load(path)
        assert loaded.value.reason == caught.value.reason


# ---------------------------------------------------------------- records


async def test_changes_and_refused_attempts_are_in_the_audit_log(
    tmp_path: Path, access: str
) -> None:
    log = tmp_path / "audit.jsonl"
    serving = ServingOptions(access_file=access, audit_log=str(log))
    async with control_plane(tmp_path, workers=["w0"], serving=serving) as plane:
        for role in ("admin", "viewer"):
            token = write_token(tmp_path, f"token-of-{role}", role)
            security = ChannelSecurity(token_file=token)
            async with AsyncLoaderClient(plane.address, security=security) as client:
                await client.list_workers()
                with contextlib.suppress(AccessDenied):
                    await client.drain_worker("w0", request_id="mine")
    first, second = (json.loads(line) for line in log.read_text().splitlines())
    assert first["time"]
    assert first["peer"]
    assert (first["identity"], first["method"]) == ("the-admin", "DrainWorker")
    assert (first["code"], first["worker_id"]) == ("OK", "w0")
    assert first["requestId"] == second["requestId"] == "mine"
    assert (second["identity"], second["code"]) == ("the-viewer", "PERMISSION_DENIED")
    assert second["reason"] == "ACCESS_DENIED"
    assert log.stat().st_mode & 0o077 == 0
    assert len(log.read_text().splitlines()) == 2
    assert "token-of" not in log.read_text()


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer wrong"),)])
async def test_of_a_caller_who_is_not_known_nothing_is_kept(
    tmp_path: Path, access: str, metadata: Any, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "audit.jsonl"
    serving = ServingOptions(access_file=access, audit_log=str(log))
    caplog.set_level(logging.INFO, "loader_service.calls")
    async with (
        control_plane(tmp_path, serving=serving) as plane,
        grpc.aio.insecure_channel(plane.address) as channel,
    ):
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Load(coordinator_pb2.LoadRequest(path="secret", tp=1), metadata=metadata)
    (entry,) = map(json.loads, log.read_text().splitlines())
    assert (entry["identity"], entry["code"]) == ("anonymous", "UNAUTHENTICATED")
    assert not entry.keys() & {"path", "tp"}
    assert "identity=anonymous" in caplog.text


async def test_nobody_fills_the_disk_through_the_audit_log(tmp_path: Path, access: str) -> None:
    log = tmp_path / "audit.jsonl"
    serving = ServingOptions(access_file=access, audit_log=str(log))
    request = coordinator_pb2.LoadRequest(path="\x01" * (1 << 20), tp=1)
    async with (
        control_plane(tmp_path, serving=serving) as plane,
        grpc.aio.insecure_channel(plane.address) as channel,
    ):
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        for metadata in ((), (("authorization", "Bearer token-of-operator"),)):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Load(request, metadata=metadata)
            log.rename(tmp_path / "rotated")
            assert (tmp_path / "rotated").stat().st_size < 3000
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Load(request)
    # Made anew, it is as private as before.
    assert log.stat().st_mode & 0o077 == 0


async def test_calls_are_counted_for_prometheus(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serving = ServingOptions(metrics_listen=f"127.0.0.1:{port}")
    async with (
        control_plane(tmp_path, serving=serving) as plane,
        AsyncLoaderClient(plane.address) as client,
    ):
        await client.list_workers()
        with pytest.raises(LoaderError):
            await client.get_load("none")
        text = await asyncio.to_thread(read_url, f"http://127.0.0.1:{port}/metrics")
    service = 'grpc_service="loader_service.v1.CoordinatorService"'
    for method, code in (("ListWorkers", "OK"), ("GetLoad", "NotFound")):
        labels = f'grpc_code="{code}",grpc_method="{method}",{service},grpc_type="unary"'
        assert f"grpc_server_handled_total{{{labels}}} 1.0" in text
    assert 'loader_build_info{version="' in text
    assert "none" not in text


def read_url(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())
