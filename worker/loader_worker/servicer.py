"""The worker's gRPC service."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from loader_service.errors import InvalidRequest, LoadNotFound
from loader_service.serving.paging import paginate
from loader_service.stream.threads import run_in_thread
from loader_service.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from loader_service.v1.types_pb2 import WeightSource
from loader_worker.manifest import parse_manifest
from loader_worker.store import WeightNotFoundError, WeightTensor
from loader_worker.worker import Worker

__all__ = ["WorkerServicer"]

DEFAULT_PAGE = 1000
MAX_PAGE = 10_000
WATCH_SECONDS = 0.5
"""Least time between two updates of a watched status."""

MAX_MANIFEST_ENTRIES = 4_000_000
"""Most slices and chunks of a manifest."""

MAX_MANIFEST_BYTES = 2 << 30
"""Most bytes of a manifest: those of its pages, and `PART_BYTES` for each page and everything in it."""

PART_BYTES = 64
"""What a page, slice, dimension, alias, chunk or extent counts at least, however short it is written."""

HASH_BYTES = 32 << 20
"""Bytes that one thread call hashes; freeing waits for one of them."""

_Context = grpc.aio.ServicerContext[Any, Any]


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Turns messages into calls of a `Worker` and back."""

    def __init__(self, worker: Worker, data_host: str) -> None:
        """Serve `worker`; `data_host` is where its data-plane listeners are reached."""
        self._worker = worker
        self._data_host = data_host
        self._stopping = asyncio.Event()

    async def GetStatus(
        self, request: worker_pb2.GetStatusRequest, context: _Context
    ) -> worker_pb2.GetStatusResponse:
        """Return memory and loads."""
        return worker_pb2.GetStatusResponse(status=await self._worker.status())

    async def WatchStatus(
        self, request: worker_pb2.WatchStatusRequest, context: _Context
    ) -> AsyncIterator[worker_pb2.WatchStatusResponse]:
        """Send the status, then changes, until the caller leaves or the worker stops."""
        last = None
        while not self._stopping.is_set():
            status = await self._worker.status()
            if status != last:
                yield worker_pb2.WatchStatusResponse(status=status)
            last = status
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_SECONDS):
                    await self._stopping.wait()

    def end_watches(self) -> None:
        """Let every `WatchStatus` come to its end; an open one would delay the server's stop."""
        self._stopping.set()

    async def ListTensors(
        self, request: worker_pb2.ListTensorsRequest, context: _Context
    ) -> worker_pb2.ListTensorsResponse:
        """List the store's tensors; digests are computed from the device's memory."""
        session = self._worker.committed(request.load_id)
        store = self._worker.store
        try:
            tensors, token = paginate(
                store.names(),
                str,
                lambda name: _tensor_slice(store.get(name)),
                request,
                default=DEFAULT_PAGE,
                maximum=MAX_PAGE,
            )
            if request.include_sha256:
                # All found before the first wait: after it, the store may hold another load.
                weights = [store.get(tensor.name) for tensor in tensors]
                for tensor, weight in zip(tensors, weights, strict=True):
                    tensor.sha256 = await self._sha256(weight)
        except WeightNotFoundError as error:
            # Unloaded while its slices were hashed.
            raise LoadNotFound(
                f"load {request.load_id} was given back meanwhile", load_id=request.load_id
            ) from error
        return worker_pb2.ListTensorsResponse(
            rank=session.manifest.rank, tensors=tensors, next_page_token=token
        )

    async def PrepareLoad(
        self, request_iterator: AsyncIterator[worker_pb2.PrepareLoadRequest], context: _Context
    ) -> worker_pb2.PrepareLoadResponse:
        """Collect the manifest, allocate and listen."""
        header: worker_pb2.ManifestHeader | None = None
        pages = []
        room = 0
        bytes_left = MAX_MANIFEST_BYTES
        async for request in request_iterator:
            if request.HasField("header") and header is None:
                header = request.header
                room = header.slice_count + header.chunk_count
                if room > MAX_MANIFEST_ENTRIES:
                    raise InvalidRequest(
                        f"the manifest has {room} entries, more than {MAX_MANIFEST_ENTRIES}",
                        reason="INVALID_MANIFEST",
                    )
            elif request.HasField("body") and header is not None:
                pages.append(request.body)
                room -= len(request.body.slices) + len(request.body.chunks)
                if room < 0:
                    raise InvalidRequest(
                        "the manifest has more entries than its header says",
                        reason="INVALID_MANIFEST",
                    )
                bytes_left -= _manifest_bytes(request.body)
                if bytes_left < 0:
                    raise InvalidRequest(
                        f"the manifest takes more than {MAX_MANIFEST_BYTES} bytes",
                        reason="INVALID_MANIFEST",
                    )
            else:
                raise InvalidRequest(
                    "a manifest is one header, then bodies", reason="INVALID_MANIFEST"
                )
        if header is None:
            raise InvalidRequest("the manifest has no header", reason="INVALID_MANIFEST")
        manifest = await run_in_thread(self._worker.threads, parse_manifest, header, pages)
        session = await self._worker.prepare(manifest)
        port, token = session.door
        local = session.reads_itself
        return worker_pb2.PrepareLoadResponse(
            data_host=self._data_host,
            data_port=port,
            token=token,
            source=WeightSource.WEIGHT_SOURCE_LOCAL
            if local
            else WeightSource.WEIGHT_SOURCE_COORDINATOR,
            not_local_because=session.not_local_because,
        )

    async def CommitLoad(
        self, request: worker_pb2.CommitLoadRequest, context: _Context
    ) -> worker_pb2.CommitLoadResponse:
        """Make a verified load visible."""
        await self._worker.commit(request.load_id)
        return worker_pb2.CommitLoadResponse(memory=await self._worker.memory())

    async def AbortLoad(
        self, request: worker_pb2.AbortLoadRequest, context: _Context
    ) -> worker_pb2.AbortLoadResponse:
        """End a load and free what it holds."""
        await self._worker.abort(request.load_id)
        return worker_pb2.AbortLoadResponse(memory=await self._worker.memory())

    async def _sha256(self, tensor: WeightTensor) -> str:
        """Hash a tensor of the store piece by piece; raise `WeightNotFoundError` once it is freed."""
        digest = hashlib.sha256()

        def add(offset: int) -> None:
            with self._worker.store.reading(tensor):
                length = min(HASH_BYTES, tensor.nbytes - offset)
                digest.update(self._worker.device.read(tensor.buffer, offset, length))

        for offset in range(0, tensor.nbytes, HASH_BYTES):
            await run_in_thread(self._worker.threads, add, offset)
        return digest.hexdigest()


def _manifest_bytes(page: worker_pb2.ManifestPage) -> int:
    """Return what a page counts of `MAX_MANIFEST_BYTES`."""
    parts = 1 + len(page.slices) + len(page.chunks)
    parts += sum(len(piece.shape) + len(piece.aliases) for piece in page.slices)
    parts += sum(len(chunk.extents) for chunk in page.chunks)
    return page.ByteSize() + PART_BYTES * parts


def _tensor_slice(tensor: WeightTensor) -> types_pb2.TensorSlice:
    return types_pb2.TensorSlice(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        bytes=tensor.nbytes,
        padding_rows=tensor.padding_rows,
        aliases=tensor.aliases,
    )
