"""Errors on the wire: a standard rich status for everybody, a `Failure` message for our own client."""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from loader_service import errors
from loader_service.channel import FAILURE_KEY
from loader_service.errors import LoaderError
from loader_service.v1 import types_pb2

__all__ = ["failure_message", "trailing_metadata"]

_MESSAGE_CHARACTERS = 1000
_VALUE_CHARACTERS = 250
"""Longer texts are cut: gRPC refuses trailing metadata of more than 8 KiB, and would lose the error."""


def failure_message(error: LoaderError) -> types_pb2.Failure:
    """Return the message of an error, also of one that a load keeps."""
    reason, message, metadata = errors.to_fields(error)
    return types_pb2.Failure(reason=reason, message=message, metadata=metadata)


def trailing_metadata(
    error: LoaderError,
) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]:
    """Return code, text and trailing metadata that tell a caller of `error`.

    The metadata holds a `google.rpc.Status` with `ErrorInfo`, and `BadRequest` for a wrong field,
    and a `Failure` that callers read without the packages of googleapis.
    """
    failure = failure_message(error)
    failure.message = _cut(failure.message, _MESSAGE_CHARACTERS)
    for key, value in list(failure.metadata.items()):
        failure.metadata[key] = _cut(value, _VALUE_CHARACTERS)
    details: list[Message] = [
        error_details_pb2.ErrorInfo(
            reason=failure.reason, domain=errors.ERROR_DOMAIN, metadata=failure.metadata
        )
    ]
    if field := failure.metadata.get("field"):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=field, description=failure.message, reason=failure.reason
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    status = status_pb2.Status(
        code=code_pb2.Code.Value(error.status.name),
        message=failure.message,
        details=[_any(detail) for detail in details],
    )
    standard = rpc_status.to_status(status).trailing_metadata or ()
    return (
        error.status,
        failure.message,
        (*standard, (FAILURE_KEY, failure.SerializeToString())),
    )


def _any(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[: characters - 1]}…"
