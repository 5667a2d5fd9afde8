"""What a step sends: the distinct chunks of its ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from loader_service.plan.slices import Slice, TensorPlan
from loader_service.stream.chunks import Extent, Step
from loader_service.stream.filling import Place

__all__ = ["Payload", "step_payloads"]


class Payload:
    """One chunk's bytes, and the ranks that get exactly these.

    Attributes:
        parts: slice and extent of everything in the chunk, back to back.
        ranks: the ranks.
        nbytes: bytes of the chunk.
        slot: the memory that holds it, see `Feed.acquire`; None for a chunk without bytes.
    """

    def __init__(self, parts: tuple[tuple[Slice, Extent], ...], ranks: list[int]) -> None:
        """Describe the chunk."""
        self.parts = parts
        self.ranks = ranks
        self.nbytes = sum(extent.length for _, extent in parts)
        self.slot: Any = None

    def places(self) -> Iterator[Place]:
        """Yield where the parts stand in the slot."""
        offset = 0
        for piece, extent in self.parts:
            yield Place(extent.slice_index, piece, extent.offset, extent.length, self.slot, offset)
            offset += extent.length


def step_payloads(
    step: Step, tensors: Sequence[TensorPlan], ranks: Collection[int]
) -> list[Payload]:
    """Group those of `ranks` whose chunks of a step hold the same slices."""
    distinct: dict[tuple[int, ...], Payload] = {}
    for rank, chunk in enumerate(step.chunks):
        if chunk is None or rank not in ranks:
            continue
        parts = tuple(
            (tensors[extent.slice_index].slices[rank], extent) for extent in chunk.extents
        )
        key = tuple(id(piece) for piece, _ in parts)
        distinct.setdefault(key, Payload(parts, [])).ranks.append(rank)
    return list(distinct.values())
