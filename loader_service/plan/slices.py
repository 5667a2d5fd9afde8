"""The plan as values: which bytes of which tensor each rank keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from loader_service.checkpoint.catalog import CheckpointFile, TensorInfo

__all__ = ["LoadPlan", "RankTotals", "Slice", "StridedRun", "TensorPlan"]


@dataclasses.dataclass(frozen=True, slots=True)
class StridedRun:
    """Equal pieces at equal distances: the source side and the local side of one 2-D copy.

    All fields are bytes but `count`. Offsets are relative to the tensor's first payload byte and to
    the slice's first byte.

    Attributes:
        source_offset: first byte of the first piece in the tensor.
        source_stride: distance between the starts of two pieces in the tensor.
        local_offset: first byte of the first piece in the slice.
        local_stride: distance between the starts of two pieces in the slice.
        length: bytes of one piece.
        count: number of pieces.
    """

    source_offset: int
    source_stride: int
    local_offset: int
    local_stride: int
    length: int
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return self.length * self.count


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """What one rank keeps of one tensor.

    Attributes:
        name: tensor name in the checkpoint.
        dtype: safetensors dtype name.
        shape: local shape, zero rows included.
        nbytes: bytes of the local buffer, zero rows included.
        wire_bytes: bytes taken from the file; they fill the front of the buffer.
        padding_rows: zero rows at the end of dim 0.
        aliases: other names of the same buffer.
        runs: where the wire bytes are in the tensor, in the order of the local bytes.
        replicated_bytes: wire bytes that at least one other rank gets too.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    wire_bytes: int
    padding_rows: int
    aliases: tuple[str, ...]
    runs: tuple[StridedRun, ...]
    replicated_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class TensorPlan:
    """How one tensor is cut.

    Attributes:
        source: the tensor in the checkpoint.
        role: what the tensor is in the model.
        storage: how its values are stored; `dense` until quantised formats are planned.
        cut: name of the cut.
        reason: why it is cut so.
        slices: one per rank. Ranks that keep the same bytes share one `Slice` object.
        twin: a tensor that must hold the same bytes and is compared while this one is read.
    """

    source: TensorInfo
    role: str
    storage: str
    cut: str
    reason: str
    slices: tuple[Slice, ...]
    twin: TensorInfo | None = None

    @property
    def source_bytes(self) -> int:
        """Bytes read from disk, each once: every cut keeps every byte somewhere; and the twin."""
        return self.source.nbytes * (2 if self.twin else 1)


@dataclasses.dataclass(frozen=True, slots=True)
class RankTotals:
    """Bytes of one rank in a plan.

    Attributes:
        rank: position in the group.
        tensor_count: slices that the rank keeps.
        wire_bytes: payload bytes sent to the rank.
        resident_bytes: device bytes that the rank keeps.
        replicated_bytes: device bytes that at least one other rank holds too; zero rows do not count.
    """

    rank: int
    tensor_count: int
    wire_bytes: int
    resident_bytes: int
    replicated_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class LoadPlan:
    """Slices of every tensor for every rank, in the order in which the files are read.

    Attributes:
        path: checkpoint path as it was resolved.
        architecture: name of the plan that was used, `unknown` without one.
        tp: ranks of the group.
        tensors: the tensors, ordered by file and offset.
        files: the files to read, by name.
        tied_head_present: the config ties the head, and the file holds one all the same.
        warnings: findings that did not stop the planning.
    """

    path: str
    architecture: str
    tp: int
    tensors: tuple[TensorPlan, ...]
    files: Mapping[str, CheckpointFile]
    tied_head_present: bool
    warnings: tuple[str, ...]

    @property
    def source_bytes(self) -> int:
        """Payload bytes read from disk, each once."""
        return sum(tensor.source_bytes for tensor in self.tensors)

    def rank_slices(self, rank: int) -> list[Slice]:
        """Return the slices of one rank in streaming order."""
        return [tensor.slices[rank] for tensor in self.tensors]

    def totals(self, rank: int) -> RankTotals:
        """Add up the bytes of one rank."""
        slices = self.rank_slices(rank)
        return RankTotals(
            rank=rank,
            tensor_count=len(slices),
            wire_bytes=sum(piece.wire_bytes for piece in slices),
            resident_bytes=sum(piece.nbytes for piece in slices),
            replicated_bytes=sum(piece.replicated_bytes for piece in slices),
        )
