"""The calling side: channels that threads share, certificates that change, errors that are explained."""

from __future__ import annotations

import dataclasses
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from loader_service import tls_diagnosis
from loader_service.channel import SyncEndpoint
from loader_service.channel_security import ChannelSecurity
from loader_service.client import AsyncLoaderClient, LoaderClient
from loader_service.errors import InvalidRequest, ServiceUnavailable
from loader_service.v1 import types_pb2
from tests.certificates import Authority
from tests.fake_coordinator import FakeCoordinator, fake_coordinator
from tests.messages import streaming, succeeded

THREADS = 12


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def secured(authority: Authority) -> Iterator[FakeCoordinator]:
    cert, key = authority.issue("server", "127.0.0.1")
    pair = (Path(key).read_bytes(), Path(cert).read_bytes())
    authorities = Path(authority.cert).read_bytes()
    with fake_coordinator(grpc.ssl_server_credentials([pair], authorities, True)) as running:
        yield running


def test_threads_share_one_channel_from_their_first_call_on(
    secured: FakeCoordinator, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[grpc.Channel] = []
    usual = SyncEndpoint._open

    def slowly(endpoint: SyncEndpoint) -> grpc.Channel:
        time.sleep(0.02)
        opened.append(usual(endpoint))
        return opened[-1]

    monkeypatch.setattr(SyncEndpoint, "_open", slowly)
    together = threading.Barrier(THREADS)
    security = authority.client("me", "me.example")
    with LoaderClient(secured.endpoint, security=security) as client:

        def call(_: int) -> int:
            together.wait()
            return len(client.list_workers())

        with ThreadPoolExecutor(THREADS) as pool:
            assert list(pool.map(call, range(THREADS))) == [2] * THREADS
    assert len(opened) == 1


def test_a_watch_keeps_its_channel_however_often_certificates_change(
    secured: FakeCoordinator, authority: Authority
) -> None:
    security = authority.client("me", "me.example")
    with LoaderClient(secured.endpoint, security=security) as client:
        secured.put(streaming())
        watch = client.watch("load-1")
        next(watch)
        for _ in range(4):
            authority.issue("me", "me.example")
            client.list_workers()
        # The one that is watched and the newest.
        assert len(client._coordinator._connections) == 2
        secured.put(succeeded())
        assert [load.state for load in watch] == [types_pb2.LOAD_STATE_SUCCEEDED]
        asked = [each for each in secured.requests if type(each).__name__ == "WatchLoadRequest"]
        assert len(asked) == 1
        assert len(client._coordinator._connections) == 1


def test_an_error_of_the_server_itself_needs_no_look_at_its_tls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[Any] = []
    monkeypatch.setattr(tls_diagnosis, "explain", lambda *given: looks.append(given))
    with fake_coordinator() as fake, LoaderClient(fake.endpoint) as client:
        fake.away = True
        with pytest.raises(ServiceUnavailable) as caught:
            client.list_workers()
        assert (caught.value.reason, looks) == ("SHUTTING_DOWN", [])
    with LoaderClient("127.0.0.1:1", 5.0) as client, pytest.raises(ServiceUnavailable):
        client.list_workers()
    ((address, _, seconds),) = looks
    assert address == "127.0.0.1:1"
    assert seconds < 5.0


@pytest.mark.parametrize("seconds", [0.3, 0.0, -1.0])
def test_a_server_that_says_nothing_is_looked_at_no_longer_than_allowed(seconds: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        assert tls_diagnosis.explain(address, ChannelSecurity(tls=True), seconds) is None
        assert time.monotonic() - began < max(seconds, 0.0) + 0.2


@pytest.mark.parametrize(("given", "sent"), [("mine", True), ("töne", False), ("a\nb", False)])
def test_a_request_id_that_was_given_also_names_the_call(
    monkeypatch: pytest.MonkeyPatch, given: str, sent: bool
) -> None:
    ids: list[str] = []
    usual = SyncEndpoint.call

    def call(endpoint: SyncEndpoint, *words: Any) -> Any:
        ids.append(words[-1])
        return usual(endpoint, *words)

    monkeypatch.setattr(SyncEndpoint, "call", call)
    with fake_coordinator() as fake, LoaderClient(fake.endpoint) as client:
        client.cancel("load-1", request_id=given)
        client.cancel("load-1")
        assert [each.request_id for each in fake.requests] == [given, ids[1]]
    assert (ids[0] == given) == sent
    assert all(ids)


def test_the_file_at_fault_is_named(tmp_path: Path, authority: Authority) -> None:
    good = authority.client("me", "me.example")
    other = authority.client("other", "me.example")
    bad, missing = tmp_path / "bad.pem", tmp_path / "missing.pem"
    bad.write_text("nonsense")
    changes: list[tuple[dict[str, str], str, str]] = [
        ({"ca_cert": str(bad)}, "TLS_FILES_INVALID", str(bad)),
        ({"cert": str(bad)}, "TLS_FILES_INVALID", str(bad)),
        ({"key": str(bad)}, "TLS_FILES_INVALID", str(bad)),
        ({"key": other.key}, "TLS_FILES_INVALID", other.key),
        *(
            ({field: str(missing)}, "FILE_UNREADABLE", str(missing))
            for field in ("ca_cert", "cert", "key")
        ),
    ]
    good.credentials()
    for change, reason, culprit in changes:
        with pytest.raises(InvalidRequest) as caught:
            dataclasses.replace(good, **change).credentials()  # type: ignore[arg-type]
        assert (caught.value.reason, caught.value.metadata["file"]) == (reason, culprit)


def test_files_that_change_while_they_are_checked_are_not_used(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC gets the bytes that were checked, no others."""
    security = authority.client("me", "me.example")
    usual = ssl.SSLContext.load_cert_chain

    def replaced(context: ssl.SSLContext, *words: Any, **options: Any) -> None:
        usual(context, *words, **options)
        authority.issue("me", "me.example")

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", replaced)
    with pytest.raises(InvalidRequest, match="has changed while it was checked"):
        security.credentials()


def test_a_closed_client_says_so(secured: FakeCoordinator, authority: Authority) -> None:
    client = LoaderClient(secured.endpoint, security=authority.client("me", "me.example"))
    client.list_workers()
    client.close()
    client.close()
    for call in (client.list_workers, lambda: next(client.watch("load-1"))):
        with pytest.raises(InvalidRequest, match="is closed; make a new one") as caught:
            call()
        assert caught.value.reason == "CLIENT_CLOSED"


async def test_a_closed_client_for_asyncio_says_so(secured: FakeCoordinator) -> None:
    async with AsyncLoaderClient(secured.endpoint) as client:
        pass
    with pytest.raises(InvalidRequest, match="is closed; make a new one"):
        await client.list_workers()
