"""Every promise of SECURITY.md: who is let in, what they may do, and what is too large."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import socket
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from loader_service.channel import AsyncEndpoint, from_rpc_error
from loader_service.channel_security import ChannelSecurity
from loader_service.client import AsyncLoaderClient, LoaderClient
from loader_service.errors import (
    AccessDenied,
    InvalidRequest,
    LimitExceeded,
    LoaderError,
    PathOutsideRoot,
    QuotaExceeded,
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
    Authority,
    identity,
    token_identity,
    write_access,
    write_token,
)
from tests.checkpoints import random_tensor, write_file
from tests.control_plane import ControlPlane, control_plane, registration

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


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("foreign"))


@pytest.fixture
def access(tmp_path: Path) -> str:
    return write_access(
        tmp_path,
        identity("ops", "operator", certificate="ops.example"),
        identity("looker", "viewer", certificate="looker.example"),
        *(token_identity(role, f"token-of-{role}") for role in ROLES),
    )


async def refusal(address: str, security: ChannelSecurity) -> LoaderError:
    """Return why a call is refused; it takes less than 3 s to know."""
    started = time.monotonic()
    async with AsyncLoaderClient(address, security=security) as client:
        with pytest.raises(LoaderError) as caught:
            await client.list_workers()
    assert time.monotonic() - started < 3.0
    return caught.value


async def succeeds(address: str, security: ChannelSecurity) -> bool:
    async with AsyncLoaderClient(address, security=security) as client:
        return len(await client.list_workers()) == 1


# ---------------------------------------------------------------- TLS


@pytest.fixture
async def mtls(tmp_path: Path, authority: Authority, access: str) -> AsyncIterator[ControlPlane]:
    async with control_plane(tmp_path, workers=["w0"], serving=authority.server(access)) as plane:
        yield plane


async def test_a_known_certificate_is_let_in(mtls: ControlPlane, authority: Authority) -> None:
    security = authority.client("ops", "ops.example")
    assert await succeeds(mtls.address, security)
    with LoaderClient(mtls.address, security=security) as client:
        assert len(await asyncio.to_thread(client.list_workers)) == 1


async def test_a_server_of_another_authority_is_not_trusted(
    mtls: ControlPlane, authority: Authority, foreign: Authority
) -> None:
    security = dataclasses.replace(authority.client("ops", "ops.example"), ca_cert=foreign.cert)
    error = await refusal(mtls.address, security)
    assert (type(error), error.reason) == (Unauthenticated, "TLS_CERTIFICATE_REFUSED")


async def test_a_client_of_another_authority_is_turned_away(
    mtls: ControlPlane, authority: Authority, foreign: Authority
) -> None:
    security = dataclasses.replace(foreign.client("bad", "ops.example"), ca_cert=authority.cert)
    error = await refusal(mtls.address, security)
    assert (type(error), error.reason) == (Unauthenticated, "TLS_CLIENT_REFUSED")


async def test_a_client_without_a_certificate_is_turned_away(
    mtls: ControlPlane, authority: Authority
) -> None:
    error = await refusal(mtls.address, ChannelSecurity(ca_cert=authority.cert))
    assert (type(error), error.reason) == (Unauthenticated, "TLS_CLIENT_REFUSED")


async def test_an_expired_client_certificate_is_turned_away(
    mtls: ControlPlane, authority: Authority
) -> None:
    error = await refusal(mtls.address, authority.client("late", "ops.example", days=-1))
    assert (type(error), error.reason) == (Unauthenticated, "TLS_CLIENT_REFUSED")


async def test_an_expired_server_certificate_is_not_trusted(
    tmp_path: Path, authority: Authority, access: str
) -> None:
    cert, key = authority.issue("expired", "127.0.0.1", days=-1)
    serving = ServingOptions(tls_cert=cert, tls_key=key, access_file=access)
    async with control_plane(tmp_path, serving=serving) as plane:
        error = await refusal(plane.address, ChannelSecurity(ca_cert=authority.cert))
    assert error.reason == "TLS_CERTIFICATE_REFUSED"
    assert "expired" in error.message


async def test_a_certificate_that_nobody_has_a_role_for_is_named(
    mtls: ControlPlane, authority: Authority
) -> None:
    error = await refusal(mtls.address, authority.client("stranger", "stranger.example"))
    assert (type(error), error.reason) == (Unauthenticated, "CERTIFICATE_UNKNOWN")
    assert "stranger.example" in error.message


async def test_names_of_the_certificate_and_the_dialled_one_are_told(
    tmp_path: Path, authority: Authority, access: str
) -> None:
    """gRPC itself only says that the server is unavailable (H08)."""
    cert, key = authority.issue("coord", "coord")
    serving = ServingOptions(tls_cert=cert, tls_key=key, access_file=access)
    token = write_token(tmp_path, "token-of-viewer")
    security = ChannelSecurity(ca_cert=authority.cert, token_file=token)
    async with control_plane(tmp_path, workers=["w0"], serving=serving) as plane:
        port = plane.address.rpartition(":")[2]
        for dialled in ("127.0.0.1", "localhost"):
            error = await refusal(f"{dialled}:{port}", security)
            assert error.reason == "TLS_NAME_MISMATCH"
            assert repr(dialled) in error.message
            assert "DNS:coord" in error.message
        assert await succeeds(plane.address, dataclasses.replace(security, server_name="coord"))


async def test_plaintext_to_tls_and_tls_to_plaintext_are_told_apart(
    mtls: ControlPlane, tmp_path: Path, authority: Authority
) -> None:
    assert (await refusal(mtls.address, ChannelSecurity())).reason == "TLS_REQUIRED"
    async with control_plane(tmp_path) as plane:
        error = await refusal(plane.address, ChannelSecurity(ca_cert=authority.cert))
    assert error.reason == "TLS_NOT_SPOKEN"


async def test_a_server_takes_a_new_certificate_without_a_restart(
    tmp_path: Path, access: str
) -> None:
    """New connections see the new one, those that are open live on."""
    authority = Authority(tmp_path)
    async with control_plane(tmp_path, workers=["w0"], serving=authority.server(access)) as plane:
        security = authority.client("ops", "ops.example")
        async with AsyncLoaderClient(plane.address, security=security) as before:
            await before.list_workers()
            authority.issue("server", "elsewhere")
            # Its own channel: gRPC would share the connection of the same address and files.
            fresh = dataclasses.replace(security, server_name="elsewhere")
            assert await succeeds(plane.address, fresh)
            await before.list_workers()


async def test_a_certificate_without_its_key_is_not_taken(tmp_path: Path, access: str) -> None:
    """Half of a rotation: the pair that fitted stays until the other half is there."""
    authority = Authority(tmp_path)
    serving = authority.server(access)
    async with control_plane(tmp_path, workers=["w0"], serving=serving) as plane:
        security = authority.client("ops", "ops.example")
        key = Path(serving.tls_key).read_bytes()
        authority.issue("server", "127.0.0.1", "fresh.example")
        new_key = Path(serving.tls_key).read_bytes()
        Path(serving.tls_key).write_bytes(key)
        assert await succeeds(plane.address, security)
        Path(serving.tls_key).write_bytes(new_key)
        fresh = dataclasses.replace(security, server_name="fresh.example")
        assert await succeeds(plane.address, fresh)


async def test_a_client_takes_its_new_certificate_without_a_restart(
    mtls: ControlPlane, tmp_path: Path
) -> None:
    authority = Authority(tmp_path, "own")
    access = write_access(tmp_path, identity("ops", "viewer", certificate="ops.example"))
    async with control_plane(tmp_path, workers=["w0"], serving=authority.server(access)) as plane:
        security = authority.client("client", "stranger.example")
        async with AsyncLoaderClient(plane.address, security=security) as client:
            with pytest.raises(Unauthenticated):
                await client.list_workers()
            authority.issue("client", "ops.example")
            assert len(await client.list_workers()) == 1


def test_files_of_tls_that_do_not_fit_are_refused_at_the_start(
    tmp_path: Path, authority: Authority, access: str
) -> None:
    cert, _ = authority.issue("one", "127.0.0.1")
    _, key = authority.issue("two", "127.0.0.1")

    async def start(cert: str, key: str) -> None:
        serving = ServingOptions(access_file=access, tls_cert=cert, tls_key=key)
        await Server([], serving).start("127.0.0.1:0")

    for pair in ((cert, key), ("none", key)):
        with pytest.raises(InvalidRequest) as caught:
            asyncio.run(start(*pair))
        assert caught.value.reason == "TLS_FILES_INVALID"


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
        return error.code()
    return grpc.StatusCode.OK


async def test_the_refusal_names_who_would_be_let_in(tokens: ControlPlane, tmp_path: Path) -> None:
    security = ChannelSecurity(token_file=write_token(tmp_path, "token-of-viewer"))
    async with AsyncLoaderClient(tokens.address, security=security) as client:
        with pytest.raises(AccessDenied, match="role viewer; Load is for admin, operator"):
            await client.load("model")


async def test_only_who_may_cancel_may_watch_with_that_threat(tmp_path: Path, access: str) -> None:
    write_file(tmp_path / "model.safetensors", [random_tensor("t", "U8", (10,))])
    serving = ServingOptions(access_file=access)
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


async def reflected_services(channel: grpc.aio.Channel) -> set[str]:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async for answer in stub.ServerReflectionInfo(iter([request])):
        return {service.name for service in answer.list_services_response.service}
    return set()


async def test_reflection_shows_the_services_where_nothing_is_secured(
    tmp_path: Path, mtls: ControlPlane, authority: Authority
) -> None:
    async with (
        control_plane(tmp_path) as plane,
        grpc.aio.insecure_channel(plane.address) as channel,
    ):
        services = await reflected_services(channel)
    assert "loader_service.v1.CoordinatorService" in services
    credentials = authority.client("looker", "looker.example").credentials()
    async with grpc.aio.secure_channel(mtls.address, credentials) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reflected_services(channel)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


# ---------------------------------------------------------------- listening


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "10.1.2.3:0", "coordinator:0"])
def test_a_server_that_is_not_secured_stays_on_this_machine(
    listen: str, tmp_path: Path, authority: Authority, access: str
) -> None:
    cert, key = authority.issue("server", "x")
    for halves in (
        ServingOptions(),
        ServingOptions(access_file=access),
        ServingOptions(tls_cert=cert, tls_key=key),
    ):
        with pytest.raises(InvalidRequest, match="--tls-cert, --tls-key and --access") as caught:
            halves.check_listen(listen)
        assert caught.value.reason == "INSECURE_LISTEN"
    ServingOptions(insecure=True).check_listen(listen)
    ServingOptions(tls_cert=cert, tls_key=key, access_file=access).check_listen(listen)


def test_loopback_is_open_to_everybody_on_the_machine() -> None:
    for listen in ("127.0.0.1:0", "127.3.2.1:0", "[::1]:0", "localhost:0"):
        ServingOptions().check_listen(listen)


@pytest.mark.parametrize(
    "options",
    [
        {"tls_cert": "a"},
        {"tls_key": "a"},
        {"tls_client_ca": "a", "tls_cert": "a", "tls_key": "a"},
        {"tls_client_ca": "a", "access_file": "a"},
    ],
)
def test_options_that_mean_nothing_without_others_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest):
        ServingOptions(**options)  # type: ignore[arg-type]


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
        load = await client.load(path)
        ended = [load async for load in client.watch(load.load_id)][-1]
        assert ended.failure.reason == caught.value.reason


# ---------------------------------------------------------------- sizes and numbers


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
    assert (second["identity"], second["code"]) == ("the-viewer", "PERMISSION_DENIED")
    assert second["reason"] == "ACCESS_DENIED"
    assert log.stat().st_mode & 0o077 == 0
    assert len(log.read_text().splitlines()) == 2
    assert "token-of" not in log.read_text()


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


# ---------------------------------------------------------------- proxies


async def test_a_proxy_of_the_environment_gets_no_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls inside a cluster must not go through the proxy for the web."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    async with control_plane(tmp_path, workers=["w0"]) as plane:
        assert await succeeds(plane.address, ChannelSecurity())
        with LoaderClient(plane.address) as client:
            assert len(await asyncio.to_thread(client.list_workers)) == 1


async def test_an_endpoint_reads_no_file_before_it_calls(tmp_path: Path) -> None:
    """And says which file it is that cannot be read."""
    security = ChannelSecurity(ca_cert=str(tmp_path / "missing.pem"))
    endpoint = AsyncEndpoint("127.0.0.1:1", security, coordinator_pb2_grpc.CoordinatorServiceStub)
    with pytest.raises(InvalidRequest, match=r"missing\.pem") as caught:
        await endpoint.call("ListWorkers", coordinator_pb2.ListWorkersRequest(), 1.0)
    assert caught.value.reason == "FILE_UNREADABLE"
    await endpoint.close()
