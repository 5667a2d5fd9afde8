"""The transport contract over UCXX, and what only UCXX can get wrong.

Not collected by itself: UCX can be initialised once in a process and on one event loop, so
test_transport.py runs this file in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from loader_service.stream.transport import Connection, PeerLostError, Transport
from loader_service.stream.ucxx_transport import UcxxTransport
from loader_service.testing.transport_contract import (
    TransportContract,
    connected_pairs,
    exchange,
    in_time,
    random_bytes,
)

PEER = Path(__file__).with_name("ucxx_peer.py")
PENDING_BYTES = 8 << 20

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = b"\xff" * 65536
JUNK = (b"", b"\0", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", LONG)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ucxx_transport() -> AsyncIterator[UcxxTransport]:
    transport = UcxxTransport.start()
    yield transport
    await transport.close()


class TestUcxxTransport(TransportContract):
    @pytest.fixture
    def transport(self, ucxx_transport: UcxxTransport) -> Transport:
        return ucxx_transport

    async def test_junk_on_the_listeners_port_is_survived(self, transport: Transport) -> None:
        accepted: asyncio.Queue[Connection] = asyncio.Queue()
        listener = await transport.listen(accepted.put_nowait)
        for junk in JUNK:
            with socket.create_connection(("127.0.0.1", listener.port)) as raw:
                raw.sendall(junk)
                await asyncio.sleep(0.02)
        ours = await transport.connect("127.0.0.1", listener.port, 5.0)
        theirs = await in_time(accepted.get())
        data = random_bytes(100_000)
        assert np.array_equal(await exchange(ours, theirs, 1, data), data)
        ours.abort()
        theirs.abort()
        listener.close()

    async def test_a_server_that_says_nothing_is_left_in_time(self, transport: Transport) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            begun = time.monotonic()
            with pytest.raises(PeerLostError):
                await in_time(transport.connect("127.0.0.1", silent.getsockname()[1], 0.3))
            assert time.monotonic() - begun < 2

    async def test_lanes_name_transports_and_devices(self, transport: Transport) -> None:
        async with connected_pairs(transport) as [(ours, theirs)]:
            await exchange(ours, theirs, 1, random_bytes(1000))
            for connection in (ours, theirs):
                lanes = connection.lanes.split(",")
                assert len(set(lanes)) == len(lanes)
                assert {lane.split("/")[0] for lane in lanes} & {"tcp", "posix", "sysv", "cma"}

    async def test_listeners_take_their_ports_from_the_range(
        self, ucxx_transport: UcxxTransport
    ) -> None:
        with socket.create_server(("0.0.0.0", 0)) as taken:
            port = taken.getsockname()[1]
            narrow = UcxxTransport(ucxx_transport._ucxx, range(port, port + 20))
            listener = await narrow.listen(lambda connection: connection.abort())
            assert port < listener.port < port + 20
            listener.close()
            full = UcxxTransport(ucxx_transport._ucxx, range(port, port + 1))
            with pytest.raises(OSError, match="no free port"):
                await full.listen(lambda connection: connection.abort())

    @pytest.mark.parametrize("verb", ["send", "recv"])
    async def test_a_killed_peer_ends_a_pending_call(self, transport: Transport, verb: str) -> None:
        """Reset or cancelled, it is the loss of the peer, within a second (F11)."""
        async with peer(transport) as (process, connection):
            pending = asyncio.create_task(call(connection, verb))
            await asyncio.sleep(0.2)
            assert not pending.done()
            os.kill(process.pid, signal.SIGKILL)
            killed = time.monotonic()
            with pytest.raises(PeerLostError):
                await in_time(pending)
            assert time.monotonic() - killed < 1.0

    @pytest.mark.parametrize("verb", ["send", "recv"])
    async def test_a_stopped_peer_is_left_at_the_deadline(
        self, transport: Transport, verb: str
    ) -> None:
        """UCX never notices; a deadline of our own ends the call and the connection (F11)."""
        async with peer(transport) as (process, connection):
            os.kill(process.pid, signal.SIGSTOP)
            begun = time.monotonic()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await call(connection, verb)
            assert 0.5 <= time.monotonic() - begun < 1.5
            with pytest.raises(PeerLostError):
                await connection.send(2, random_bytes(10))


async def call(connection: Connection, verb: str) -> None:
    """Send or receive what the peer never asks for or sends."""
    await getattr(connection, verb)(1, np.zeros(PENDING_BYTES, np.uint8))


@contextlib.asynccontextmanager
async def peer(transport: Transport) -> AsyncIterator[tuple[Process, Connection]]:
    """Connect to a process of its own; it is gone at the end."""
    process = await asyncio.create_subprocess_exec(sys.executable, str(PEER), stdout=PIPE)
    assert process.stdout is not None
    try:
        port = int(await in_time(process.stdout.readline()))
        connection = await transport.connect("127.0.0.1", port, 5.0)
        yield process, connection
        connection.abort()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
