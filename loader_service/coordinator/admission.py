"""Whether a load would be admitted: the bytes of every rank against its worker's free memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from loader_service.coordinator.planning import PlannedLoad
from loader_service.coordinator.registry import WorkerRegistry
from loader_service.errors import LoaderError, OutOfMemory
from loader_service.serving.status import failure_message
from loader_service.v1 import coordinator_pb2
from loader_service.v1.types_pb2 import WorkerState

__all__ = ["admission"]


def admission(
    planned: PlannedLoad, registry: WorkerRegistry, worker_ids: Sequence[str]
) -> coordinator_pb2.Admission:
    """Return which workers a load would get now, and whether it fits them.

    The numbers are those of the workers' last heartbeats; the workers themselves decide when the
    load is prepared.

    Args:
        planned: the load.
        registry: the workers.
        worker_ids: workers in rank order; empty chooses idle ones.
    """
    try:
        group = registry.choose(planned.plan.tp, worker_ids)
    except LoaderError as error:
        return coordinator_pb2.Admission(refusal=failure_message(error))
    ranks = []
    for rank, (worker, totals, staging) in enumerate(
        zip(group, planned.totals, planned.staging_bytes, strict=True)
    ):
        needed = totals.resident_bytes + staging
        ranks.append(
            coordinator_pb2.RankAdmission(
                rank=rank,
                worker_id=worker.worker_id,
                needed_bytes=needed,
                free_bytes=worker.memory.free_bytes,
                fits=needed <= worker.memory.free_bytes,
            )
        )
    result = coordinator_pb2.Admission(admitted=all(rank.fits for rank in ranks), ranks=ranks)
    if not result.admitted:
        result.refusal.CopyFrom(failure_message(_refusal(ranks, registry)))
    return result


def _refusal(
    ranks: Sequence[coordinator_pb2.RankAdmission], registry: WorkerRegistry
) -> LoaderError:
    """Name the rank that lacks the most, and the largest room that an idle worker has."""
    worst = max(ranks, key=lambda rank: rank.needed_bytes - rank.free_bytes)
    idle = [worker for worker in registry.all() if worker.state == WorkerState.WORKER_STATE_READY]
    advice = ""
    if idle:
        roomiest = max(idle, key=lambda worker: worker.memory.free_bytes)
        advice = (
            f"; idle worker {roomiest.worker_id!r} has the most free: {roomiest.memory.free_bytes}"
        )
    return OutOfMemory(
        f"rank {worst.rank} needs {worst.needed_bytes} bytes on worker {worst.worker_id!r}, "
        f"{worst.free_bytes} are free{advice}",
        rank=worst.rank,
        worker_id=worst.worker_id,
        wanted_bytes=worst.needed_bytes,
        free_bytes=worst.free_bytes,
    )
