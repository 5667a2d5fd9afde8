"""The calling side of gRPC: how a channel is opened, secured and kept, and what its errors mean.

Imports nothing but grpcio and protobuf, so that other services can call this one with a small
install.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
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
        self._stamp: object = None
        self._channels: list[Any] = []
        self._stub: Any = None

    @property
    def stub(self) -> Any:
        """The stub to make the next call with.

        While changed files cannot be used (one of a pair has been replaced already), it is the one
        before.

        Raises:
            InvalidRequest: FILE_UNREADABLE, or TLS_FILES_INVALID.
        """
        stamp = self.security.stamp()
        if self._stub is None or stamp != self._stamp:
            # Calls under way keep the channel that they began on.
            try:
                channel = self._open()
            except InvalidRequest as error:
                if self._stub is None:
                    raise
                _log.warning("%s; the last good files stay", error)
                return self._stub
            self._channels.append(channel)
            self._stub = self._make_stub(channel)
            self._stamp = stamp
        return self._stub

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

    def _outdated(self) -> list[Any]:
        """Take out the channels before the last two; certificates change so seldom that none is in use."""
        old = self._channels[:-2]
        del self._channels[:-2]
        return old

    def _open(self) -> Any:
        raise NotImplementedError

    def _options(self) -> tuple[tuple[str, int | str], ...]:
        if self.security.server_name:
            return (*_OPTIONS, ("grpc.ssl_target_name_override", self.security.server_name))
        return _OPTIONS

    def _explained(self, error: LoaderError) -> LoaderError:
        if isinstance(error, errors.ServiceUnavailable):
            return tls_diagnosis.explain(self.address, self.security) or error
        return error


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
        stub = self.stub
        for channel in self._outdated():
            await channel.close()
        try:
            return await getattr(stub, method)(
                request, timeout=timeout_seconds, metadata=self.metadata(request_id)
            )
        except grpc.RpcError as error:
            raise await self.translate(error) from error

    async def translate(self, error: grpc.RpcError) -> LoaderError:
        """Return what a call's error means; for an unreachable server look at its TLS too."""
        return await asyncio.to_thread(self._explained, from_rpc_error(error))

    async def close(self) -> None:
        """Close every channel; repeating it is harmless."""
        for channel in self._channels:
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
        stub = self.stub
        for channel in self._outdated():
            channel.close()
        try:
            return getattr(stub, method)(
                request, timeout=timeout_seconds, metadata=self.metadata(request_id)
            )
        except grpc.RpcError as error:
            raise self.translate(error) from error

    def translate(self, error: grpc.RpcError) -> LoaderError:
        """Return what a call's error means; for an unreachable server look at its TLS too."""
        return self._explained(from_rpc_error(error))

    def close(self) -> None:
        """Close every channel; repeating it is harmless."""
        for channel in self._channels:
            channel.close()


def from_rpc_error(error: grpc.RpcError) -> LoaderError:
    """Return the error that the server raised, or one for what happened on the way."""
    trailing: Any = error.trailing_metadata()
    for key, value in trailing or ():
        if key == FAILURE_KEY:
            try:
                failure = types_pb2.Failure.FromString(value)
            except DecodeError:
                break  # Whoever sent this is no server of ours; the status is all that counts.
            return errors.from_fields(failure.reason, failure.message, failure.metadata)
    details = error.details()
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            return errors.ServiceUnavailable(details or "the server cannot be reached")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.DeadlineExceeded(details or "the answer did not come in time")
    return InternalError(details or "the call failed without a text", grpc_status=error.code().name)
