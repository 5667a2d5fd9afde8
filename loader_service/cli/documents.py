"""The JSON documents that `loaderctl` prints: a format of its own, made here only.

Keys are lowerCamelCase, byte counts are numbers, every field is printed (also 0, false and empty),
enums come without their prefix, seconds are numbers, times are RFC 3339.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from google.protobuf.duration_pb2 import Duration

from loader_service.v1 import coordinator_pb2, types_pb2

if TYPE_CHECKING:
    # Errors bring grpc, which `version` and `config` do without.
    from loader_service.cli.connection import ConnectionSettings, Contexts
    from loader_service.cli.health import Answer
    from loader_service.errors import LoaderError

__all__ = [
    "checkpoint_document",
    "contexts_document",
    "enum_name",
    "health_document",
    "load_document",
    "loads_document",
    "plan_document",
    "refusal_document",
    "settings_document",
    "tensors_document",
    "top_document",
    "version_document",
    "worker_document",
    "workers_document",
]


def enum_name(kind: Any, value: int, prefix: str) -> str:
    """Return the name of an enum's value without its prefix; the number of one from a later release."""
    try:
        return str(kind.Name(value)).removeprefix(prefix)
    except ValueError:
        return str(value)


def load_document(load: types_pb2.Load) -> dict[str, Any]:
    """Return the document of one load."""
    return {
        "loadId": load.load_id,
        "state": enum_name(types_pb2.LoadState, load.state, "LOAD_STATE_"),
        "path": load.path,
        "architecture": load.architecture,
        "tp": load.tp,
        "replicas": load.replicas,
        "owner": load.owner,
        "progress": load.progress,
        "slowestRank": load.slowest_rank if load.HasField("slowest_rank") else None,
        "etaSeconds": _seconds(load.eta_duration) if load.HasField("eta_duration") else None,
        "sourceBytes": load.source_bytes,
        "wireBytes": load.wire_bytes,
        "residentBytes": load.resident_bytes,
        "transferSeconds": _seconds(load.transfer_duration),
        "totalSeconds": _seconds(load.total_duration),
        "createTime": load.create_time.ToJsonString(),
        "warnings": list(load.warnings),
        "failure": _failure(load.failure) if load.HasField("failure") else None,
        "ranks": [_rank(rank) for rank in load.ranks],
    }


def loads_document(loads: Sequence[types_pb2.Load]) -> dict[str, Any]:
    """Return the document of `get loads`."""
    return {"loads": [load_document(load) for load in loads]}


def workers_document(workers: Sequence[types_pb2.Worker]) -> dict[str, Any]:
    """Return the document of `get workers`."""
    return {"workers": [worker_document(worker) for worker in workers]}


def worker_document(worker: types_pb2.Worker) -> dict[str, Any]:
    """Return the document of one worker."""
    memory = worker.memory
    return {
        "workerId": worker.worker_id,
        "state": enum_name(types_pb2.WorkerState, worker.state, "WORKER_STATE_"),
        "address": worker.address,
        "host": worker.host,
        "device": worker.device,
        "incarnation": worker.incarnation,
        "loadId": worker.load_id,
        "rank": worker.rank,
        "transport": worker.transport,
        "residentBytes": memory.resident_bytes,
        "loadedBytes": memory.loaded_bytes,
        "allocatedBytes": memory.allocated_bytes,
        "freeBytes": memory.free_bytes,
        "totalBytes": memory.total_bytes,
        "heartbeatTime": worker.heartbeat_time.ToJsonString(),
        "packageVersion": worker.package_version,
    }


def top_document(
    loads: Sequence[types_pb2.Load], workers: Sequence[types_pb2.Worker]
) -> dict[str, Any]:
    """Return the document of one snapshot of `top`."""
    return {**loads_document(loads), **workers_document(workers)}


def tensors_document(
    slices: Mapping[int, Sequence[types_pb2.TensorSlice]],
) -> list[dict[str, Any]]:
    """Return the document of `tensors`, sorted by rank and name."""
    return [
        {
            "rank": rank,
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "bytes": tensor.bytes,
            "paddingRows": tensor.padding_rows,
            "aliases": list(tensor.aliases),
            "sha256": tensor.sha256,
        }
        for rank in sorted(slices)
        for tensor in sorted(slices[rank], key=lambda tensor: tensor.name)
    ]


