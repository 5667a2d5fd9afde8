"""What all gRPC servers and clients of the project share: errors on the wire, channels, pages."""

from __future__ import annotations

import base64
import binascii
import bisect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from loader_service import errors
from loader_service.errors import InternalError, InvalidRequest, LoaderError

__all__ = ["ErrorInterceptor", "from_rpc_error", "open_channel", "paginate", "server_options"]

_log = logging.getLogger(__name__)
_Item = TypeVar("_Item")

_CHANNEL_OPTIONS = (("grpc.enable_retries", 1),)
_SERVER_OPTIONS = (
    # Two servers on one port would take each other's calls in turn.
    ("grpc.so_reuseport", 0),
)


def server_options() -> tuple[tuple[str, int], ...]:
    """Return the options of every server."""
    return _SERVER_OPTIONS


def open_channel(address: str) -> grpc.aio.Channel:
    """Return a channel to a server of this project."""
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)


def _to_status(error: LoaderError) -> status_pb2.Status:
    """Return the rich status of an error: code, message and `ErrorInfo`."""
    reason, message, metadata = errors.to_fields(error)
    info = error_details_pb2.ErrorInfo(reason=reason, domain=errors.ERROR_DOMAIN, metadata=metadata)
    detail = any_pb2.Any()
    detail.Pack(info)
    code = code_pb2.Code.Value(error.status.name)
    return status_pb2.Status(code=code, message=message, details=[detail])


def from_rpc_error(error: grpc.aio.AioRpcError) -> LoaderError:
    """Return the error that the server raised, or one for what happened on the way."""
    status = rpc_status.from_call(cast("grpc.Call", error))
    for detail in status.details if status else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == errors.ERROR_DOMAIN:
            return errors.from_fields(info.reason, error.details() or "", info.metadata)
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            return errors.ServiceUnavailable(error.details() or "the server cannot be reached")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.DeadlineExceeded(error.details() or "the answer did not come in time")
    return InternalError(error.details() or str(error.code()), reason=error.code().name)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns a handler's `LoaderError` into its status, anything else into INTERNAL."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the method's handler."""
        handler = await continuation(details)
        # Methods that nobody serves have no handler.
        if handler is None or (handler.request_streaming and handler.response_streaming):
            return handler
        codec = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _guard_stream(handler.unary_stream), **codec
            )
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(_guard(handler.stream_unary), **codec)
        return grpc.unary_unary_rpc_method_handler(_guard(handler.unary_unary), **codec)


def _guard(behavior: Any) -> Any:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behavior(request, context)
        except Exception as error:  # noqa: BLE001 - the boundary of a call
            await _abort(context, error)

    return guarded


def _guard_stream(behavior: Any) -> Any:
    async def guarded(
        request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        try:
            async for response in behavior(request, context):
                yield response
        except Exception as error:  # noqa: BLE001 - the boundary of a call
            await _abort(context, error)

    return guarded


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, LoaderError):
        _log.exception("a call failed", exc_info=error)
        error = InternalError(f"{type(error).__name__}: {error}")
    await context.abort_with_status(rpc_status.to_status(_to_status(error)))


def paginate(
    items: Sequence[_Item],
    key: Callable[[_Item], str],
    page_size: int,
    page_token: str,
    *,
    default: int,
    maximum: int,
) -> tuple[Sequence[_Item], str]:
    """Return one page and the token of the next; the token is empty on the last page.

    Tokens name the last item seen, so that items that come and go elsewhere shift nothing.

    Args:
        items: everything, ascending by `key`.
        key: unique and constant text of an item.
        page_size: as asked for; 0 means `default`.
        page_token: from the previous page; empty for the first.
        default: items a page when nobody asks.
        maximum: larger pages are cut to this.

    Raises:
        InvalidRequest: negative size, or a token that no page gave out.
    """
    if page_size < 0:
        raise InvalidRequest(f"page_size must not be negative, {page_size} is", field="page_size")
    size = min(page_size or default, maximum)
    start = 0
    if page_token:
        try:
            last = base64.b64decode(page_token.encode("ascii"), b"-_", validate=True).decode()
        except (UnicodeError, binascii.Error):
            raise InvalidRequest(
                "page_token is not one of this server's", field="page_token"
            ) from None
        start = bisect.bisect_right(items, last, key=key)
    page = items[start : start + size]
    if start + size >= len(items):
        return page, ""
    return page, base64.urlsafe_b64encode(key(page[-1]).encode()).decode("ascii")
