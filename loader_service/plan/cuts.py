"""Cuts: which indices of one dim each rank keeps, and the byte runs that follow from them.

A cut is a value with two questions: does it allow a group size, and which intervals of its dim does
a rank keep. Everything else (bytes, strides, padding) follows from the intervals in `cut_tensor`, so
a new kind of cut is one small class.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from loader_service.checkpoint.catalog import TensorInfo
from loader_service.checkpoint.dtypes import bits_of
from loader_service.errors import PlanRefused
from loader_service.plan.slices import Slice, StridedRun

__all__ = [
    "Cut",
    "Even",
    "Fused",
    "Heads",
    "Kept",
    "Replicated",
    "Vocab",
    "cut_tensor",
    "cuts_whole_bytes",
    "divides",
]

_Interval = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """What a rank keeps along the cut dim.

    Attributes:
        intervals: (start, stop) in elements, in local order.
        padding: zero elements that follow them.
    """

    intervals: tuple[_Interval, ...]
    padding: int = 0

    @property
    def size(self) -> int:
        """Local elements along the dim, padding included."""
        return _size_of(self.intervals) + self.padding


class Cut(Protocol):
    """How one dim of a tensor is divided over the ranks."""

    @property
    def name(self) -> str:
        """Name for people and for `plan --explain`."""
        ...

    @property
    def dim(self) -> int:
        """Dim that is cut."""
        ...

    def refusal(self, size: int, tp: int) -> str | None:
        """Return why `size` elements cannot be cut for `tp` ranks, or None."""
        ...

    def kept(self, size: int, rank: int, tp: int) -> Kept:
        """Return what `rank` keeps of `size` elements; only where `refusal` is None."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank keeps the whole tensor."""

    name: str = "replicated"
    dim: int = 0

    def refusal(self, size: int, tp: int) -> str | None:
        """Any group size is allowed."""
        return None

    def kept(self, size: int, rank: int, tp: int) -> Kept:
        """Everything."""
        return Kept(((0, size),))


@dataclasses.dataclass(frozen=True, slots=True)
class Even:
    """Equal contiguous parts of one dim: `column` cuts the output dim, `row` the input dim."""

    name: str
    dim: int

    def refusal(self, size: int, tp: int) -> str | None:
        """The dim must be divisible."""
        return f"dim {self.dim} of {size} is not divisible by {tp}" if size % tp else None

    def kept(self, size: int, rank: int, tp: int) -> Kept:
        """The rank's part."""
        part = size // tp
        return Kept(((rank * part, (rank + 1) * part),))


