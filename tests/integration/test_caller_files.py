"""Certificates and tokens as a caller has them on disk: half replaced, wrong, encrypted, unusual."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from loader_service.channel_security import ChannelSecurity
from loader_service.client import AsyncLoaderClient
from loader_service.errors import InvalidRequest, LoaderError, Unauthenticated
from loader_service.serving.options import ServingOptions
from loader_service.serving.server import Server
from tests.certificates import Authority, identity, token_identity, write_access, write_token
from tests.control_plane import ControlPlane, control_plane


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def access(tmp_path: Path) -> str:
    return write_access(
        tmp_path,
        identity("ops", "operator", certificate="ops.example"),
        token_identity("viewer", "token"),
    )


@pytest.fixture
async def mtls(tmp_path: Path, authority: Authority, access: str) -> AsyncIterator[ControlPlane]:
    async with control_plane(tmp_path, serving=authority.server(access)) as plane:
        yield plane


async def answer(address: str, security: ChannelSecurity) -> LoaderError | None:
    """Return why a call is refused, None if it is not."""
    async with AsyncLoaderClient(address, security=security) as client:
        try:
            await client.list_workers()
        except LoaderError as error:
            return error
        return None


def encrypt(key: str) -> None:
    """Put a passphrase on a private key."""
    loaded = serialization.load_pem_private_key(Path(key).read_bytes(), None)
    Path(key).write_bytes(
        loaded.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )


async def test_half_of_a_rotation_keeps_the_callers_old_pair(
    mtls: ControlPlane, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """Key first, then the certificate: calls in between go on, and a watch keeps its channel."""
    security = authority.client("ops", "ops.example")
    async with AsyncLoaderClient(mtls.address, security=security) as client:
        await client.list_workers()
        old = Path(security.cert).read_bytes()
        authority.issue("ops", "ops.example")
        new = Path(security.cert).read_bytes()
        Path(security.cert).write_bytes(old)
        await client.list_workers()
        await client.list_workers()
        assert caplog.text.count("the last good files stay") == 1
        caplog.clear()
        Path(security.cert).write_bytes(new)
        await client.list_workers()
        Path(security.cert).unlink()
        await client.list_workers()
        assert "ops.pem cannot be read" in caplog.text


@pytest.mark.parametrize("field", ["ca_cert", "cert", "key"])
async def test_a_file_that_is_no_certificate_is_named(
    mtls: ControlPlane, authority: Authority, tmp_path: Path, field: str
) -> None:
    """gRPC itself would only say that the server is unavailable."""
    bad = tmp_path / "bad.pem"
    bad.write_text("nonsense")
    security = authority.client("ops", "ops.example")
    changed: dict[str, Any] = {field: str(bad)}
    error = await answer(mtls.address, dataclasses.replace(security, **changed))
    assert (type(error), error and error.reason) == (InvalidRequest, "TLS_FILES_INVALID")
    assert str(error).startswith(str(bad))
    assert error is not None
    assert error.metadata["file"] == str(bad)


async def test_an_encrypted_key_is_refused_rather_than_asked_for(
    mtls: ControlPlane, authority: Authority, access: str
) -> None:
    security = authority.client("ops", "ops.example")
    encrypt(security.key)
    error = await answer(mtls.address, security)
    assert error is not None
    assert error.reason == "TLS_FILES_INVALID"
    serving = authority.server(access)
    encrypt(serving.tls_key)
    server = Server([], serving)
    with pytest.raises(InvalidRequest) as caught:
        await server.start("127.0.0.1:0")
    assert caught.value.reason == "TLS_FILES_INVALID"
    await server.grpc.stop(None)


@pytest.mark.parametrize(
    "content", [b"", b"\n", "tök\n".encode(), b"two words", b"a\nb", b"a\0b", b"x" * 20_000]
)
async def test_a_file_without_a_proper_token_is_named(
    tmp_path: Path, access: str, content: bytes
) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    async with control_plane(tmp_path, serving=ServingOptions(access_file=access)) as plane:
        error = await answer(plane.address, ChannelSecurity(token_file=str(file)))
    assert (type(error), error and error.reason) == (InvalidRequest, "TOKEN_INVALID")
    assert str(file) in str(error)
    assert content.decode("latin-1").strip() == "" or content.decode("latin-1") not in str(error)


async def test_tls_alone_trusts_the_authorities_of_the_machine(
    tmp_path: Path, authority: Authority, access: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    security = ChannelSecurity(tls=True, token_file=write_token(tmp_path, "token"))
    async with control_plane(tmp_path, serving=authority.server(access, mtls=False)) as plane:
        error = await answer(plane.address, security)
        assert error is not None
        assert error.reason == "TLS_CERTIFICATE_REFUSED"
        monkeypatch.setenv("SSL_CERT_FILE", authority.cert)
        assert await answer(plane.address, security) is None


async def test_a_wildcard_stands_for_one_label(
    tmp_path: Path, authority: Authority, access: str
) -> None:
    """What the diagnosis says must be what gRPC does."""
    security = authority.client("ops", "ops.example")
    serving = authority.server(access, "*.example.com")
    async with control_plane(tmp_path, serving=serving) as plane:
        for name in ("a.example.com", "A.Example.COM"):
            named = dataclasses.replace(security, server_name=name)
            assert await answer(plane.address, named) is None
        for name in ("a.b.example.com", "example.com", "127.0.0.1"):
            error = await answer(plane.address, dataclasses.replace(security, server_name=name))
            assert error is not None
            assert error.reason == "TLS_NAME_MISMATCH"


async def test_a_common_name_counts_where_the_certificate_has_no_other(
    tmp_path: Path, access: str
) -> None:
    """gRPC accepts it, so the diagnosis must look for another reason."""
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "own.pem"))
    leaf = ca.issue_cert(common_name="coord.example")
    leaf.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    pem = str(tmp_path / "server.pem")
    serving = ServingOptions(
        tls_cert=pem, tls_key=pem, tls_client_ca=str(tmp_path / "own.pem"), access_file=access
    )
    client = ca.issue_cert("ops.example")
    client.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "client.pem"))
    own = str(tmp_path / "client.pem")
    security = ChannelSecurity(
        ca_cert=str(tmp_path / "own.pem"), cert=own, key=own, server_name="coord.example"
    )
    async with control_plane(tmp_path, serving=serving) as plane:
        assert await answer(plane.address, security) is None
        error = await answer(plane.address, dataclasses.replace(security, cert="", key=""))
        assert error is not None
        assert error.reason == "TLS_CLIENT_REFUSED"
        error = await answer(plane.address, dataclasses.replace(security, server_name="other"))
        assert error is not None
        assert "CN:coord.example" in error.message


async def test_everything_holds_over_ipv6(
    tmp_path: Path, authority: Authority, access: str
) -> None:
    security = authority.client("ops", "ops.example")
    stranger = dataclasses.replace(security, cert="", key="")
    for name, reason in (("::1", "TLS_CLIENT_REFUSED"), ("coord", "TLS_NAME_MISMATCH")):
        serving = authority.server(access, name)
        async with control_plane(tmp_path, serving=serving, listen="[::1]:0") as plane:
            assert plane.address.startswith("[::1]:")
            if name == "::1":
                assert await answer(plane.address, security) is None
            error = await answer(plane.address, stranger)
            assert isinstance(error, Unauthenticated)
            assert error.reason == reason
