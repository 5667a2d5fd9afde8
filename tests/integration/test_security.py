"""Whom a server listens to: TLS, certificates that change, loopback, proxies."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from loader_service.channel import AsyncEndpoint
from loader_service.channel_security import ChannelSecurity
from loader_service.client import AsyncLoaderClient, LoaderClient
from loader_service.errors import (
    InvalidRequest,
    Unauthenticated,
)
from loader_service.serving.options import ServingOptions
from loader_service.serving.server import Server
from loader_service.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
)
from tests.certificates import (
    Authority,
    identity,
    write_access,
    write_token,
)
from tests.control_plane import ControlPlane, control_plane, reflected_services, refusal, succeeds

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
    assert "may not know the authority that signed" in error.message


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
    assert error.message.endswith("late.pem has expired")


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


async def test_a_certificate_without_its_key_is_not_taken(
    tmp_path: Path, access: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of a rotation: the pair that fitted stays until the other half is there."""
    authority = Authority(tmp_path)
    serving = authority.server(access)
    async with control_plane(tmp_path, workers=["w0"], serving=serving) as plane:
        security = authority.client("ops", "ops.example")
        key = Path(serving.tls_key).read_bytes()
        authority.issue("server", "127.0.0.1", "fresh.example")
        new_key = Path(serving.tls_key).read_bytes()
        Path(serving.tls_key).write_bytes(key)
        for name in ("127.0.0.1", "localhost"):
            # gRPC would share the connection of the same address and name.
            assert await succeeds(plane.address, dataclasses.replace(security, server_name=name))
        assert caplog.text.count("the last good ones stay") == 1
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

    for pair, reason, culprit in (
        ((cert, key), "TLS_FILES_INVALID", key),
        (("none", key), "FILE_UNREADABLE", "none"),
        ((cert, access), "TLS_FILES_INVALID", access),
        ((access, key), "TLS_FILES_INVALID", access),
    ):
        with pytest.raises(InvalidRequest) as caught:
            asyncio.run(start(*pair))
        assert (caught.value.reason, caught.value.metadata["file"]) == (reason, culprit)


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
