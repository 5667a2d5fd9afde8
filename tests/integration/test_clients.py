"""The two clients have one surface, and outlast what happens to their connection."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from loader_service.client import AsyncLoaderClient, LoaderClient
from loader_service.errors import (
    LoadNotFound,
    ServiceUnavailable,
)
from loader_service.v1 import types_pb2
from tests.control_plane import (
    ONE_RANK,
    ControlPlane,
    begin,
    control_plane,
)


async def test_the_sync_client_does_what_the_async_one_does(plane: ControlPlane) -> None:
    with LoaderClient(plane.address) as client:

        def work() -> list[types_pb2.Load]:
            load = client.load("model", 2, options=ONE_RANK)
            return list(client.watch(load.load_id))

        loading = asyncio.create_task(asyncio.to_thread(work))
        stream = await plane.next_stream()
        stream.land(0.5, 0.5)
        stream.finish()
        seen = await loading
        assert seen[-1].state == types_pb2.LOAD_STATE_SUCCEEDED
        with pytest.raises(LoadNotFound):
            await asyncio.to_thread(client.get_load, "load-none")
        workers = await asyncio.to_thread(client.list_workers)
        assert [worker.worker_id for worker in workers] == ["w0", "w1", "w2", "w3"]


async def test_a_call_waits_a_moment_for_a_coordinator_that_is_being_restarted(
    model: Path,
) -> None:
    """The retries of the channel, not of the caller."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    async with AsyncLoaderClient(address) as client:
        calling = asyncio.create_task(client.list_workers())
        await asyncio.sleep(0.2)
        assert not calling.done()
        async with control_plane(model.parent, workers=["w0"], listen=address):
            assert [worker.worker_id for worker in await calling] == ["w0"]


async def test_a_watch_goes_on_after_its_connection_broke(
    plane: ControlPlane, client: AsyncLoaderClient
) -> None:
    """Nothing is told twice, and nothing is missed."""
    load = await begin(client)
    stream = await plane.next_stream()
    gate = await Gate.open(plane.address)
    try:
        async with AsyncLoaderClient(gate.address) as distant:
            seen: list[types_pb2.Load] = []
            async for now in distant.watch(load.load_id):
                seen.append(now)
                if len(seen) == 1:
                    gate.cut()
                    stream.land(0.5, 0.5)
                    stream.finish()
        assert seen[-1].state == types_pb2.LOAD_STATE_SUCCEEDED
        revisions = [now.revision for now in seen]
        assert revisions == sorted(set(revisions))
    finally:
        await gate.close()


async def test_a_coordinator_that_is_gone_ends_a_watch(model: Path) -> None:
    async with control_plane(model.parent, workers=["w0"]) as plane:
        gate = await Gate.open(plane.address)
        async with AsyncLoaderClient(gate.address) as client:
            load = await client.load("model")
            watch = client.watch(load.load_id)
            await anext(watch)
            await gate.close()
            with pytest.raises(ServiceUnavailable):
                async for _ in watch:
                    pass


class Gate:
    """A TCP relay whose connections a test can cut."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self.address = ""

    @classmethod
    async def open(cls, target: str) -> Gate:
        gate = cls(target)
        gate._server = await asyncio.start_server(gate._relay, "127.0.0.1", 0)
        gate.address = f"127.0.0.1:{gate._server.sockets[0].getsockname()[1]}"
        return gate

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, int(self._port))
        self._writers += [writer, back]
        for source, sink in ((reader, back), (there, writer)):
            self._tasks.append(asyncio.create_task(_copy(source, sink)))


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
    except ConnectionError:
        pass
    finally:
        sink.close()
