"""Reading a step's bytes from the files: every source byte once, straight into the chunks' memory.

Contiguous slices are read in place; of column slices whole rows are read and copied apart. Payload is never mapped, so a file that is truncated meanwhile is an error, not a signal.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from loader_kernels.digest import BLOCK_BYTES, HASH_BYTES, extend_with_zeros, hash_blocks
from loader_service.checkpoint.catalog import CheckpointFile, TensorInfo
from loader_service.checkpoint.files import file_identity
from loader_service.errors import DataLoss, TiedHeadDiffers
from loader_service.plan.slices import Slice, StridedRun

__all__ = [
    "OpenFiles",
    "Readable",
    "Target",
    "fill_targets",
    "is_short",
    "read_range",
    "read_tensor",
    "with_zero_rows",
]

_IOV_MAX = os.sysconf("SC_IOV_MAX")
_READ_BYTES = 256 << 10
"""Most bytes of one system call: what is hashed or copied right after is still in the cache then."""

_SHORT_BYTES = 64 << 10
"""Pieces from this size on are worth a system call of their own."""


class OpenFiles:
    """A checkpoint's files, held open for one load. Owned by the load; `close` ends it.

    Attributes:
        reads_rows_whole: rows of which the reader wants only short parts are read whole. That is for
            who reads one rank's columns alone: the page cache gives the rest of a row for less than the
            system calls cost that would leave it out. Otherwise no byte is read in vain.
    """

    def __init__(self, files: Mapping[str, CheckpointFile], reads_rows_whole: bool = False) -> None:
        """Open every file and check that it is the one that was planned.

        Raises:
            DataLoss: FILE_CHANGED or READ_FAILED; nothing stays open then.
        """
        self.reads_rows_whole = reads_rows_whole
        self._files = dict(files)
        self._descriptors: dict[str, int] = {}
        try:
            for file in self._files.values():
                self._descriptors[file.name] = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            self.check_unchanged()
        except OSError as error:
            self.close()
            raise DataLoss(
                f"{error.filename}: {error.strerror}", reason="READ_FAILED", file=error.filename
            ) from error
        except DataLoss:
            self.close()
            raise

    def descriptor(self, name: str) -> int:
        """Return the descriptor of the file called `name`."""
        return self._descriptors[name]

    def check_unchanged(self) -> None:
        """Compare size, time of change and inode with what was planned.

        Raises:
            DataLoss: FILE_CHANGED, naming the file.
        """
        for file in self._files.values():
            planned = (file.size, file.mtime_ns, file.inode)
            if file_identity(self._descriptors[file.name]) != planned:
                raise _changed(file.name)

    def close(self) -> None:
        """Close every file; repeating it is harmless."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


class Readable(Protocol):
    """What reading a tensor needs to know of it; a `TensorPlan` is one."""

    @property
    def source(self) -> TensorInfo:
        """The tensor in the checkpoint."""
        ...

    @property
    def twin(self) -> TensorInfo | None:
        """A tensor that must hold the same bytes and is compared."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Where a part of a slice is to be read to.

    Attributes:
        piece: the slice.
        begin: first wire byte of the part; a multiple of the digest's block where it is hashed.
        view: writable memory of shape (bytes of the part,).
    """

    piece: Slice
    begin: int
    view: memoryview