def plan_document(plan: coordinator_pb2.PlanLoadResponse, explain: bool) -> dict[str, Any]:
    """Return the document of `plan`; with `explain` also its tensors."""
    document: dict[str, Any] = {
        "path": plan.path,
        "architecture": plan.architecture,
        "tp": plan.tp,
        "sourceBytes": plan.source_bytes,
        "tiedHeadPresent": plan.tied_head_present,
        "warnings": list(plan.warnings),
        "ranks": [
            {
                "rank": rank.rank,
                "sourceBytes": rank.source_bytes,
                "wireBytes": rank.wire_bytes,
                "residentBytes": rank.resident_bytes,
                "replicatedBytes": rank.replicated_bytes,
                "stagingPeakBytes": rank.staging_peak_bytes,
                "deferredBytes": rank.deferred_bytes,
                "tensors": rank.tensor_count,
            }
            for rank in plan.ranks
        ],
        "admission": _admission(plan.admission),
    }
    if explain:
        document["tensors"] = [
            {
                "name": tensor.name,
                "role": tensor.role,
                "storage": tensor.storage,
                "cut": tensor.cut,
                "reason": tensor.reason,
            }
            for tensor in plan.tensors
        ]
    return document


def checkpoint_document(checkpoint: coordinator_pb2.InspectCheckpointResponse) -> dict[str, Any]:
    """Return the document of `inspect`."""
    return {
        "path": checkpoint.path,
        "architecture": checkpoint.architecture,
        "tensorCount": checkpoint.tensor_count,
        "payloadBytes": checkpoint.payload_bytes,
        "files": list(checkpoint.files),
        "warnings": list(checkpoint.warnings),
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "bytes": tensor.bytes,
                "file": tensor.file,
                "offsetBytes": tensor.offset_bytes,
            }
            for tensor in checkpoint.tensors
        ],
    }


def refusal_document(error: LoaderError) -> dict[str, Any]:
    """Return the document of a refusal."""
    valid_tp = getattr(error, "valid_tp", ())
    return {"reason": error.reason, "message": error.message, "validTp": list(valid_tp)}


def health_document(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the document of `health`, from the answer of each server."""
    return {
        "serving": all(answer.serving for answer in answers),
        "servers": [
            {
                "name": answer.target.name,
                "address": answer.target.address,
                "status": answer.status,
                "message": answer.message,
            }
            for answer in answers
        ],
    }


def settings_document(settings: ConnectionSettings, keys: Sequence[str]) -> dict[str, Any]:
    """Return the document of `config view`.

    Args:
        settings: the settings.
        keys: which settings, in order.
    """
    values = {key: getattr(settings, key.replace("-", "_")) for key in keys}
    return {
        "configFile": settings.config_file,
        "settings": [
            {
                "name": key,
                "value": value,
                "origin": settings.origins[key],
            }
            for key, value in values.items()
        ],
    }


def contexts_document(contexts: Contexts) -> dict[str, Any]:
    """Return the document of `config get-contexts`."""
    return {
        "configFile": contexts.path,
        "contexts": [
            {
                "name": name,
                "current": name == contexts.current,
                "endpoint": contexts.named[name].get("endpoint", ""),
            }
            for name in sorted(contexts.named)
        ],
    }


def version_document(version: str) -> dict[str, Any]:
    """Return the document of `version`."""
    return {"version": version}


def _rank(rank: types_pb2.RankProgress) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "replica": rank.replica,
        "workerId": rank.worker_id,
        "tensors": rank.tensor_count,
        "residentBytes": rank.resident_bytes,
        "wireBytes": rank.total_bytes,
        "doneBytes": rank.done_bytes,
        "bytesPerSecond": rank.bytes_per_second,
        "transport": rank.transport,
        "bytesBySource": {
            "coordinator": rank.bytes_by_source.coordinator_bytes,
            "local": rank.bytes_by_source.local_bytes,
            "peer": rank.bytes_by_source.peer_bytes,
        },
        "verified": rank.verified,
        "state": enum_name(types_pb2.RankState, rank.state, "RANK_STATE_"),
        "stalled": rank.stalled,
        "idleSeconds": _seconds(rank.idle_duration) if rank.HasField("idle_duration") else None,
    }


def _failure(failure: types_pb2.Failure) -> dict[str, Any]:
    # A map has no order of its own; the output has one.
    facts = {key: value for key, value in sorted(failure.metadata.items()) if key != "error_class"}
    return {"reason": failure.reason, "message": failure.message, "metadata": facts}


def _admission(admission: coordinator_pb2.Admission) -> dict[str, Any]:
    return {
        "admitted": admission.admitted,
        "refusal": _failure(admission.refusal) if admission.HasField("refusal") else None,
        "ranks": [
            {
                "rank": rank.rank,
                "workerId": rank.worker_id,
                "neededBytes": rank.needed_bytes,
                "freeBytes": rank.free_bytes,
                "fits": rank.fits,
            }
            for rank in admission.ranks
        ],
    }


def _seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9
