"""A plan with everything that the coordinator derives from it: chunks and bytes of every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from loader_service.background import until_cancelled
from loader_service.checkpoint.catalog import Checkpoint
from loader_service.plan.planner import PlanOptions, plan_load
from loader_service.plan.slices import LoadPlan, RankTotals, Slice, TensorPlan
from loader_service.stream.chunks import (
    Chunk,
    chunk_bytes_for,
    plan_steps,
    rank_chunks,
    staging_bytes,
)
from loader_service.stream.reader import is_short

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
        source_bytes: bytes read from the files when the coordinator reads for all ranks.
        read_alone_bytes: bytes that each rank would read if it read for itself.
    """

    plan: LoadPlan
    chunk_bytes: int
    chunks: tuple[list[Chunk], ...]
    totals: tuple[RankTotals, ...]
    staging_bytes: tuple[int, ...]
    source_bytes: int
    read_alone_bytes: tuple[int, ...]

    def bytes_read(self, alone: Collection[int]) -> int:
        """Return the bytes that are read from the files when the ranks `alone` read for themselves."""
        if not alone:
            return self.source_bytes
        served = [rank for rank in range(self.plan.tp) if rank not in alone]
        read = sum(_read_for(tensor, served) for tensor in self.plan.tensors)
        return read + sum(self.read_alone_bytes[rank] for rank in alone)


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
        read_alone_bytes=tuple(
            sum(_read_alone(tensor, tensor.slices[rank]) for tensor in plan.tensors)
            for rank in until_cancelled(range(tp))
        ),
    )


def _read_for(tensor: TensorPlan, ranks: Collection[int]) -> int:
    distinct = {id(tensor.slices[rank]): tensor.slices[rank] for rank in ranks}
    return sum(piece.wire_bytes for piece in distinct.values()) * (2 if tensor.twin else 1)


def _read_alone(tensor: TensorPlan, piece: Slice) -> int:
    """Return the bytes that a rank reads for its slice: whole rows where its parts of them are short."""
    read = sum(run.source_stride * run.count if is_short(run) else run.nbytes for run in piece.runs)
    return read * (2 if tensor.twin else 1)
