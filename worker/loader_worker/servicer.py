"""The worker's gRPC service."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from loader_service.errors import InvalidRequest
from loader_service.rpc import paginate
from loader_service.stream.threads import run_in_thread
from loader_service.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from loader_worker.manifest import parse_manifest
from loader_worker.store import WeightTensor
from loader_worker.worker import Worker

__all__ = ["WorkerServicer"]

DEFAULT_PAGE = 1000
MAX_PAGE = 10_000

_Context = grpc.aio.ServicerContext[Any, Any]


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Turns messages into calls of a `Worker` and back."""

    def __init__(self, worker: Worker, data_host: str) -> None:
        """Serve `worker`; `data_host` is where its data-plane listeners are reached."""
        self._worker = worker
        self._data_host = data_host

    async def GetStatus(
        self, request: worker_pb2.GetStatusRequest, context: _Context
    ) -> worker_pb2.GetStatusResponse:
        """Return memory and loads."""
        return worker_pb2.GetStatusResponse(
            worker_id=self._worker.worker_id,
            incarnation=self._worker.incarnation,
            device=self._worker.device.name,
            memory=self._worker.memory(),
            loads=self._worker.loads(),
        )

    async def ListTensors(
        self, request: worker_pb2.ListTensorsRequest, context: _Context
    ) -> worker_pb2.ListTensorsResponse:
        """List the store's tensors; digests are computed from the device's memory."""
        session = self._worker.committed(request.load_id)
        names, token = paginate(
            self._worker.store.names(),
            str,
            request.page_size,
            request.page_token,
            default=DEFAULT_PAGE,
            maximum=MAX_PAGE,
        )
        tensors = [self._worker.store.get(name) for name in names]
        return worker_pb2.ListTensorsResponse(
            rank=session.manifest.rank,
            tensors=[await self._describe(tensor, request.include_sha256) for tensor in tensors],
            next_page_token=token,
        )

    async def PrepareLoad(
        self, request_iterator: AsyncIterator[worker_pb2.PrepareLoadRequest], context: _Context
    ) -> worker_pb2.PrepareLoadResponse:
        """Collect the manifest, allocate and listen."""
        header: worker_pb2.ManifestHeader | None = None
        pages = []
        async for request in request_iterator:
            if request.HasField("header") and header is None:
                header = request.header
            elif request.HasField("body") and header is not None:
                pages.append(request.body)
            else:
                raise InvalidRequest(
                    "a manifest is one header, then bodies", reason="INVALID_MANIFEST"
                )
        if header is None:
            raise InvalidRequest("the manifest has no header", reason="INVALID_MANIFEST")
        manifest = await run_in_thread(self._worker.threads, parse_manifest, header, pages)
        port, token = await self._worker.prepare(manifest)
        return worker_pb2.PrepareLoadResponse(
            data_host=self._data_host, data_port=port, token=token
        )

    async def CommitLoad(
        self, request: worker_pb2.CommitLoadRequest, context: _Context
    ) -> worker_pb2.CommitLoadResponse:
        """Make a verified load visible."""
        await self._worker.commit(request.load_id)
        return worker_pb2.CommitLoadResponse(memory=self._worker.memory())

    async def AbortLoad(
        self, request: worker_pb2.AbortLoadRequest, context: _Context
    ) -> worker_pb2.AbortLoadResponse:
        """End a load and free what it holds."""
        await self._worker.abort(request.load_id)
        return worker_pb2.AbortLoadResponse(memory=self._worker.memory())

    async def _describe(self, tensor: WeightTensor, with_sha256: bool) -> types_pb2.TensorSlice:
        sha256 = ""
        if with_sha256:
            sha256 = await run_in_thread(self._worker.threads, self._sha256, tensor)
        return types_pb2.TensorSlice(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            bytes=tensor.nbytes,
            padding_rows=tensor.padding_rows,
            aliases=tensor.aliases,
            sha256=sha256,
        )

    def _sha256(self, tensor: WeightTensor) -> str:
        memory = self._worker.device.read(tensor.buffer, 0, tensor.nbytes)
        return hashlib.sha256(memory).hexdigest()
