"""Every error that the service raises on purpose, with its gRPC status and stable reason.

LoaderError
    InvalidRequest              INVALID_ARGUMENT     INVALID_REQUEST, INVALID_MANIFEST, ...
    InvalidCheckpoint           INVALID_ARGUMENT     INVALID_HEADER, UNKNOWN_DTYPE, ...
        LimitExceeded           INVALID_ARGUMENT     LIMIT
    CheckpointNotFound          NOT_FOUND            CHECKPOINT_NOT_FOUND
    PathOutsideRoot             PERMISSION_DENIED    PATH_OUTSIDE_ROOT
    LfsPointer                  FAILED_PRECONDITION  LFS_POINTER
    IndexMismatch               FAILED_PRECONDITION  SHARD_MISSING, TENSOR_NOT_IN_SHARD, ...
    DataLoss                    DATA_LOSS            DATA_LOSS, FILE_TRUNCATED, FILE_CHANGED, READ_FAILED
    PlanRefused                 FAILED_PRECONDITION  UNSUPPORTED_ARCHITECTURE, TP_NOT_DIVISIBLE, ...
    Unauthenticated             UNAUTHENTICATED      UNAUTHENTICATED, TOKEN_UNKNOWN, TLS_NAME_MISMATCH, ...
    AccessDenied                PERMISSION_DENIED    ACCESS_DENIED
    QuotaExceeded               RESOURCE_EXHAUSTED   QUOTA_EXCEEDED
    Conflict                    ALREADY_EXISTS       CONFLICT, WORKER_ID_TAKEN, REQUEST_ID_REUSED
    LoadNotFound                NOT_FOUND            LOAD_NOT_FOUND
    WorkerNotFound              NOT_FOUND            WORKER_NOT_FOUND
    WorkersUnavailable          FAILED_PRECONDITION  NOT_ENOUGH_WORKERS
    WorkerBusy                  FAILED_PRECONDITION  WORKER_BUSY
    WrongState                  FAILED_PRECONDITION  WRONG_STATE
    VersionSkew                 FAILED_PRECONDITION  VERSION_SKEW
    WorkerSuperseded            FAILED_PRECONDITION  WORKER_SUPERSEDED
    OutOfMemory                 RESOURCE_EXHAUSTED   OUT_OF_MEMORY
    LocalSourceUnavailable      FAILED_PRECONDITION  LOCAL_SOURCE_UNAVAILABLE
    DigestMismatch              DATA_LOSS            DIGEST_MISMATCH
    TiedHeadDiffers             FAILED_PRECONDITION  TIED_HEAD_DIFFERS
    WorkerLost                  UNAVAILABLE          WORKER_LOST
    StreamerLost                UNAVAILABLE          STREAMER_LOST
    LoadCancelled               CANCELLED            LOAD_CANCELLED
    ServiceUnavailable          UNAVAILABLE          UNAVAILABLE
    DeadlineExceeded            DEADLINE_EXCEEDED    DEADLINE_EXCEEDED
    InternalError               INTERNAL             INTERNAL
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import grpc

__all__ = [
    "CLASS_KEY",
    "ERROR_DOMAIN",
    "AccessDenied",
    "CheckpointNotFound",
    "Conflict",
    "DataLoss",
    "DeadlineExceeded",
    "DigestMismatch",
    "IndexMismatch",
    "InternalError",
    "InvalidCheckpoint",
    "InvalidRequest",
    "LfsPointer",
    "LimitExceeded",
    "LoadCancelled",
    "LoadNotFound",
    "LoaderError",
    "LocalSourceUnavailable",
    "OutOfMemory",
    "PathOutsideRoot",
    "PlanRefused",
    "QuotaExceeded",
    "ServiceUnavailable",
    "StreamerLost",
    "TiedHeadDiffers",
    "Unauthenticated",
    "VersionSkew",
    "WorkerBusy",
    "WorkerLost",
    "WorkerNotFound",
    "WorkerSuperseded",
    "WorkersUnavailable",
    "WrongState",
    "from_fields",
    "to_fields",
]

ERROR_DOMAIN = "loader-service"
"""`ErrorInfo.domain` of every error that this service sends."""


class LoaderError(Exception):
    """Root of all errors raised on purpose.

    Attributes:
        status: gRPC status code that a server answers with.
        reason: stable UPPER_SNAKE_CASE word for programs.
        message: sentence for people.
        metadata: facts by stable names, all strings.
    """

    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    default_reason: ClassVar[str] = "UNKNOWN"

    def __init__(self, message: str, *, reason: str | None = None, **metadata: object) -> None:
        """Keep `message`, the class's own reason unless another is given, and the facts."""
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata = {key: str(value) for key, value in metadata.items()}

    def __reduce__(self) -> tuple[object, ...]:
        """Survive pickling between the coordinator and its streamer, subclass and facts included."""
        return (_rebuild, (type(self), self.message, self.reason, self.metadata))