@dataclasses.dataclass(frozen=True, slots=True)
class Vocab:
    """ceil(size / tp) rows a rank; zero rows fill up the last ranks. A rank may be all padding."""

    name: str = "vocab"
    dim: int = 0

    def refusal(self, size: int, tp: int) -> str | None:
        """Any group size is allowed."""
        return None

    def kept(self, size: int, rank: int, tp: int) -> Kept:
        """The rank's rows and its zero rows."""
        part = -(-size // tp)
        start, stop = min(size, rank * part), min(size, (rank + 1) * part)
        return Kept(((start, stop),), padding=part - (stop - start))


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """Whole heads. With fewer heads than ranks, consecutive ranks keep the same head.

    Attributes:
        name: name of the cut.
        dim: dim that holds the heads one after another.
        count: heads in the tensor.
        head_size: elements of one head along the dim.
        replicable: whether fewer heads than ranks are allowed (key and value heads are).
    """

    name: str
    dim: int
    count: int
    head_size: int
    replicable: bool

    def refusal(self, size: int, tp: int) -> str | None:
        """Ranks must get whole heads, or heads whole groups of ranks."""
        if size != self.count * self.head_size:
            return f"dim {self.dim} is {size}, not {self.count} heads of {self.head_size}"
        if self.count % tp == 0 or (self.replicable and tp % self.count == 0):
            return None
        return f"{self.count} heads cannot be shared by {tp} ranks"

    def kept(self, size: int, rank: int, tp: int) -> Kept:
        """The rank's heads, or the head that its group of ranks shares."""
        first = rank * self.count // tp
        heads = max(1, self.count // tp)
        return Kept(((first * self.head_size, (first + heads) * self.head_size),))


@dataclasses.dataclass(frozen=True, slots=True)
class Fused:
    """Several matrices stored one after another along a dim; each is cut by its own rule.

    Attributes:
        name: name of the cut.
        dim: dim along which the parts are joined.
        parts: (elements along the dim, cut of the part); the parts' own dims must be this one.
    """

    name: str
    dim: int
    parts: tuple[tuple[int, Cut], ...]

    def refusal(self, size: int, tp: int) -> str | None:
        """The parts must add up, and every part must allow the group size."""
        if size != sum(part for part, _ in self.parts):
            return (
                f"dim {self.dim} is {size}, not {' + '.join(str(part) for part, _ in self.parts)}"
            )
        for part, cut in self.parts:
            if why := cut.refusal(part, tp):
                return why
            if any(cut.kept(part, rank, tp).padding for rank in range(tp)):
                return f"a part of {part} would need zero rows in the middle for {tp} ranks"
        return None

    def kept(self, size: int, rank: int, tp: int) -> Kept:
        """The rank's part of each matrix, joined again."""
        intervals: list[_Interval] = []
        base = 0
        for part, cut in self.parts:
            intervals += [
                (base + start, base + stop) for start, stop in cut.kept(part, rank, tp).intervals
            ]
            base += part
        return Kept(tuple(intervals))


def cut_tensor(
    tensor: TensorInfo, cut: Cut, tp: int, aliases: tuple[str, ...] = ()
) -> tuple[Slice, ...]:
    """Cut `tensor` for every rank; ranks that keep the same bytes share one `Slice`.

    Raises:
        PlanRefused: TP_NOT_DIVISIBLE; SHAPE_MISMATCH where no group size would do; SUB_BYTE_CUT
            where a cut of a packed dtype would fall inside a byte.
    """
    size = _size(tensor, cut)
    why = cut.refusal(size, tp)
    if why:
        raise PlanRefused(
            f"tensor {tensor.name!r} of shape {list(tensor.shape)}: {why}",
            reason="SHAPE_MISMATCH" if cut.refusal(size, 1) else "TP_NOT_DIVISIBLE",
            tensor=tensor.name,
            tp=tp,
        )
    by_rank = [cut.kept(size, rank, tp) for rank in range(tp)]
    pieces = _common_pieces(by_rank)
    holders = Counter(piece for kept in by_rank for piece in pieces[kept])
    shared = {piece for piece, count in holders.items() if count > 1}
    distinct = {
        kept: _slice(tensor, cut.dim, kept, own, _size_of(shared.intersection(own)), aliases)
        for kept, own in pieces.items()
    }
    return tuple(distinct[kept] for kept in by_rank)


def divides(tensor: TensorInfo, cut: Cut, tp: int) -> bool:
    """Say whether the cut dim can be shared by `tp` ranks."""
    try:
        return cut.refusal(_size(tensor, cut), tp) is None
    except PlanRefused:
        return False


def cuts_whole_bytes(tensor: TensorInfo, cut: Cut, tp: int) -> bool:
    """Say whether no boundary falls inside a byte, for a `tp` that divides the dim."""
    if bits_of(tensor.dtype, tensor.name) % 8 == 0 or isinstance(cut, Replicated):
        return True
    try:
        cut_tensor(tensor, cut, tp)
    except PlanRefused:
        return False
    return True


def _size(tensor: TensorInfo, cut: Cut) -> int:
    if not tensor.shape and isinstance(cut, Replicated):
        return 1
    if cut.dim >= len(tensor.shape):
        raise PlanRefused(
            f"tensor {tensor.name!r} has {len(tensor.shape)} dims, a {cut.name} cut of dim "
            f"{cut.dim} does not fit",
            reason="SHAPE_MISMATCH",
            tensor=tensor.name,
        )
    return tensor.shape[cut.dim]


def _common_pieces(by_rank: Sequence[Kept]) -> dict[Kept, list[_Interval]]:
    """Return what each rank keeps, in pieces that two ranks share as a whole or not at all.

    A piece may cross from one part of a fused tensor into the next, but not where another rank begins
    or ends: the reader reads a piece once for all ranks that want just this piece.
    """
    joined = {kept: _joined(kept.intervals) for kept in by_rank}
    edges = sorted({edge for intervals in joined.values() for each in intervals for edge in each})
    return {
        kept: [
            piece
            for start, stop in intervals
            for piece in itertools.pairwise(
                edges[bisect_left(edges, start) : bisect_right(edges, stop)]
            )
        ]
        for kept, intervals in joined.items()
    }


def _size_of(intervals: Iterable[_Interval]) -> int:
    return sum(stop - start for start, stop in intervals)


def _slice(
    tensor: TensorInfo,
    dim: int,
    kept: Kept,
    intervals: Sequence[_Interval],
    shared_size: int,
    aliases: tuple[str, ...],
) -> Slice:
    shape = tensor.shape
    if not shape or (intervals == [(0, shape[dim])] and not kept.padding):
        return _whole(tensor, aliases, replicated=shared_size > 0)
    local = (*shape[:dim], kept.size, *shape[dim + 1 :])
    bits = bits_of(tensor.dtype, tensor.name) * math.prod(shape[dim + 1 :])
    outer = math.prod(shape[:dim])
    source_stride = _whole_bytes(tensor, bits * shape[dim], outer > 1)
    local_stride = _whole_bytes(tensor, bits * kept.size, always=True)
    runs = []
    local_offset = 0
    for start, stop in intervals:
        length = _whole_bytes(tensor, bits * (stop - start), always=True)
        offset = _whole_bytes(tensor, bits * start, always=True)
        if length and outer:
            runs.append(
                _simplest(
                    StridedRun(offset, source_stride, local_offset, local_stride, length, outer)
                )
            )
        local_offset += length
    return Slice(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=local,
        nbytes=local_stride * outer,
        wire_bytes=sum(run.nbytes for run in runs),
        padding_rows=kept.padding,
        aliases=aliases,
        runs=tuple(runs),
        replicated_bytes=bits * shared_size // 8 * outer,
    )


def _whole(tensor: TensorInfo, aliases: tuple[str, ...], *, replicated: bool) -> Slice:
    size = tensor.nbytes
    return Slice(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        nbytes=size,
        wire_bytes=size,
        padding_rows=0,
        aliases=aliases,
        runs=(StridedRun(0, size, 0, size, size, 1),) if size else (),
        replicated_bytes=size if replicated else 0,
    )


def _joined(intervals: Iterable[_Interval]) -> list[_Interval]:
    """Join intervals that touch, and drop empty ones."""
    joined: list[_Interval] = []
    for start, stop in intervals:
        if start == stop:
            continue
        first = joined.pop()[0] if joined and joined[-1][1] == start else start
        joined.append((first, stop))
    return joined


def _whole_bytes(tensor: TensorInfo, bits: int, always: bool) -> int:
    """Return the bytes; refuse a boundary inside a byte where one would be needed."""
    if bits % 8 and always:
        raise PlanRefused(
            f"tensor {tensor.name!r} of dtype {tensor.dtype}: a cut at {bits} bits falls inside a "
            "byte",
            reason="SUB_BYTE_CUT",
            tensor=tensor.name,
            dtype=tensor.dtype,
        )
    return bits // 8


def _simplest(run: StridedRun) -> StridedRun:
    """Write pieces that touch each other on both sides as one piece."""
    if run.count > 1 and not run.length == run.source_stride == run.local_stride:
        return run
    return StridedRun(run.source_offset, run.nbytes, run.local_offset, run.nbytes, run.nbytes, 1)
