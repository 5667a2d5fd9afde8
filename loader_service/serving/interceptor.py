"""What happens around every call: who calls, may they, how long, and what is recorded."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from loader_service.channel import REQUEST_ID_KEY
from loader_service.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    LoaderError,
    QuotaExceeded,
)
from loader_service.serving import access
from loader_service.serving.access import (
    CHANGING_METHODS,
    LOCAL,
    NOBODY,
    OPEN_METHODS,
    Access,
    Identity,
)
from loader_service.serving.audit import AuditLog
from loader_service.serving.metrics import Metrics
from loader_service.serving.status import trailing_metadata

__all__ = ["CallInterceptor"]

_log = logging.getLogger(__name__)
_access_log = logging.getLogger("loader_service.calls")

LEAST_SECONDS = 0.005
"""A call with less time left is refused: it would change something and could not say so."""

MOST_SECONDS = 600.0
"""How long a unary call may take that has no deadline of its own."""

_QUIET = "/loader_service.v1.CoordinatorService/Heartbeat"
"""Comes all the time; it is logged for debugging only."""

_SHAPES: dict[
    tuple[bool, bool], tuple[str, str, Callable[..., grpc.RpcMethodHandler[Any, Any]]]
] = {
    (False, False): ("unary", "unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("server_stream", "unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("client_stream", "stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("bidi_stream", "stream_stream", grpc.stream_stream_rpc_method_handler),
}
"""By (request streaming, response streaming): kind for the metrics, behavior, maker of the handler."""

_REQUEST_ID = re.compile(r"[\w.:-]{1,64}")
_Context = grpc.aio.ServicerContext[Any, Any]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler; one per server."""

    def __init__(
        self,
        access_control: Access | None,
        audit_log: AuditLog,
        metrics: Metrics,
        max_streams: int,
    ) -> None:
        """Share one set of counters among all calls.

        Args:
            access_control: tells callers apart; None lets everybody do everything.
            audit_log: records calls that change something.
            metrics: counts calls.
            max_streams: most response streams (watches) that one identity may have open.
        """
        self._access = access_control
        self._audit_log = audit_log
        self._metrics = metrics
        self._max_streams = max_streams
        self.open_streams: collections.Counter[str] = collections.Counter()
        """Response streams that are open now, by identity."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the method's handler; methods that nobody serves have none."""
        handler = await continuation(details)
        # Probes need no identity, and their handlers write for themselves.
        if handler is None or details.method in OPEN_METHODS:
            return handler
        kind, attribute, make_handler = _SHAPES[
            handler.request_streaming, handler.response_streaming
        ]
        # Messages are decoded in here: gRPC would answer a wrong one by a traceback in the log.
        decoded = _all_decoded if handler.request_streaming else _decoded
        wrap = self._streaming if handler.response_streaming else self._single
        behavior = wrap(
            details.method,
            kind,
            decoded(handler.request_deserializer),
            getattr(handler, attribute),
        )
        return make_handler(behavior, response_serializer=handler.response_serializer)

    def _single(self, method: str, kind: str, decode: _Decode, behavior: Any) -> Any:
        async def handle(raw: Any, context: _Context) -> Any:
            call = _Call(method, kind, context)
            try:
                with self._recorded(call):
                    request = decode(call, raw)
                    await self._admit(call)
                    call.response = await _in_time(call, behavior(request, context))
                return call.response
            except LoaderError as error:
                await context.abort(*trailing_metadata(error))

        return handle

    def _streaming(self, method: str, kind: str, decode: _Decode, behavior: Any) -> Any:
        async def handle(raw: Any, context: _Context) -> AsyncIterator[Any]:
            call = _Call(method, kind, context)
            try:
                with self._recorded(call):
                    request = decode(call, raw)
                    await self._admit(call)
                    with self._counted(call.identity):
                        # Closed here and now when the caller goes away, not when it is collected.
                        async with contextlib.aclosing(behavior(request, context)) as responses:
                            async for response in responses:
                                yield response
            except LoaderError as error:
                await context.abort(*trailing_metadata(error))

        return handle

    async def _admit(self, call: _Call) -> None:
        """Find out who calls, and refuse what they may not do or have no time for."""
        if call.deadline is not None and call.deadline - time.monotonic() < LEAST_SECONDS:
            raise DeadlineExceeded("the deadline leaves no time to do anything")
        if self._access is None:
            call.identity = LOCAL
        else:
            call.identity = await self._access.identify(_certificate_names(call), _token(call))
            roles = access.METHOD_ROLES.get(call.method, frozenset())
            access.require(call.identity, roles, call.method.rpartition("/")[2])
        access.caller.set(call.identity)

    @contextlib.contextmanager
    def _counted(self, identity: Identity) -> Iterator[None]:
        """Count an open response stream."""
        if self.open_streams[identity.name] >= self._max_streams:
            raise QuotaExceeded(
                f"{identity.name!r} has {self._max_streams} streams open, which is the most",
                identity=identity.name,
            )
        self.open_streams[identity.name] += 1
        try:
            yield
        finally:
            self.open_streams[identity.name] -= 1

    @contextlib.contextmanager
    def _recorded(self, call: _Call) -> Iterator[None]:
        """Count the call, and write it to the access log and to the audit log.

        Raises:
            LoaderError: in place of every other exception of the call.
        """
        self._metrics.call_started(call.kind, call.method)
        code, reason = grpc.StatusCode.OK, ""
        try:
            yield
        except LoaderError as error:
            code, reason = error.status, error.reason
            raise
        except Exception as error:
            _log.exception("a call failed")
            failure = InternalError(f"{type(error).__name__}: {error}")
            code, reason = failure.status, failure.reason
            raise failure from error
        except BaseException:  # cancelled, or closed in the middle of its responses
            late = call.deadline is not None and time.monotonic() >= call.deadline
            code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
            raise
        finally:
            seconds = time.monotonic() - call.started
            self._metrics.call_ended(call.kind, call.method, code, seconds)
            _access_log.log(
                logging.DEBUG if call.method == _QUIET else logging.INFO,
                "%s %s%s %.1f ms identity=%s peer=%s request=%s",
                call.method.rpartition("/")[2],
                code.name,
                f" {reason}" if reason else "",
                seconds * 1e3,
                call.identity.name,
                call.peer,
                call.request_id,
            )
            # A watch that cancels what it watches changes something, too.
            cancels = getattr(call.request, "cancel_when_gone", False)
            if call.method in CHANGING_METHODS or cancels:
                self._audit_log.write(
                    method=call.method,
                    identity=call.identity.name,
                    peer=call.peer,
                    request_id=call.request_id,
                    code=code,
                    reason=reason,
                    # Of somebody unknown nothing is kept: they could fill the disk with it.
                    request=None if call.identity is NOBODY else call.request,
                    response=call.response,
                )


