"""Manifests on the wire: a rank's slices and chunks in pages that stay far below gRPC's limit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from loader_kernels import digest
from loader_service.plan.slices import LoadPlan, Slice
from loader_service.stream.chunks import Chunk
from loader_service.v1 import worker_pb2

__all__ = ["manifest_pages"]

PAGE_BYTES = 1 << 20
"""A page is sent when it has grown to this; one entry more keeps it below the 4 MiB of gRPC."""


def manifest_pages(
    load_id: str, plan: LoadPlan, rank: int, chunks: Sequence[Chunk]
) -> Iterator[worker_pb2.PrepareLoadRequest]:
    """Yield the messages that tell a worker what it will keep and how it arrives.

    Args:
        load_id: name of the load.
        plan: the plan.
        rank: the worker's rank.
        chunks: the rank's chunks.
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
        )
    )
    page = worker_pb2.ManifestPage()
    size = 0
    entries = itertools.chain(map(_slice, slices), map(_chunk, chunks))
    for entry in entries:
        if isinstance(entry, worker_pb2.ManifestSlice):
            page.slices.append(entry)
        elif isinstance(entry, worker_pb2.ManifestChunk):
            page.chunks.append(entry)
        size += entry.ByteSize()
        if size >= PAGE_BYTES:
            yield worker_pb2.PrepareLoadRequest(body=page)
            page, size = worker_pb2.ManifestPage(), 0
    if size:
        yield worker_pb2.PrepareLoadRequest(body=page)


def _slice(piece: Slice) -> worker_pb2.ManifestSlice:
    return worker_pb2.ManifestSlice(
        name=piece.name,
        dtype=piece.dtype,
        shape=piece.shape,
        wire_bytes=piece.wire_bytes,
        padding_rows=piece.padding_rows,
        aliases=piece.aliases,
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
