"""Tokens of service accounts, against an API server that this test plays."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loader_service.errors import InvalidRequest, ServiceUnavailable, Unauthenticated
from loader_service.serving.access import Access, read_access_file
from loader_service.serving.kubernetes import TokenReviewer
from tests.certificates import Authority, identity, write_access

AUDIENCE = "loader-service"
ACCOUNT = "system:serviceaccount:ml:loader-worker"


class ApiServer(http.server.ThreadingHTTPServer):
    """Answers token reviews.

    Attributes:
        answers: the status of a review by token; other tokens are not authenticated.
        reviews: what was asked.
    """

    def __init__(self, authority: Authority) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*authority.issue("api", "127.0.0.1"))
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.answers: dict[str, dict[str, Any]] = {}
        self.reviews: list[dict[str, Any]] = []
        self.status = 201


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ApiServer

    def do_POST(self) -> None:
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.reviews.append(
            {**review, "path": self.path, "caller": self.headers["Authorization"]}
        )
        status = self.server.answers.get(review["spec"]["token"], {"authenticated": False})
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(json.dumps({"status": status}).encode())

    def log_message(self, *arguments: object) -> None:
        pass


def authenticated(name: str = ACCOUNT, audiences: tuple[str, ...] = (AUDIENCE,)) -> dict[str, Any]:
    return {"authenticated": True, "audiences": audiences, "user": {"username": name}}


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    server = ApiServer(Authority(tmp_path))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def reviewer(api: ApiServer, tmp_path: Path) -> TokenReviewer:
    own = tmp_path / "own-token"
    own.write_text("the-coordinator\n")
    url = f"https://127.0.0.1:{api.server_address[1]}"
    return TokenReviewer(AUDIENCE, url, str(tmp_path / "ca.pem"), str(own))


async def test_a_token_is_reviewed_for_our_audience(
    api: ApiServer, reviewer: TokenReviewer
) -> None:
    api.answers["good"] = authenticated()
    assert await reviewer.review("good") == "ml:loader-worker"
    (asked,) = api.reviews
    assert asked["path"] == "/apis/authentication.k8s.io/v1/tokenreviews"
    assert asked["caller"] == "Bearer the-coordinator"
    assert (asked["kind"], asked["apiVersion"]) == ("TokenReview", "authentication.k8s.io/v1")
    assert asked["spec"] == {"token": "good", "audiences": [AUDIENCE]}


@pytest.mark.parametrize(
    "status",
    [
        {"authenticated": False},
        authenticated(audiences=("another",)),
        authenticated(name="somebody"),
        {"authenticated": True},
        {},
    ],
)
async def test_who_is_no_service_account_for_us_is_nobody(
    api: ApiServer, reviewer: TokenReviewer, status: dict[str, Any]
) -> None:
    api.answers["token"] = status
    assert await reviewer.review("token") == ""


async def test_an_answer_counts_for_a_minute(
    api: ApiServer, reviewer: TokenReviewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.answers["good"] = authenticated()
    for _ in range(3):
        assert await reviewer.review("good") == "ml:loader-worker"
        assert await reviewer.review("bad") == ""
    assert len(api.reviews) == 2
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    del api.answers["good"]
    assert await reviewer.review("good") == ""


async def test_an_api_server_that_fails_lets_nobody_in_and_is_asked_again(
    api: ApiServer, reviewer: TokenReviewer
) -> None:
    api.answers["good"] = authenticated()
    api.status = 500
    await cannot_review(reviewer)
    api.status = 201
    assert await reviewer.review("good") == "ml:loader-worker"


async def test_a_token_too_long_to_be_one_is_not_sent(
    api: ApiServer, reviewer: TokenReviewer
) -> None:
    assert await reviewer.review("x" * 100_000) == ""
    assert api.reviews == []


async def cannot_review(reviewer: TokenReviewer) -> None:
    """The caller may hold a good token: it is told to try again, not that it is unknown."""
    with pytest.raises(ServiceUnavailable) as caught:
        await reviewer.review("good")
    assert caught.value.reason == "TOKEN_NOT_REVIEWED"


def answering(api: ApiServer, status: int, body: bytes, **headers: str) -> None:
    """Have the API server answer everything alike."""

    def do_POST(handler: _Handler) -> None:
        handler.rfile.read(int(handler.headers["Content-Length"]))
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    api.RequestHandlerClass = type("Fixed", (_Handler,), {"do_POST": do_POST})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no json",
        b"[]",
        b'{"status": null}',
        b'{"status": {"authenticated": true, "user": 1, "audiences": 5}}',
        json.dumps({"status": {**authenticated(), "authenticated": "true"}}).encode(),
        b"[" * 100_000,
        b" " * (2 << 20),
    ],
)
async def test_an_answer_that_is_no_review_lets_nobody_in(
    api: ApiServer, reviewer: TokenReviewer, body: bytes
) -> None:
    answering(api, 201, body)
    with contextlib.suppress(ServiceUnavailable):
        assert await reviewer.review("good") == ""


async def test_a_server_that_speaks_no_http_lets_nobody_in(
    api: ApiServer, reviewer: TokenReviewer
) -> None:
    def do_POST(handler: _Handler) -> None:
        handler.wfile.write(b"nonsense\r\n\r\n")

    api.RequestHandlerClass = type("Silent", (_Handler,), {"do_POST": do_POST})
    await cannot_review(reviewer)


async def test_a_redirect_does_not_take_our_own_token_elsewhere(
    api: ApiServer, reviewer: TokenReviewer, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.settimeout(0.2)
        port = elsewhere.getsockname()[1]
        answering(api, 302, b"", Location=f"http://127.0.0.1:{port}/")
        await cannot_review(reviewer)
        with pytest.raises(TimeoutError):
            elsewhere.accept()
    assert "answers 302" in caplog.text


async def test_a_proxy_of_the_environment_is_not_asked(
    api: ApiServer, reviewer: TokenReviewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    api.answers["good"] = authenticated()
    assert await reviewer.review("good") == "ml:loader-worker"


@pytest.mark.parametrize("url", ["http://10.0.0.1", "file:///etc/passwd", "10.0.0.1:443", "https:"])
def test_tokens_are_sent_to_an_https_server_only(url: str, tmp_path: Path) -> None:
    section = f'[kubernetes]\naudience = "a"\napi_server = "{url}"\n'
    path = write_access(tmp_path, identity("a", "viewer", certificate="a"), section)
    with pytest.raises(InvalidRequest, match="https://") as caught:
        read_access_file(path)
    assert caught.value.reason == "ACCESS_FILE_INVALID"


def test_the_pod_may_have_an_ipv6_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    reviewer = TokenReviewer(AUDIENCE)
    assert (reviewer._host, reviewer._port) == ("fd00::1", 6443)


async def test_service_accounts_have_the_roles_of_the_access_file(
    api: ApiServer, reviewer: TokenReviewer, tmp_path: Path
) -> None:
    api.answers["good"] = authenticated()
    api.answers["other"] = authenticated("system:serviceaccount:ml:stranger")
    section = (
        f'[kubernetes]\naudience = "{AUDIENCE}"\n'
        f'api_server = "https://127.0.0.1:{api.server_address[1]}"\n'
        f'ca_cert = "{tmp_path}/ca.pem"\ntoken_file = "{tmp_path}/own-token"\n'
    )
    path = write_access(
        tmp_path, identity("workers", "worker", service_account="ml:loader-worker"), section
    )
    access = Access(path)
    assert (await access.identify([], "good")).name == "workers"
    with pytest.raises(Unauthenticated):
        await access.identify([], "other")
