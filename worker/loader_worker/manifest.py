"""A rank's manifest: the slices it is to keep, the chunks they arrive in, and where they are found. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from loader_kernels import digest
from loader_service.checkpoint.catalog import TensorInfo
from loader_service.checkpoint.dtypes import DTYPE_BITS
from loader_service.errors import InvalidRequest
from loader_service.plan.slices import Slice, StridedRun
from loader_service.stream.chunks import Chunk, Extent
from loader_service.stream.proof import LARGEST_SAMPLES_BYTES, FileProof
from loader_service.v1 import worker_pb2
from loader_service.v1.types_pb2 import WeightSource

__all__ = ["Manifest", "Origin", "parse_manifest"]


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where a slice is found, for a worker that reads for itself.

    Attributes:
        source: the tensor that the slice is cut from.
        twin: a tensor that must hold the same bytes.
    """

    source: TensorInfo
    twin: TensorInfo | None


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that a worker must know before the first byte.

    Attributes:
        load_id: name of the load.
        rank: position in the group.
        tp: ranks of the group.
        slices: what the rank keeps, in the order of the files; without runs where the coordinator sends
            the bytes.
        chunks: messages in the order of the data plane; together they fill every slice once.
        must_be_local: the load is refused where the worker cannot read for itself.
        files: what proves the files that the slices are found in; empty where the coordinator sends the
            bytes.
        origins: where each slice is found; as many as slices, or none.
    """

    load_id: str
    rank: int
    tp: int
    slices: tuple[Slice, ...]
    chunks: tuple[Chunk, ...]
    must_be_local: bool = False
    files: tuple[FileProof, ...] = ()
    origins: tuple[Origin, ...] = ()

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
    files: list[FileProof] = []
    slices: list[Slice] = []
    origins: list[Origin] = []
    chunks: list[Chunk] = []
    for page in pages:
        files += [_file(message) for message in page.files]
        slices += [_slice(message) for message in page.slices]
        origins += [_origin(message, files) for message in page.slices if files]
        chunks += [_chunk(message) for message in page.chunks]
    if (len(slices), len(chunks)) != (header.slice_count, header.chunk_count):
        raise _invalid("the pages do not hold as many slices and chunks as the header says")
    if origins and len(origins) != len(slices):
        raise _invalid("some slices come before the files that they are found in")
    manifest = Manifest(
        header.load_id,
        header.rank,
        header.tp,
        tuple(slices),
        tuple(chunks),
        header.source == WeightSource.WEIGHT_SOURCE_LOCAL,
        tuple(files),
        tuple(origins),
    )
    if manifest.resident_bytes != header.resident_bytes:
        raise _invalid("the slices do not add up to the header's bytes")
    _check_names(manifest)
    _check_chunks(manifest)
    return manifest


def _file(message: worker_pb2.ManifestFile) -> FileProof:
    proof = FileProof(
        name=message.name,
        path=message.path,
        size=message.size_bytes,
        header_bytes=message.header_bytes,
        header_sha256=message.header_sha256,
        sample_offsets=tuple(message.sample_offsets),
        sample_bytes=message.sample_bytes,
        samples_sha256=message.samples_sha256,
    )
    sampled = len(proof.sample_offsets) * proof.sample_bytes
    if (
        not proof.path.startswith("/")
        or not 0 < proof.header_bytes <= proof.size
        or not 0 < sampled <= LARGEST_SAMPLES_BYTES
        or not all(0 <= offset < 1 << 62 for offset in proof.sample_offsets)
    ):
        raise _invalid(f"file {proof.name!r} has an impossible proof")
    return proof


def _origin(message: worker_pb2.ManifestSlice, files: Sequence[FileProof]) -> Origin:
    origin = message.origin
    twin = _tensor(origin.twin, message, files) if origin.HasField("twin") else None
    source = _tensor(origin.tensor, message, files)
    for run in origin.runs:
        last = run.count - 1
        if (
            min(run.count, run.length_bytes) < 1
            or min(run.source_offset_bytes, run.local_offset_bytes) < 0
            or min(run.source_stride_bytes, run.local_stride_bytes) < run.length_bytes
            or run.source_offset_bytes + last * run.source_stride_bytes + run.length_bytes
            > min(source.nbytes, twin.nbytes if twin else source.nbytes)
            or run.local_offset_bytes + last * run.local_stride_bytes + run.length_bytes
            > message.wire_bytes
        ):
            raise _invalid(f"slice {message.name!r} is cut from outside of its tensor")
    if sum(run.length_bytes * run.count for run in origin.runs) != message.wire_bytes:
        raise _invalid(f"the runs of slice {message.name!r} do not add up to its bytes")
    return Origin(source, twin)


def _tensor(
    message: worker_pb2.ManifestTensor,
    piece: worker_pb2.ManifestSlice,
    files: Sequence[FileProof],
) -> TensorInfo:
    if not 0 <= message.file_index < len(files):
        raise _invalid(f"slice {piece.name!r} names file {message.file_index}")
    file = files[message.file_index]
    inside = file.header_bytes <= message.offset_bytes
    if not inside or not 0 <= message.length_bytes <= file.size - message.offset_bytes:
        raise _invalid(f"tensor {message.name!r} is not inside its file")
    return TensorInfo(
        name=message.name,
        dtype=piece.dtype,
        shape=tuple(piece.shape),
        file=file.name,
        offset=message.offset_bytes,
        nbytes=message.length_bytes,
    )


def _slice(message: worker_pb2.ManifestSlice) -> Slice:
    shape = tuple(message.shape)
    if message.dtype not in DTYPE_BITS:
        raise _invalid(f"slice {message.name!r} has unknown dtype {message.dtype!r}")
    bits = math.prod(shape) * DTYPE_BITS[message.dtype]
    if bits % 8 or min(shape, default=0) < 0 or not 0 <= message.wire_bytes <= bits // 8:
        raise _invalid(f"slice {message.name!r} has impossible sizes")
    return Slice(
        name=message.name,
        dtype=message.dtype,
        shape=shape,
        nbytes=bits // 8,
        wire_bytes=message.wire_bytes,
        padding_rows=message.padding_rows,
        aliases=tuple(message.aliases),
        runs=tuple(
            StridedRun(
                source_offset=run.source_offset_bytes,
                source_stride=run.source_stride_bytes,
                local_offset=run.local_offset_bytes,
                local_stride=run.local_stride_bytes,
                length=run.length_bytes,
                count=run.count,
            )
            for run in message.origin.runs
        ),
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