def read_tensor(files: OpenFiles, tensor: Readable, targets: Sequence[Target]) -> list[bytes]:
    """Fill the targets, which must be parts of distinct slices of `tensor`, and hash them.

    Args:
        files: where to read.
        tensor: the tensor; its twin, if it has one, is read along and compared.
        targets: parts to fill.

    Returns:
        For every target the hashes of its blocks, as `hash_blocks` gives them. The part that ends
        a slice's wire bytes also has the hashes of the zero rows behind them.

    Raises:
        DataLoss: READ_FAILED, or FILE_TRUNCATED where the file ends early.
        TiedHeadDiffers: the twin holds other bytes.
    """
    reader = _TensorReader(files, tensor)
    bands, fragments = _divide(targets, tensor.source.nbytes if files.reads_rows_whole else 0)
    if len(targets) == 1 and len(fragments) == 1 and not bands:
        hashes = [reader.read_and_hash(fragments[0])]
    else:
        reader.read(bands, fragments)
        hashes = [hash_blocks(target.view) for target in targets]
    return [
        with_zero_rows(
            target.piece,
            target.begin,
            len(target.view),
            part,
            functools.partial(_tail, target.view),
        )
        for target, part in zip(targets, hashes, strict=True)
    ]


def fill_targets(files: OpenFiles, tensor: Readable, targets: Sequence[Target]) -> None:
    """Fill the targets as `read_tensor` does, without hashing; they may begin at any byte."""
    _TensorReader(files, tensor).read(
        *_divide(targets, tensor.source.nbytes if files.reads_rows_whole else 0)
    )


def is_short(run: StridedRun) -> bool:
    """Say whether the pieces of a run are too short to be worth a system call each."""
    return run.count > 1 and run.length < _SHORT_BYTES and run.source_stride <= _READ_BYTES


def _tail(view: memoryview, count: int) -> memoryview:
    return view[len(view) - count :]


def with_zero_rows(
    piece: Slice, begin: int, length: int, hashes: bytes, tail: Callable[[int], memoryview]
) -> bytes:
    """Return a part's block hashes with those of the zero rows, if it ends the slice's wire bytes.

    Args:
        piece: the slice.
        begin: first wire byte of the part, a multiple of the digest's block.
        length: bytes of the part.
        hashes: its block hashes.
        tail: returns so many of its last bytes.
    """
    zeros = piece.nbytes - piece.wire_bytes
    if not zeros or begin + length < piece.wire_bytes:
        return hashes
    blocks, rest = divmod(length, BLOCK_BYTES)
    whole = blocks * HASH_BYTES
    begun = tail(rest) if rest else memoryview(b"")
    return hashes[:whole] + extend_with_zeros(hashes[whole:], begun, zeros)


def read_range(files: OpenFiles, tensor: Readable, offset: int, view: memoryview) -> None:
    """Fill `view` with the tensor's bytes from `offset` on.

    Raises:
        DataLoss: READ_FAILED, or FILE_TRUNCATED where the file ends early.
    """
    _preadv_exactly(files, tensor.source, offset, [view])


class _Fragment(NamedTuple):
    """Consecutive bytes of the tensor and where they go."""

    offset: int
    view: memoryview


@dataclasses.dataclass(frozen=True, slots=True)
class _Column:
    """One target's part of every row of a band.

    Attributes:
        offset: first byte inside the row.
        pieces: where the rows' parts go, shape (rows, bytes of one part), uint8.
    """

    offset: int
    pieces: npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True, slots=True)
class _Band:
    """Whole rows of the tensor that the targets divide among themselves.

    Attributes:
        first_row: number of the first row.
        row_bytes: bytes of a row in the file.
        columns: the targets' parts; together they are the whole row.
    """

    first_row: int
    row_bytes: int
    columns: tuple[_Column, ...]


