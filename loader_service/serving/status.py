"""Errors on the wire: a standard rich status for everybody, a `Failure` message for our own client."""

from __future__ import annotations

from collections.abc import Mapping

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from loader_service import errors
from loader_service.channel import FAILURE_KEY
from loader_service.errors import CLASS_KEY, LoaderError
from loader_service.texts import cut
from loader_service.v1 import types_pb2

__all__ = ["failure_message", "trailing_metadata"]

_MESSAGE_BYTES = 800
_VALUE_BYTES = 250
_FACTS_BYTES = 900
"""Longer texts are cut: gRPC refuses trailing metadata of more than 8 KiB, and would lose the error.

The message travels three times and may be written in percent signs (three bytes for one), the facts
travel twice, and everything but the message in base64 (four bytes for three).
"""

_FIRST_FACTS = (CLASS_KEY, "field", "valid_tp")
"""What programs need; the other facts get the room that is left."""


def failure_message(error: LoaderError) -> types_pb2.Failure:
    """Return the message of an error, also of one that a load keeps.

    It is short whatever the error quotes: names in a checkpoint can have megabytes, and a load that
    told of them could not be listed any more, nor any other with it.
    """
    reason, message, metadata = errors.to_fields(error)
    return types_pb2.Failure(
        reason=cut(reason, _VALUE_BYTES),
        message=cut(message, _MESSAGE_BYTES),
        metadata=_fitting(metadata),
    )


def _fitting(metadata: Mapping[str, str]) -> dict[str, str]:
    first = [key for key in _FIRST_FACTS if key in metadata]
    room = _FACTS_BYTES
    facts = {}
    for key in (*first, *(key for key in metadata if key not in first)):
        value = cut(metadata[key], _VALUE_BYTES)
        size = len(key.encode()) + len(value.encode())
        if size <= room:
            facts[key] = value
            room -= size
    return facts


def trailing_metadata(
    error: LoaderError,
) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]:
    """Return code, text and trailing metadata that tell a caller of `error`.

    The metadata holds a `google.rpc.Status` with `ErrorInfo`, and `BadRequest` for a wrong field,
    and a `Failure` that callers read without the packages of googleapis.
    """
    failure = failure_message(error)
    details: list[Message] = [
        error_details_pb2.ErrorInfo(
            reason=failure.reason, domain=errors.ERROR_DOMAIN, metadata=failure.metadata
        )
    ]
    if field := failure.metadata.get("field"):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=field, description=cut(failure.message, _VALUE_BYTES), reason=failure.reason
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
