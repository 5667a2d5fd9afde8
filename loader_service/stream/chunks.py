"""Cutting a plan into chunks, the messages of the data plane. Pure.

A step is what the streamer reads at once: for every rank at most one chunk, made from the same
source tensors, so that a byte that several ranks keep is read once. Large slices are cut at multiples
of the digest's block; small ones of consecutive tensors travel bundled in one chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from loader_kernels.digest import BLOCK_BYTES
from loader_service.background import until_cancelled
from loader_service.errors import InvalidRequest
from loader_service.plan.slices import LoadPlan

__all__ = [
    "BUNDLE_BYTES",
    "CREDITS",
    "Chunk",
    "Extent",
    "Step",
    "chunk_bytes_for",
    "largest_bundle_bytes",
    "plan_steps",
    "rank_chunks",
    "staging_bytes",
]

MAX_CHUNK_BYTES = 32 << 20
"""Large enough to hide the fixed cost of a message, small enough to overlap reading and sending."""

BUNDLE_BYTES = 8 << 20
"""A bundle is closed before it grows beyond this."""

SMALL_BYTES = 1 << 20
"""Slices up to this size are bundled."""

BUNDLE_EXTENTS = 4096
"""A bundle is closed at this many slices, which bounds its end record to 64 KiB."""

CREDITS = 8
"""Chunks on the way to one worker: some are in flight while others are hashed."""

SLOTS_PER_RANK = 2
"""Chunks of one rank that the window must hold: one is read while the other is sent."""


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive bytes of one slice.

    Attributes:
        slice_index: position of the slice in the rank's list, which is the tensor's in the plan.
        offset: first byte inside the slice.
        length: bytes; 0 for a slice without payload, whose digest travels with the chunk.
    """

    slice_index: int
    offset: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """One message: extents back to back."""

    extents: tuple[Extent, ...]

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return sum(extent.length for extent in self.extents)


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """Chunks that are read together, one per rank; None where a rank takes nothing."""

    chunks: tuple[Chunk | None, ...]


def chunk_bytes_for(window_bytes: int, tp: int) -> int:
    """Return the chunk size for a window of host memory shared by `tp` ranks.

    Raises:
        InvalidRequest: WINDOW_TOO_SMALL, it cannot hold one digest block a slot.
    """
    share = window_bytes // (SLOTS_PER_RANK * tp)
    chunk_bytes = min(MAX_CHUNK_BYTES, share) // BLOCK_BYTES * BLOCK_BYTES
    if not chunk_bytes:
        raise InvalidRequest(
            f"a window of {window_bytes} bytes is too small for {tp} ranks",
            reason="WINDOW_TOO_SMALL",
            window_bytes=window_bytes,
            tp=tp,
        )
    return chunk_bytes


def plan_steps(plan: LoadPlan, chunk_bytes: int) -> list[Step]:
    """Cut `plan` into steps in the order of the files.

    Args:
        plan: the plan.
        chunk_bytes: largest chunk; a multiple of the digest's block.
    """
    small_bytes, bundle_bytes = min(SMALL_BYTES, chunk_bytes), min(BUNDLE_BYTES, chunk_bytes)
    steps: list[Step] = []
    bundle: list[int] = []
    filled = 0
    for index, tensor in enumerate(until_cancelled(plan.tensors)):
        largest = max(piece.wire_bytes for piece in tensor.slices)
        if largest > small_bytes:
            steps += _large(plan, index, chunk_bytes)
            continue
        if bundle and (filled + largest > bundle_bytes or len(bundle) >= BUNDLE_EXTENTS):
            steps.append(_bundle(plan, bundle))
            bundle, filled = [], 0
        bundle.append(index)
        filled += largest
    if bundle:
        steps.append(_bundle(plan, bundle))
    return steps


def rank_chunks(steps: Iterable[Step], rank: int) -> list[Chunk]:
    """Return the chunks of one rank in order; their positions number the messages."""
    return [chunk for step in steps if (chunk := step.chunks[rank]) is not None]


def staging_bytes(chunks: Sequence[Chunk]) -> int:
    """Return the worker bytes that receiving needs beside the slices: landing room for bundles."""
    return largest_bundle_bytes(chunks) * min(CREDITS, len(chunks))


def largest_bundle_bytes(chunks: Sequence[Chunk]) -> int:
    """Return the bytes of the largest chunk that holds more than one slice."""
    return max((chunk.nbytes for chunk in chunks if len(chunk.extents) > 1), default=0)


def _large(plan: LoadPlan, index: int, chunk_bytes: int) -> list[Step]:
    sizes = [piece.wire_bytes for piece in plan.tensors[index].slices]

    def chunk(size: int, offset: int) -> Chunk | None:
        # A rank that is all padding still needs the digest, so its first chunk is empty.
        if offset >= size and offset:
            return None
        return Chunk((Extent(index, offset, min(chunk_bytes, size - offset)),))

    return [
        Step(tuple(chunk(size, offset) for size in sizes))
        for offset in range(0, max(sizes), chunk_bytes)
    ]


def _bundle(plan: LoadPlan, indices: list[int]) -> Step:
    return Step(
        tuple(
            Chunk(
                tuple(
                    Extent(index, 0, plan.tensors[index].slices[rank].wire_bytes)
                    for index in indices
                )
            )
            for rank in range(plan.tp)
        )
    )