class _Call:
    """One call on its way through the interceptor."""

    def __init__(self, method: str, kind: str, context: _Context) -> None:
        self.method = method
        self.kind = kind
        self.request: Any = None
        self.response: Any = None
        self.context = context
        self.metadata = dict(context.invocation_metadata() or ())
        given = str(self.metadata.get(REQUEST_ID_KEY, ""))
        # What a caller writes into the log is checked, so that it cannot forge lines.
        self.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        self.identity = NOBODY
        self.started = time.monotonic()
        # Asked for now: gRPC's own part of a call that was cut short is gone when it ends here.
        self.peer = context.peer()
        remaining: float | None = context.time_remaining()
        self.deadline: float | None = None if remaining is None else self.started + remaining


_Decode = Callable[[_Call, Any], Any]


def _decoded(decode: Any) -> _Decode:
    """Return what decodes one message, or refuses it."""

    def work(call: _Call, raw: bytes) -> Any:
        try:
            message = decode(raw)
        except DecodeError as error:
            raise InvalidRequest(
                "the request is not a message of this method", reason="MALFORMED_MESSAGE"
            ) from error
        # Of many messages the first says what the call is about.
        call.request = message if call.request is None else call.request
        return message

    return work


def _all_decoded(decode: Any) -> _Decode:
    """Return what decodes a stream of messages, each when it is asked for."""
    decode_one = _decoded(decode)

    async def work(call: _Call, raw: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for message in raw:
            yield decode_one(call, message)

    return work


def _certificate_names(call: _Call) -> list[str]:
    """Return the names in the caller's certificate, which TLS has verified.

    Host names and URIs of the subject alternative name; the common name only where there is neither,
    since authorities check it less (RFC 6125, 6.4.4).
    """
    properties = call.context.auth_context()

    def texts(key: str) -> list[str]:
        return [name.decode("utf-8", "replace") for name in properties.get(key, ())]

    # With its scheme a URI cannot be taken for a host.
    uris = [uri for uri in texts("peer_uri") if "://" in uri]
    return texts("peer_dns") + uris or texts("x509_common_name")


def _token(call: _Call) -> str:
    scheme, _, token = str(call.metadata.get("authorization", "")).partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


async def _in_time(call: _Call, work: Awaitable[Any]) -> Any:
    """Bound a call that has no deadline; gRPC itself cancels one whose own has passed."""
    if call.deadline is not None:
        return await work
    limit = asyncio.timeout(MOST_SECONDS)
    try:
        async with limit:
            return await work
    except TimeoutError as error:
        if limit.expired():
            raise DeadlineExceeded(f"the call took longer than {MOST_SECONDS:.0f} s") from error
        # A fault of the work itself, a file system's for example.
        raise