def _rebuild(
    kind: type[LoaderError], message: str, reason: str, metadata: dict[str, str]
) -> LoaderError:
    return kind(message, reason=reason, **metadata)


class InvalidRequest(LoaderError):
    """A field of the request makes no sense."""

    status = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "INVALID_REQUEST"


class InvalidCheckpoint(LoaderError):
    """A file is not what the safetensors format allows."""

    status = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "INVALID_HEADER"


class LimitExceeded(InvalidCheckpoint):
    """A file is legal but larger than a setting allows."""

    default_reason = "LIMIT"


class CheckpointNotFound(LoaderError):
    """There is no checkpoint at the path."""

    status = grpc.StatusCode.NOT_FOUND
    default_reason = "CHECKPOINT_NOT_FOUND"


class PathOutsideRoot(LoaderError):
    """A path leaves the model root."""

    status = grpc.StatusCode.PERMISSION_DENIED
    default_reason = "PATH_OUTSIDE_ROOT"


class LfsPointer(LoaderError):
    """A file is the text stub of a clone made without Git LFS."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "LFS_POINTER"


class IndexMismatch(LoaderError):
    """The index and the shards contradict each other."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "INDEX_MISMATCH"


class DataLoss(LoaderError):
    """A file is shorter than its header says, changed while it was read, or cannot be read."""

    status = grpc.StatusCode.DATA_LOSS
    default_reason = "DATA_LOSS"


class PlanRefused(LoaderError):
    """The checkpoint cannot be cut as asked.

    `valid_tp` lists the group sizes that the checkpoint allows, where that is known.
    """

    status = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "PLAN_REFUSED"

    @property
    def valid_tp(self) -> tuple[int, ...]:
        """Group sizes that the checkpoint allows; empty where that is not known."""
        listed = self.metadata.get("valid_tp", "")
        return tuple(int(size) for size in listed.split(",") if size)


class Unauthenticated(LoaderError):
    """One side of a connection could not show who it is."""

    status = grpc.StatusCode.UNAUTHENTICATED
    default_reason = "UNAUTHENTICATED"


class AccessDenied(LoaderError):
    """The caller is known, but its role does not include the call."""

    status = grpc.StatusCode.PERMISSION_DENIED
    default_reason = "ACCESS_DENIED"


class QuotaExceeded(LoaderError):
    """The caller has as many loads or streams open as it may."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "QUOTA_EXCEEDED"


class Conflict(LoaderError):
    """Something else already has this name."""

    status = grpc.StatusCode.ALREADY_EXISTS
    default_reason = "CONFLICT"


class LoadNotFound(LoaderError):
    """No load has this name."""

    status = grpc.StatusCode.NOT_FOUND
    default_reason = "LOAD_NOT_FOUND"


class WorkerNotFound(LoaderError):
    """No worker has this name, or it is another life of the process."""

    status = grpc.StatusCode.NOT_FOUND
    default_reason = "WORKER_NOT_FOUND"


class WorkersUnavailable(LoaderError):
    """Fewer workers are idle than the group needs."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "NOT_ENOUGH_WORKERS"


