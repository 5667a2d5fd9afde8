"""Manifests on the wire: a rank's slices and chunks in pages that stay far below gRPC's limit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from loader_kernels import digest
from loader_service.checkpoint.catalog import TensorInfo
from loader_service.plan.slices import LoadPlan, Slice, TensorPlan
from loader_service.stream.chunks import Chunk
from loader_service.stream.proof import FileProof
from loader_service.v1 import worker_pb2
from loader_service.v1.types_pb2 import WeightSource

__all__ = ["manifest_pages"]

PAGE_BYTES = 1 << 20
"""A page is sent when it has grown to this; one entry more keeps it below the 4 MiB of gRPC."""


def manifest_pages(
    load_id: str,
    plan: LoadPlan,
    rank: int,
    chunks: Sequence[Chunk],
    source: WeightSource.ValueType = WeightSource.WEIGHT_SOURCE_COORDINATOR,
    proofs: Sequence[FileProof] = (),
) -> Iterator[worker_pb2.PrepareLoadRequest]:
    """Yield the messages that tell a worker what it will keep and how it arrives.

    Args:
        load_id: name of the load.
        plan: the plan.
        rank: the worker's rank.
        chunks: the rank's chunks.
        source: where the worker may take the bytes from.
        proofs: those of the plan's files, unless the coordinator sends everything.
    """
    slices = plan.rank_slices(rank)
    yield worker_pb2.PrepareLoadRequest(
        header=worker_pb2.ManifestHeader(
            load_id=load_id,
            rank=rank,
            tp=plan.tp,
            digest_algorithm=digest.ALGORITHM,
            slice_count=len(slices),
            chunk_count=len(chunks),
            resident_bytes=sum(piece.nbytes for piece in slices),
            source=source,
        )
    )
    page = worker_pb2.ManifestPage()
    size = 0
    positions = {proof.name: position for position, proof in enumerate(proofs)}
    entries = itertools.chain(
        map(_file, proofs),
        (_slice(tensor, tensor.slices[rank], positions) for tensor in plan.tensors),
        map(_chunk, chunks),
    )
    for entry in entries:
        if isinstance(entry, worker_pb2.ManifestFile):
            page.files.append(entry)
        elif isinstance(entry, worker_pb2.ManifestSlice):
            page.slices.append(entry)
        elif isinstance(entry, worker_pb2.ManifestChunk):
            page.chunks.append(entry)
        size += entry.ByteSize()
        if size >= PAGE_BYTES:
            yield worker_pb2.PrepareLoadRequest(body=page)
            page, size = worker_pb2.ManifestPage(), 0
    if size:
        yield worker_pb2.PrepareLoadRequest(body=page)


def _file(proof: FileProof) -> worker_pb2.ManifestFile:
    return worker_pb2.ManifestFile(
        name=proof.name,
        path=proof.path,
        size_bytes=proof.size,
        header_bytes=proof.header_bytes,
        header_sha256=proof.header_sha256,
        sample_offsets=proof.sample_offsets,
        sample_bytes=proof.sample_bytes,
        samples_sha256=proof.samples_sha256,
    )


def _slice(
    tensor: TensorPlan, piece: Slice, positions: Mapping[str, int]
) -> worker_pb2.ManifestSlice:
    message = worker_pb2.ManifestSlice(
        name=piece.name,
        dtype=piece.dtype,
        shape=piece.shape,
        wire_bytes=piece.wire_bytes,
        padding_rows=piece.padding_rows,
        aliases=piece.aliases,
    )
    if positions:
        message.origin.tensor.CopyFrom(_tensor(tensor.source, positions))
        if tensor.twin is not None:
            message.origin.twin.CopyFrom(_tensor(tensor.twin, positions))
        for run in piece.runs:
            message.origin.runs.add(
                source_offset_bytes=run.source_offset,
                source_stride_bytes=run.source_stride,
                local_offset_bytes=run.local_offset,
                local_stride_bytes=run.local_stride,
                length_bytes=run.length,
                count=run.count,
            )
    return message


def _tensor(tensor: TensorInfo, positions: Mapping[str, int]) -> worker_pb2.ManifestTensor:
    return worker_pb2.ManifestTensor(
        name=tensor.name,
        file_index=positions[tensor.file],
        offset_bytes=tensor.offset,
        length_bytes=tensor.nbytes,
    )


def _chunk(chunk: Chunk) -> worker_pb2.ManifestChunk:
    return worker_pb2.ManifestChunk(
        extents=[
            worker_pb2.ManifestExtent(
                slice_index=extent.slice_index,
                offset_bytes=extent.offset,
                length_bytes=extent.length,
            )
            for extent in chunk.extents
        ]
    )