def _divide(targets: Sequence[Target], in_vain_bytes: int) -> tuple[list[_Band], list[_Fragment]]:
    """Say what is to be read row by row and what piece by piece.

    Short pieces at equal distances are cheaper to read with their neighbours, a run of whole rows
    at once, and to copy apart; but only where the targets want every byte of the rows, or where the
    rows lie in the first `in_vain_bytes` of the tensor, which may be read in vain.
    """
    columns: defaultdict[tuple[int, int, int], list[_Column]] = defaultdict(list)
    fragments: list[_Fragment] = []
    parts: defaultdict[tuple[int, int, int], list[tuple[Target, StridedRun]]] = defaultdict(list)
    for target in targets:
        for run in target.piece.runs:
            first, last = _whole_pieces(target, run)
            if last - first < 2 or not is_short(run):
                fragments += _fragments(target, run, 0, run.count)
                continue
            fragments += _fragments(target, run, 0, first)
            fragments += _fragments(target, run, last, run.count)
            row, offset = divmod(run.source_offset, run.source_stride)
            band = (row + first, last - first, run.source_stride)
            columns[band].append(_Column(offset, _strided(target, run, first, last)))
            parts[band].append((target, run))
    bands = []
    for band, members in columns.items():
        first, rows, row_bytes = band
        if _cover(members, row_bytes) or (
            (first + rows) * row_bytes <= in_vain_bytes and _inside(members, row_bytes)
        ):
            bands.append(_Band(first, row_bytes, tuple(members)))
        else:
            for target, run in parts[band]:
                fragments += _fragments(target, run, *_whole_pieces(target, run))
    return bands, fragments


