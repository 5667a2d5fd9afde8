"""Reading a step's bytes from the files: every source byte once, straight into the chunks' memory.

Column slices need no packing pass: one `preadv` scatters a run of the file over the chunks of all
ranks. Payload is never mapped, so a file that is truncated meanwhile is an error, not a signal.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from loader_kernels.digest import BLOCK_BYTES, extend_with_zeros, hash_blocks
from loader_service.checkpoint.catalog import CheckpointFile, TensorInfo
from loader_service.checkpoint.files import file_identity
from loader_service.errors import DataLoss, TiedHeadDiffers
from loader_service.plan.slices import Slice, TensorPlan

__all__ = ["OpenFiles", "Target", "read_tensor"]

_IOV_MAX = os.sysconf("SC_IOV_MAX")
_READ_BYTES = 1 << 20
"""Most bytes of one system call: what is hashed right after is still in the cache then."""


class OpenFiles:
    """A checkpoint's files, held open for one load. Owned by the load; `close` ends it."""

    def __init__(self, files: Mapping[str, CheckpointFile]) -> None:
        """Open every file and check that it is the one that was planned.

        Raises:
            DataLoss: FILE_CHANGED or READ_FAILED; nothing stays open then.
        """
        self._files = dict(files)
        self._descriptors: dict[str, int] = {}
        try:
            for file in self._files.values():
                self._descriptors[file.name] = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            self.check_unchanged()
        except OSError as error:
            self.close()
            raise DataLoss(f"{error.filename}: {error.strerror}", reason="READ_FAILED") from error
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


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Where a part of a slice is to be read to.

    Attributes:
        piece: the slice.
        begin: first wire byte of the part, a multiple of the digest's block.
        view: writable memory of shape (bytes of the part,).
    """

    piece: Slice
    begin: int
    view: memoryview


class _Fragment(NamedTuple):
    """Consecutive bytes of the tensor and where they go."""

    offset: int
    view: memoryview


def read_tensor(files: OpenFiles, tensor: TensorPlan, targets: Iterable[Target]) -> list[bytes]:
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
    targets = list(targets)
    descriptor = files.descriptor(tensor.source.file)
    twin = None
    if tensor.twin is not None:
        twin = (files.descriptor(tensor.twin.file), tensor.twin)
    if len(targets) == 1 and len(fragments := list(_fragments(targets[0]))) == 1 and not twin:
        return [_with_zero_rows(targets[0], _read_and_hash(descriptor, tensor.source, fragments[0]))]
    copies: list[tuple[memoryview, memoryview]] = []
    for batch in _batches(targets, copies):
        _read_batch(descriptor, tensor.source, batch)
        if twin:
            _compare_twin(*twin, tensor.source, batch)
    for source, copy in copies:
        copy[:] = source
    return [_with_zero_rows(target, hash_blocks(target.view)) for target in targets]


def _with_zero_rows(target: Target, hashes: bytes) -> bytes:
    piece = target.piece
    if target.begin + len(target.view) < piece.wire_bytes:
        return hashes
    return extend_with_zeros(hashes, target.view, piece.nbytes - piece.wire_bytes)


def _fragments(target: Target) -> Iterator[_Fragment]:
    """Yield the file ranges of a target in the order of its local bytes."""
    begin, end = target.begin, target.begin + len(target.view)
    for run in target.piece.runs:
        first = max(0, (begin - run.local_offset) // run.local_stride)
        for index in range(first, run.count):
            local = run.local_offset + index * run.local_stride
            if local >= end:
                break
            start, stop = max(local, begin), min(local + run.length, end)
            if start < stop:
                offset = run.source_offset + index * run.source_stride + (start - local)
                yield _Fragment(offset, target.view[start - begin : stop - begin])


def _batches(
    targets: list[Target], copies: list[tuple[memoryview, memoryview]]
) -> Iterator[list[_Fragment]]:
    """Yield runs of fragments that follow one another in the file, each for one `preadv`.

    A range that several slices keep is read for the first; the others go to `copies`.
    """
    fragments = [fragment for target in targets for fragment in _fragments(target)]
    fragments.sort(key=lambda fragment: (fragment.offset, len(fragment.view)))
    batch: list[_Fragment] = []
    size = 0
    for fragment in fragments:
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


def _read_batch(descriptor: int, source: TensorInfo, batch: list[_Fragment]) -> None:
    """Fill fragments that follow one another in the file."""
    offset = source.offset + batch[0].offset
    views = [fragment.view for fragment in batch]
    left = sum(map(len, views))
    while left:
        count = _preadv(descriptor, views, offset, source)
        left -= count
        if not left:
            return
        offset += count
        # A short read is rare (a signal, a network file system); go on inside the fragment.
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]


def _read_and_hash(descriptor: int, source: TensorInfo, fragment: _Fragment) -> bytes:
    """Fill one contiguous fragment, hashing each piece while it is in the cache."""
    hashes = []
    for start in range(0, len(fragment.view), _READ_BYTES):
        piece = fragment.view[start : start + _READ_BYTES]
        _read_batch(descriptor, source, [_Fragment(fragment.offset + start, piece)])
        hashes.append(hash_blocks(piece))
    return b"".join(hashes)


def _preadv(descriptor: int, views: list[memoryview], offset: int, source: TensorInfo) -> int:
    try:
        count = os.preadv(descriptor, views, offset)
    except OSError as error:
        raise DataLoss(
            f"{source.file} cannot be read at byte {offset}: {error.strerror}",
            reason="READ_FAILED",
            file=source.file,
            tensor=source.name,
        ) from error
    if count == 0:
        raise DataLoss(
            f"{source.file} ends at byte {offset}, inside tensor {source.name!r}: it became "
            "shorter after it was planned",
            reason="FILE_TRUNCATED",
            file=source.file,
            tensor=source.name,
        )
    return count


def _compare_twin(
    descriptor: int, twin: TensorInfo, source: TensorInfo, batch: list[_Fragment]
) -> None:
    scratch = memoryview(bytearray(_READ_BYTES))
    for fragment in batch:
        for start in range(0, len(fragment.view), _READ_BYTES):
            ours = fragment.view[start : start + _READ_BYTES]
            theirs = scratch[: len(ours)]
            _read_batch(descriptor, twin, [_Fragment(fragment.offset + start, theirs)])
            if ours != theirs:
                raise TiedHeadDiffers(
                    f"the config ties {twin.name!r} to {source.name!r}, but the file holds other "
                    "bytes for it",
                    tensor=twin.name,
                    embedding=source.name,
                )


def _changed(name: str) -> DataLoss:
    return DataLoss(
        f"{name} changed after it was planned", reason="FILE_CHANGED", file=name
    )


assert _READ_BYTES % BLOCK_BYTES == 0
