"""A plan with everything that the coordinator derives from it: chunks and bytes of every rank."""

from __future__ import annotations

import dataclasses

from loader_service.background import until_cancelled
from loader_service.checkpoint.catalog import Checkpoint
from loader_service.plan.planner import PlanOptions, plan_load
from loader_service.plan.slices import LoadPlan, RankTotals
from loader_service.stream.chunks import (
    Chunk,
    chunk_bytes_for,
    plan_steps,
    rank_chunks,
    staging_bytes,
)

__all__ = ["PlannedLoad", "plan_chunks"]


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedLoad:
    """A plan and what follows from it.

    Attributes:
        plan: the plan.
        chunk_bytes: size that chunks were cut to.
        chunks: the chunks of every rank.
        totals: the bytes of every rank.
        staging_bytes: bytes of every rank that streaming needs beside the resident ones.
        source_bytes: bytes read from disk.
    """

    plan: LoadPlan
    chunk_bytes: int
    chunks: tuple[list[Chunk], ...]
    totals: tuple[RankTotals, ...]
    staging_bytes: tuple[int, ...]
    source_bytes: int


def plan_chunks(
    checkpoint: Checkpoint, tp: int, options: PlanOptions, window_bytes: int
) -> PlannedLoad:
    """Plan a load down to its chunks; takes a while for many tensors.

    Args:
        checkpoint: what to load.
        tp: ranks of the group.
        options: how to plan.
        window_bytes: host memory of the streamer that all ranks share.

    Raises:
        LoaderError: see `plan_load`.
    """
    plan = plan_load(checkpoint, tp, options)
    chunk_bytes = chunk_bytes_for(window_bytes, tp)
    steps = plan_steps(plan, chunk_bytes)
    chunks = tuple(rank_chunks(steps, rank) for rank in until_cancelled(range(tp)))
    return PlannedLoad(
        plan=plan,
        chunk_bytes=chunk_bytes,
        chunks=chunks,
        totals=tuple(plan.totals(rank) for rank in until_cancelled(range(tp))),
        staging_bytes=tuple(map(staging_bytes, chunks)),
        source_bytes=plan.source_bytes,
    )