class WorkerBusy(LoaderError):
    """A worker holds or receives another load."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "WORKER_BUSY"


class WrongState(LoaderError):
    """The verb does not fit the state that the load is in."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "WRONG_STATE"


class VersionSkew(LoaderError):
    """Coordinator and worker speak different versions of the protocol."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "VERSION_SKEW"


class WorkerSuperseded(LoaderError):
    """A newer life of this worker has taken its place."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "WORKER_SUPERSEDED"


class OutOfMemory(LoaderError):
    """A rank's slices do not fit into a worker's free memory."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "OUT_OF_MEMORY"


class LocalSourceUnavailable(LoaderError):
    """A worker that is to read for itself cannot open the files that were planned."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "LOCAL_SOURCE_UNAVAILABLE"


class DigestMismatch(LoaderError):
    """The bytes that landed are not the bytes that were read."""

    status = grpc.StatusCode.DATA_LOSS
    default_reason = "DIGEST_MISMATCH"


class TiedHeadDiffers(LoaderError):
    """The config ties head and embedding, but the file's head holds other bytes."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "TIED_HEAD_DIFFERS"


class WorkerLost(LoaderError):
    """A worker's lease ran out or its data-plane connection broke."""

    status = grpc.StatusCode.UNAVAILABLE
    default_reason = "WORKER_LOST"


class StreamerLost(LoaderError):
    """The streamer process or its connection ended in the middle of a load."""

    status = grpc.StatusCode.UNAVAILABLE
    default_reason = "STREAMER_LOST"


class LoadCancelled(LoaderError):
    """The load was cancelled."""

    status = grpc.StatusCode.CANCELLED
    default_reason = "LOAD_CANCELLED"


class ServiceUnavailable(LoaderError):
    """The server cannot be reached, or is shutting down."""

    status = grpc.StatusCode.UNAVAILABLE
    default_reason = "UNAVAILABLE"


class DeadlineExceeded(LoaderError):
    """The answer did not come in time."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class InternalError(LoaderError):
    """A fault of the service itself."""

    status = grpc.StatusCode.INTERNAL
    default_reason = "INTERNAL"


_LEAVES: tuple[type[LoaderError], ...] = (
    InvalidRequest,
    InvalidCheckpoint,
    LimitExceeded,
    CheckpointNotFound,
    PathOutsideRoot,
    LfsPointer,
    IndexMismatch,
    DataLoss,
    PlanRefused,
    Unauthenticated,
    AccessDenied,
    QuotaExceeded,
    Conflict,
    LoadNotFound,
    WorkerNotFound,
    WorkersUnavailable,
    WorkerBusy,
    WrongState,
    VersionSkew,
    WorkerSuperseded,
    LocalSourceUnavailable,
    OutOfMemory,
    DigestMismatch,
    TiedHeadDiffers,
    WorkerLost,
    StreamerLost,
    LoadCancelled,
    ServiceUnavailable,
    DeadlineExceeded,
    InternalError,
)
_BY_NAME = {leaf.__name__: leaf for leaf in _LEAVES}
CLASS_KEY = "error_class"
"""Name of the metadata entry that carries the class, so that the client raises the same one."""


def to_fields(error: LoaderError) -> tuple[str, str, dict[str, str]]:
    """Return (reason, message, metadata) for the way; the metadata carries the class too."""
    return error.reason, error.message, {**error.metadata, CLASS_KEY: type(error).__name__}


def from_fields(reason: str, message: str, metadata: Mapping[str, str]) -> LoaderError:
    """Rebuild an error from what travelled: the class that was raised, or `InternalError`."""
    facts = dict(metadata)
    kind = _BY_NAME.get(facts.pop(CLASS_KEY, ""), InternalError)
    error = kind(message, reason=reason)
    # Set afterwards: facts from another release may have the name of an argument.
    error.metadata = facts
    return error
