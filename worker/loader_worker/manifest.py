"""A rank's manifest: the slices it is to keep and the chunks they arrive in. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from loader_kernels import digest
from loader_service.checkpoint.dtypes import DTYPE_BITS
from loader_service.errors import InvalidRequest
from loader_service.stream.chunks import Chunk, Extent
from loader_service.v1 import worker_pb2

__all__ = ["Manifest", "ManifestSlice", "parse_manifest"]


@dataclasses.dataclass(frozen=True, slots=True)
class ManifestSlice:
    """One slice that the rank is to keep.

    Attributes:
        name: tensor name.
        dtype: safetensors dtype name.
        shape: local shape, zero rows included.
        nbytes: device bytes, zero rows included.
        wire_bytes: bytes that will arrive; they fill the front of the buffer.
        padding_rows: zero rows at the end of dim 0.
        aliases: other names of the same buffer.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    wire_bytes: int
    padding_rows: int
    aliases: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that a worker must know before the first byte.

    Attributes:
        load_id: name of the load.
        rank: position in the group.
        tp: ranks of the group.
        slices: what the rank keeps, in the order of the files.
        chunks: messages in the order of the data plane; together they fill every slice once.
    """

    load_id: str
    rank: int
    tp: int
    slices: tuple[ManifestSlice, ...]
    chunks: tuple[Chunk, ...]

    @property
    def resident_bytes(self) -> int:
        """Device bytes of all slices."""
        return sum(piece.nbytes for piece in self.slices)

    @property
    def wire_bytes(self) -> int:
        """Payload bytes that will arrive."""
        return sum(piece.wire_bytes for piece in self.slices)


def parse_manifest(
    header: worker_pb2.ManifestHeader, pages: Iterable[worker_pb2.ManifestPage]
) -> Manifest:
    """Build a manifest from its messages and check that it is whole and consistent.

    Raises:
        InvalidRequest: INVALID_MANIFEST, saying what is wrong.
    """
    if header.digest_algorithm != digest.ALGORITHM:
        raise _invalid(f"digest {header.digest_algorithm!r} is not known here")
    if not 0 <= header.rank < header.tp:
        raise _invalid(f"rank {header.rank} of {header.tp}")
    slices: list[ManifestSlice] = []
    chunks: list[Chunk] = []
    for page in pages:
        slices += [_slice(message) for message in page.slices]
        chunks += [_chunk(message) for message in page.chunks]
    if (len(slices), len(chunks)) != (header.slice_count, header.chunk_count):
        raise _invalid("the pages do not hold as many slices and chunks as the header says")
    manifest = Manifest(header.load_id, header.rank, header.tp, tuple(slices), tuple(chunks))
    if manifest.resident_bytes != header.resident_bytes:
        raise _invalid("the slices do not add up to the header's bytes")
    _check_names(manifest)
    _check_chunks(manifest)
    return manifest


def _slice(message: worker_pb2.ManifestSlice) -> ManifestSlice:
    shape = tuple(message.shape)
    if message.dtype not in DTYPE_BITS:
        raise _invalid(f"slice {message.name!r} has unknown dtype {message.dtype!r}")
    bits = math.prod(shape) * DTYPE_BITS[message.dtype]
    if bits % 8 or min(shape, default=0) < 0 or not 0 <= message.wire_bytes <= bits // 8:
        raise _invalid(f"slice {message.name!r} has impossible sizes")
    return ManifestSlice(
        name=message.name,
        dtype=message.dtype,
        shape=shape,
        nbytes=bits // 8,
        wire_bytes=message.wire_bytes,
        padding_rows=message.padding_rows,
        aliases=tuple(message.aliases),
    )


def _chunk(message: worker_pb2.ManifestChunk) -> Chunk:
    return Chunk(
        tuple(
            Extent(extent.slice_index, extent.offset_bytes, extent.length_bytes)
            for extent in message.extents
        )
    )


def _check_names(manifest: Manifest) -> None:
    """A name or alias must mean one slice: the store that they end in refuses anything else."""
    known: set[str] = set()
    for piece in manifest.slices:
        for name in (piece.name, *piece.aliases):
            if name in known:
                raise _invalid(f"two slices are called {name!r}")
            known.add(name)


def _check_chunks(manifest: Manifest) -> None:
    """Every slice must be filled front to back, without gap or overlap, at block boundaries."""
    filled: list[int | None] = [None] * len(manifest.slices)
    for chunk in manifest.chunks:
        if not chunk.extents:
            raise _invalid("a chunk names no slice")
        for extent in chunk.extents:
            if not 0 <= extent.slice_index < len(filled):
                raise _invalid(f"a chunk names slice {extent.slice_index}")
            piece = manifest.slices[extent.slice_index]
            before = filled[extent.slice_index]
            end = extent.offset + extent.length
            if (
                extent.offset != (before or 0)
                or extent.length < 0
                or (extent.length == 0 and (before is not None or piece.wire_bytes))
                or extent.offset % digest.BLOCK_BYTES
                or end > piece.wire_bytes
            ):
                raise _invalid(f"chunks do not fill slice {piece.name!r} in order")
            filled[extent.slice_index] = end
    for piece, reached in zip(manifest.slices, filled, strict=True):
        if reached != piece.wire_bytes:
            raise _invalid(f"no chunk fills the end of slice {piece.name!r}")


def _invalid(what: str) -> InvalidRequest:
    return InvalidRequest(f"bad manifest: {what}", reason="INVALID_MANIFEST")
