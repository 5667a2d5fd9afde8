"""The calling side of gRPC: how a channel is opened, secured and kept, and what its errors mean.

Imports nothing but grpcio and protobuf, so that other services can call this one with a small
install.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from loader_service import addresses, errors, tls_diagnosis
from loader_service.channel_security import ChannelSecurity
from loader_service.errors import InternalError, InvalidRequest, LoaderError
from loader_service.v1 import types_pb2

__all__ = [
    "FAILURE_KEY",
    "REQUEST_ID_KEY",
    "AsyncEndpoint",
    "SyncEndpoint",
    "from_rpc_error",
]

_log = logging.getLogger(__name__)

FAILURE_KEY = "loader-failure-bin"
"""Trailing metadata that carries an error of this project as a `Failure` message."""

REQUEST_ID_KEY = "x-request-id"
"""Metadata that names a call in the logs of both sides."""

_DIAGNOSIS_SECONDS = 3.0
"""How long to look at a server's TLS after a call that had no deadline."""

_SERVICE_CONFIG = {
    "methodConfig": [
        {
            # Every method of the coordinator may be repeated: readers change nothing, workers are
            # known by their incarnation, and what changes something carries a request id.
            "name": [{"service": "loader_service.v1.CoordinatorService"}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
    "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
}
_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.enable_retries", 1),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    # Workers and coordinators are reached directly; a proxy for the web must not get their calls.
    ("grpc.enable_http_proxy", 0),
    # Connecting is tried again as fast as calls are; by default the calls' tries would be over first.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A connection whose other end has vanished is noticed while a call waits on it.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


@dataclasses.dataclass(slots=True, eq=False)
class _Connection:
    """A channel with its stub, and how many calls use them."""

    channel: Any
    stub: Any
    calls: int = 0


class _Endpoint:
    """One server as its callers see it: a channel that is opened anew when certificates change."""

    def __init__(self, address: str, security: ChannelSecurity, stub: Callable[[Any], Any]) -> None:
        """Describe the server; nothing is sent or read yet.

        Args:
            address: `HOST:PORT`.
            security: how both sides show who they are.
            stub: class of the service's generated stub.

        Raises:
            InvalidRequest: the address is none, or TOKEN_NEEDS_TLS for a token that would travel in
                the clear.
        """
        host, _ = addresses.split(address)
        if security.token_file and not security.uses_tls and not addresses.is_loopback(host):
            raise InvalidRequest(
                f"a token is sent to {host} over TLS only; give a CA certificate too",
                reason="TOKEN_NEEDS_TLS",
                field="token_file",
            )
        self.address = address
        self.security = security
        self._make_stub = stub
        self._closed = False
        self._stamp: object = None
        self._complained: object = None
        # The last one is for new calls; those before it wait for the end of their calls.
        self._connections: list[_Connection] = []
        # Reentrant: the garbage collector may end an abandoned watch at any point of any thread.
        self._lock = threading.RLock()

    def metadata(self, request_id: str = "") -> tuple[tuple[str, str], ...]:
        """Return what every call carries: the bearer token and the request's id, where there are any.

        Raises:
            InvalidRequest: FILE_UNREADABLE, or TOKEN_INVALID.
        """
        entries = []
        if token := self.security.token():
            entries.append(("authorization", f"Bearer {token}"))
        if request_id:
            entries.append((REQUEST_ID_KEY, request_id))
        return tuple(entries)

    def _take(self) -> _Connection:
        """Count a call on the newest connection, and return that.

        While changed files cannot be used (one of a pair has been replaced already), it is the one
        before.

        Raises:
            InvalidRequest: FILE_UNREADABLE, TLS_FILES_INVALID, or CLIENT_CLOSED.
        """
        with self._lock:
            if self._closed:
                raise InvalidRequest(
                    f"the client of {self.address} is closed; make a new one",
                    reason="CLIENT_CLOSED",
                )
            stamp = self.security.stamp()
            if not self._connections or stamp != self._stamp:
                self._reopen(stamp)
            connection = self._connections[-1]
            connection.calls += 1
            return connection

    def _reopen(self, stamp: object) -> None:
        try:
            channel = self._open()
        except InvalidRequest as error:
            if not self._connections:
                raise
            # Tried again at every call, as rights may change without a new stamp.
            if (stamp, error.message) != self._complained:
                _log.warning("%s; the last good files stay", error)
            self._complained = (stamp, error.message)
            return
        self._connections.append(_Connection(channel, self._make_stub(channel)))
        self._stamp = stamp

    def _give_back(self, connection: _Connection) -> None:
        with self._lock:
            connection.calls -= 1

    def _unused(self) -> list[Any]:
        """Take out the channels that are neither for new calls nor used by one under way."""
        with self._lock:
            unused = [each for each in self._connections[:-1] if not each.calls]
            self._connections = [each for each in self._connections if each not in unused]
        return [each.channel for each in unused]

    def _open(self) -> Any:
        raise NotImplementedError

    def _options(self) -> tuple[tuple[str, int | str], ...]:
        if self.security.server_name:
            return (*_OPTIONS, ("grpc.ssl_target_name_override", self.security.server_name))
        return _OPTIONS

    def _explained(self, error: grpc.RpcError, seconds: float) -> LoaderError:
        failure = from_rpc_error(error)
        # A server that has sent its own error has been reached.
        if isinstance(failure, errors.ServiceUnavailable) and not _sent_failure(error):
            return tls_diagnosis.explain(self.address, self.security, seconds) or failure
        return failure


class AsyncEndpoint(_Endpoint):
    """A server called from asyncio; `close` it."""

    def _open(self) -> grpc.aio.Channel:
        if self.security.uses_tls:
            return grpc.aio.secure_channel(
                self.address, self.security.credentials(), options=self._options()
            )
        return grpc.aio.insecure_channel(self.address, options=self._options())

    async def call(
        self, method: str, request: object, timeout_seconds: float, request_id: str = ""
    ) -> Any:
        """Make a call with one answer, and return that.

        Args:
            method: name of the RPC.
            request: message, or iterable of messages.
            timeout_seconds: deadline.
            request_id: names the call in the server's log.

        Raises:
            LoaderError: what the server raised, or what happened on the way.
        """
        ends = time.monotonic() + timeout_seconds
        try:
            async with self.lend() as stub:
                return await getattr(stub, method)(
                    request, timeout=timeout_seconds, metadata=self.metadata(request_id)
                )
        except grpc.RpcError as error:
            raise await self.translate(error, ends - time.monotonic()) from error

    @contextlib.asynccontextmanager
    async def lend(self) -> AsyncIterator[Any]:
        """Yield the stub to make a call with; its channel stays open for as long as the block lasts.

        Raises:
            InvalidRequest: FILE_UNREADABLE, or TLS_FILES_INVALID.
        """
        connection = self._take()
        try:
            await self._close_unused()
            yield connection.stub
        finally:
            self._give_back(connection)
            await self._close_unused()

    async def translate(
        self, error: grpc.RpcError, seconds: float = _DIAGNOSIS_SECONDS
    ) -> LoaderError:
        """Return what a call's error means.

        Args:
            error: what gRPC raised.
            seconds: how long it may take to look at the TLS of a server that cannot be reached.
        """
        return await asyncio.to_thread(self._explained, error, seconds)

    async def close(self) -> None:
        """Close every channel, for good; repeating it is harmless."""
        self._closed = True
        for connection in list(self._connections):
            await connection.channel.close()

    async def _close_unused(self) -> None:
        for channel in self._unused():
            await channel.close()


class SyncEndpoint(_Endpoint):
    """A server called from ordinary code, also from several threads; `close` it."""

    def _open(self) -> grpc.Channel:
        if self.security.uses_tls:
            return grpc.secure_channel(
                self.address, self.security.credentials(), options=self._options()
            )
        return grpc.insecure_channel(self.address, options=self._options())

    def call(
        self, method: str, request: object, timeout_seconds: float, request_id: str = ""
    ) -> Any:
        """Make a call with one answer, and return that; see `AsyncEndpoint.call`."""
        ends = time.monotonic() + timeout_seconds
        try:
            with self.lend() as stub:
                return getattr(stub, method)(
                    request, timeout=timeout_seconds, metadata=self.metadata(request_id)
                )
        except grpc.RpcError as error:
            raise self.translate(error, ends - time.monotonic()) from error

    @contextlib.contextmanager
    def lend(self) -> Iterator[Any]:
        """Yield the stub to make a call with; see `AsyncEndpoint.lend`."""
        connection = self._take()
        try:
            self._close_unused()
            yield connection.stub
        finally:
            self._give_back(connection)
            self._close_unused()

    def translate(self, error: grpc.RpcError, seconds: float = _DIAGNOSIS_SECONDS) -> LoaderError:
        """Return what a call's error means; see `AsyncEndpoint.translate`."""
        return self._explained(error, seconds)

    def close(self) -> None:
        """Close every channel, for good; repeating it is harmless."""
        self._closed = True
        for connection in list(self._connections):
            connection.channel.close()

    def _close_unused(self) -> None:
        for channel in self._unused():
            channel.close()


def from_rpc_error(error: grpc.RpcError) -> LoaderError:
    """Return the error that the server raised, or one for what happened on the way."""
    if failure := _sent_failure(error):
        return failure
    details = error.details()
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            return errors.ServiceUnavailable(details or "the server cannot be reached")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.DeadlineExceeded(details or "the answer did not come in time")
    return InternalError(details or "the call failed without a text", grpc_status=error.code().name)


def _sent_failure(error: grpc.RpcError) -> LoaderError | None:
    """Return the error that the server itself raised; None where the status is all there is."""
    trailing: Any = error.trailing_metadata()
    for key, value in trailing or ():
        if key == FAILURE_KEY:
            try:
                failure = types_pb2.Failure.FromString(value)
            except DecodeError:
                return None  # Whoever sent this is no server of ours.
            return errors.from_fields(failure.reason, failure.message, failure.metadata)
    return None