def _whole_pieces(target: Target, run: StridedRun) -> tuple[int, int]:
    """Return the numbers [first, last) of the run's pieces that lie in the target as a whole."""
    begin, end = target.begin - run.local_offset, target.begin + len(target.view) - run.local_offset
    first = max(0, -(-begin // run.local_stride))
    last = min(run.count, (end - run.length) // run.local_stride + 1)
    return first, max(first, last)


def _strided(target: Target, run: StridedRun, first: int, last: int) -> npt.NDArray[np.uint8]:
    """View pieces [first, last) of a run in the target's memory, shape (pieces, run.length)."""
    return np.ndarray(
        (last - first, run.length),
        np.uint8,
        buffer=target.view,
        offset=run.local_offset + first * run.local_stride - target.begin,
        strides=(run.local_stride, 1),
    )


def _cover(columns: list[_Column], row_bytes: int) -> bool:
    """Say whether the columns are a whole row; equal ones (shared heads) count once."""
    position = 0
    for offset, length in sorted({(column.offset, column.pieces.shape[1]) for column in columns}):
        if offset != position:
            return False
        position += length
    return position == row_bytes


def _inside(columns: list[_Column], row_bytes: int) -> bool:
    """Say whether no column goes beyond the end of a row."""
    return all(column.offset + column.pieces.shape[1] <= row_bytes for column in columns)


def _fragments(target: Target, run: StridedRun, first: int, last: int) -> Iterator[_Fragment]:
    """Yield the parts of pieces [first, last) of a run that lie in the target."""
    begin, end = target.begin, target.begin + len(target.view)
    first = max(first, (begin - run.local_offset) // run.local_stride)
    for index in range(first, last):
        local = run.local_offset + index * run.local_stride
        if local >= end:
            break
        start, stop = max(local, begin), min(local + run.length, end)
        if start < stop:
            offset = run.source_offset + index * run.source_stride + (start - local)
            yield _Fragment(offset, target.view[start - begin : stop - begin])


class _TensorReader:
    """Reads one tensor, and its twin along with it."""

    def __init__(self, files: OpenFiles, tensor: Readable) -> None:
        self._files = files
        self._source = tensor.source
        self._twin = tensor.twin

    def read_and_hash(self, fragment: _Fragment) -> bytes:
        """Fill one fragment, hashing each piece while it is in the cache."""
        hashes = []
        for start in range(0, len(fragment.view), _READ_BYTES):
            piece = fragment.view[start : start + _READ_BYTES]
            self._read(fragment.offset + start, [piece])
            hashes.append(hash_blocks(piece))
        return b"".join(hashes)

    def read(self, bands: list[_Band], fragments: list[_Fragment]) -> None:
        """Fill everything."""
        for band in bands:
            self.read_band(band)
        self.read_fragments(fragments)

    def read_band(self, band: _Band) -> None:
        """Read rows a few at a time and copy each target's part out of them."""
        rows = band.columns[0].pieces.shape[0]
        step = max(1, _READ_BYTES // band.row_bytes)
        scratch = np.empty((min(step, rows), band.row_bytes), np.uint8)
        for start in range(0, rows, step):
            part = scratch[: min(step, rows - start)]
            self._read((band.first_row + start) * band.row_bytes, [part.reshape(-1).data])
            for column in band.columns:
                pieces = column.pieces[start : start + step]
                pieces[:] = part[:, column.offset : column.offset + pieces.shape[1]]

    def read_fragments(self, fragments: list[_Fragment]) -> None:
        """Fill fragments in the order of the file; a range that several want is read once."""
        copies: list[tuple[memoryview, memoryview]] = []
        for batch in _batches(fragments, copies):
            self._read(batch[0].offset, [fragment.view for fragment in batch])
        for source, copy in copies:
            copy[:] = source

    def _read(self, offset: int, views: list[memoryview]) -> None:
        """Fill `views` with consecutive bytes of the tensor; compare the twin's."""
        _preadv_exactly(self._files, self._source, offset, views)
        if self._twin is None:
            return
        ours = np.concatenate([np.frombuffer(view, np.uint8) for view in views])
        theirs = np.empty_like(ours)
        _preadv_exactly(self._files, self._twin, offset, [theirs.data])
        if not np.array_equal(ours, theirs):
            raise TiedHeadDiffers(
                f"the config ties {self._twin.name!r} to {self._source.name!r}, but the file holds "
                "other bytes for it",
                tensor=self._twin.name,
                embedding=self._source.name,
            )


def _batches(
    fragments: list[_Fragment], copies: list[tuple[memoryview, memoryview]]
) -> Iterator[list[_Fragment]]:
    """Yield runs of fragments that follow one another in the file, each for one `preadv`.

    A range that several slices keep is read for the first; the others go to `copies`.
    """
    batch: list[_Fragment] = []
    size = 0
    for fragment in sorted(fragments, key=lambda fragment: (fragment.offset, len(fragment.view))):
        if batch:
            last = batch[-1]
            if (fragment.offset, len(fragment.view)) == (last.offset, len(last.view)):
                copies.append((last.view, fragment.view))
                continue
            follows = fragment.offset == last.offset + len(last.view)
            if not follows or len(batch) == _IOV_MAX or size >= _READ_BYTES:
                yield batch
                batch, size = [], 0
        batch.append(fragment)
        size += len(fragment.view)
    if batch:
        yield batch


def _preadv_exactly(
    files: OpenFiles, tensor: TensorInfo, offset: int, views: list[memoryview]
) -> None:
    """Fill `views` with the tensor's bytes from `offset` on."""
    descriptor, position = files.descriptor(tensor.file), tensor.offset + offset
    left = sum(map(len, views))
    while left:
        count = _preadv(descriptor, views, position, tensor)
        left -= count
        position += count
        if left:
            # A short read is rare (a signal, a network file system); go on inside the view.
            views = _skip(views, count)


def _skip(views: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of `views` after their first `count` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []


def _preadv(descriptor: int, views: list[memoryview], position: int, tensor: TensorInfo) -> int:
    try:
        count = os.preadv(descriptor, views, position)
    except OSError as error:
        raise DataLoss(
            f"{tensor.file} cannot be read at byte {position}: {error.strerror}",
            reason="READ_FAILED",
            file=tensor.file,
            tensor=tensor.name,
        ) from error
    if count == 0:
        raise DataLoss(
            f"{tensor.file} ends at byte {position}, inside tensor {tensor.name!r}: it became "
            "shorter after it was planned",
            reason="FILE_TRUNCATED",
            file=tensor.file,
            tensor=tensor.name,
        )
    return count


def _changed(name: str) -> DataLoss:
    return DataLoss(f"{name} changed after it was planned", reason="FILE_CHANGED", file=name)


assert _READ_BYTES % BLOCK_BYTES == 0
