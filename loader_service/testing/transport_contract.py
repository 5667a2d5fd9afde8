"""What every Transport must do, as tests that an implementation inherits.

A subclass is named `Test...`, overrides the fixture `transport` and runs under pytest with
pytest-asyncio in its automatic mode. Both ends of every connection are in one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from loader_service.stream.transport import Connection, PeerLostError, Transport

__all__ = ["TransportContract", "connected_pairs", "exchange", "in_time", "random_bytes"]

LARGE_BYTES = 64 << 20
"""More than any transport keeps for a receiver that has not asked yet."""

CALL_SECONDS = 10.0
"""A call that takes longer is called stuck."""

HOST = "127.0.0.1"

_Result = TypeVar("_Result")
_Pair = tuple[Connection, Connection]


@contextlib.asynccontextmanager
async def connected_pairs(transport: Transport, count: int = 1) -> AsyncIterator[list[_Pair]]:
    """Open a listener and `count` connections to it; yield (connecting, accepted end) of each."""
    accepted: asyncio.Queue[Connection] = asyncio.Queue()
    listener = await transport.listen(accepted.put_nowait)
    pairs: list[_Pair] = []
    try:
        for _ in range(count):
            ours = await transport.connect(HOST, listener.port, CALL_SECONDS)
            pairs.append((ours, await in_time(accepted.get())))
        yield pairs
    finally:
        for pair in pairs:
            for connection in pair:
                connection.abort()
        listener.close()


async def in_time(awaitable: Awaitable[_Result]) -> _Result:
    """Wait for a call that must not be stuck."""
    async with asyncio.timeout(CALL_SECONDS):
        return await awaitable


async def exchange(
    sender: Connection, receiver: Connection, tag: int, data: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint8]:
    """Send `data` from one end to the other and return what arrived."""
    landed = np.zeros(data.nbytes, np.uint8)
    await in_time(asyncio.gather(sender.send(tag, data), receiver.recv(tag, landed)))
    return landed


def random_bytes(nbytes: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Return bytes that are different for every seed."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


async def _lost(call: Awaitable[None]) -> None:
    """Expect that a call ends with the loss of the peer, in time."""
    with pytest.raises(PeerLostError):
        await in_time(call)


class TransportContract:
    """Tests of the Transport port."""

    @pytest.fixture
    def transport(self) -> Transport:
        """Return the transport under test; closing it is the subclass's business."""
        raise NotImplementedError

    async def test_messages_of_all_sizes_arrive_whole(self, transport: Transport) -> None:
        """From one byte to what needs a rendezvous."""
        async with connected_pairs(transport) as [(ours, theirs)]:
            for size in (1, 3, 64, 4095, 4096, 65_537, 1 << 20, LARGE_BYTES):
                data = random_bytes(size, size)
                assert np.array_equal(await exchange(ours, theirs, 1, data), data)

    async def test_both_ends_send_at_the_same_time(self, transport: Transport) -> None:
        """A tag means something else in each direction."""
        async with connected_pairs(transport) as [(ours, theirs)]:
            there, back = random_bytes(2 << 20, 1), random_bytes(2 << 20, 2)
            landed = await asyncio.gather(
                exchange(ours, theirs, 5, there), exchange(theirs, ours, 5, back)
            )
            assert np.array_equal(landed[0], there)
            assert np.array_equal(landed[1], back)

    async def test_a_receive_may_be_posted_before_the_send(self, transport: Transport) -> None:
        """The other order is that of `exchange`."""
        async with connected_pairs(transport) as [(ours, theirs)]:
            landed = bytearray(5)
            receiving = asyncio.create_task(theirs.recv(9, landed))
            await asyncio.sleep(0.02)
            assert not receiving.done()
            await in_time(ours.send(9, bytearray(b"hello")))
            await in_time(receiving)
            assert landed == b"hello"

    async def test_equal_tags_keep_their_order(self, transport: Transport) -> None:
        """Also between small messages and large ones."""
        sizes = [1, 300_000, 7, 2 << 20, 8, 8, 8, 100_000]
        async with connected_pairs(transport) as [(ours, theirs)]:
            sent = [random_bytes(size, number) for number, size in enumerate(sizes)]
            sending = [asyncio.create_task(ours.send(3, data)) for data in sent]
            for data in sent:
                landed = np.zeros(data.nbytes, np.uint8)
                await in_time(theirs.recv(3, landed))
                assert np.array_equal(landed, data)
            await in_time(asyncio.gather(*sending))

    async def test_different_tags_overtake_each_other(self, transport: Transport) -> None:
        """A message that nobody asks for holds no other one up."""
        tags = [1, 2, (1 << 32) + 5, (1 << 40) + 5]
        async with connected_pairs(transport) as [(ours, theirs)]:
            sent = {tag: random_bytes(1 << 20, tag) for tag in tags}
            sending = [asyncio.create_task(ours.send(tag, sent[tag])) for tag in tags]
            for tag in reversed(tags):
                landed = np.zeros(1 << 20, np.uint8)
                await in_time(theirs.recv(tag, landed))
                assert np.array_equal(landed, sent[tag])
            await in_time(asyncio.gather(*sending))

    async def test_memory_need_not_be_aligned(self, transport: Transport) -> None:
        """Slices of larger buffers, of any kind, at odd addresses; their neighbours stay."""
        async with connected_pairs(transport) as [(ours, theirs)]:
            for size in (5, 100_001, 1 << 20):
                data = random_bytes(size + 8, size).tobytes()
                landed = bytearray(b"\xee" * (size + 8))
                await in_time(
                    asyncio.gather(
                        ours.send(2, memoryview(data)[3 : 3 + size]),
                        theirs.recv(2, memoryview(landed)[1 : 1 + size]),
                    )
                )
                assert landed[1 : 1 + size] == data[3 : 3 + size]
                assert landed[0] == 0xEE
                assert landed[1 + size :] == b"\xee" * 7

    async def test_constant_memory_can_be_sent(self, transport: Transport) -> None:
        """Sending writes nothing."""
        async with connected_pairs(transport) as [(ours, theirs)]:
            for buffer in (b"constant", memoryview(b"constant")):
                landed = bytearray(8)
                await in_time(asyncio.gather(ours.send(1, buffer), theirs.recv(1, landed)))
                assert landed == b"constant"

    async def test_a_buffer_may_be_reused_once_it_is_sent(self, transport: Transport) -> None:
        """What is written to it afterwards does not reach the peer."""
        async with connected_pairs(transport) as [(ours, theirs)]:
            for size in (10, 100_000, 8 << 20):
                data = random_bytes(size, size)
                expected, landed = data.copy(), np.zeros(size, np.uint8)
                receiving = asyncio.create_task(theirs.recv(1, landed))
                await in_time(ours.send(1, data))
                data[:] = 0
                await in_time(receiving)
                assert np.array_equal(landed, expected)

    async def test_read_only_destinations_are_refused(self, transport: Transport) -> None:
        """Nothing is written to them, and the connection stays usable."""
        frozen = random_bytes(8)
        frozen.setflags(write=False)
        async with connected_pairs(transport) as [(ours, theirs)]:
            for buffer in (b"constant", memoryview(b"constant"), frozen):
                with pytest.raises(ValueError, match="read-only"):
                    await in_time(theirs.recv(1, buffer))
            data = random_bytes(8)
            assert np.array_equal(await exchange(ours, theirs, 1, data), data)

    async def test_strided_memory_is_refused(self, transport: Transport) -> None:
        """In both directions, and the connection stays usable."""
        matrix = random_bytes(64).reshape(8, 8)
        strided = (matrix[:, :4], matrix[::2], matrix.T, memoryview(bytearray(16))[::2])
        async with connected_pairs(transport) as [(ours, theirs)]:
            for buffer in strided:
                with pytest.raises(ValueError, match="contiguous"):
                    await in_time(ours.send(1, buffer))
                with pytest.raises(ValueError, match="contiguous"):
                    await in_time(theirs.recv(1, buffer))
            data = random_bytes(8)
            assert np.array_equal(await exchange(ours, theirs, 1, data), data)

    async def test_empty_messages_are_refused(self, transport: Transport) -> None:
        """In both directions, and the connection stays usable."""
        async with connected_pairs(transport) as [(ours, theirs)]:
            for buffer in (bytearray(), np.zeros(0, np.uint8), memoryview(bytearray(4))[2:2]):
                with pytest.raises(ValueError, match="empty"):
                    await in_time(ours.send(1, buffer))
                with pytest.raises(ValueError, match="empty"):
                    await in_time(theirs.recv(1, buffer))
            data = random_bytes(8)
            assert np.array_equal(await exchange(ours, theirs, 1, data), data)

    async def test_a_message_longer_than_the_buffer_ends_the_connection(
        self, transport: Transport
    ) -> None:
        """Small and large; nothing behind the buffer is touched."""
        for size in (10, 1 << 20):
            async with connected_pairs(transport) as [(ours, theirs)]:
                sending = asyncio.create_task(ours.send(1, random_bytes(size)))
                memory = bytearray(b"\xee" * size)
                await _lost(theirs.recv(1, memoryview(memory)[: size - 1]))
                assert memory[-1] == 0xEE
                await _lost(theirs.recv(2, bytearray(1)))
                await _lost(_until_lost(ours))
                await in_time(asyncio.wait([sending]))
                sending.exception()

    async def test_aborting_wakes_the_peers_pending_calls(self, transport: Transport) -> None:
        """A send that nobody takes and a receive that nobody answers."""
        async with connected_pairs(transport) as [(ours, theirs)]:
            sending = asyncio.create_task(ours.send(1, random_bytes(LARGE_BYTES)))
            receiving = asyncio.create_task(ours.recv(2, bytearray(8)))
            await asyncio.sleep(0.05)
            assert not sending.done()
            assert not receiving.done()
            theirs.abort()
            await _lost(sending)
            await _lost(receiving)

    async def test_aborting_wakes_ones_own_pending_calls(self, transport: Transport) -> None:
        """Every call of the connection ends, not only the peer's."""
        async with connected_pairs(transport) as [(ours, _)]:
            calls = [
                asyncio.create_task(ours.recv(2, bytearray(8))),
                asyncio.create_task(ours.send(1, random_bytes(LARGE_BYTES))),
            ]
            await asyncio.sleep(0.05)
            ours.abort()
            for call in calls:
                await _lost(call)

    async def test_an_aborted_connection_refuses_every_call(self, transport: Transport) -> None:
        """Aborting again is harmless."""
        async with connected_pairs(transport) as [(ours, theirs)]:
            ours.abort()
            ours.abort()
            for connection in (ours, theirs):
                await _lost(_until_lost(connection))
                await _lost(connection.recv(1, bytearray(8)))
            theirs.abort()

    async def test_cancelling_a_receive_aborts_the_connection(self, transport: Transport) -> None:
        """Otherwise a late message could be written to memory that was given back."""
        async with connected_pairs(transport) as [(ours, theirs)]:
            receiving = asyncio.create_task(ours.recv(1, bytearray(8)))
            await asyncio.sleep(0.02)
            receiving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await receiving
            await _lost(ours.recv(2, bytearray(8)))
            await _lost(_until_lost(theirs))

    async def test_cancelling_a_send_aborts_the_connection(self, transport: Transport) -> None:
        """The peer could still be reading the buffer."""
        async with connected_pairs(transport) as [(ours, theirs)]:
            sending = asyncio.create_task(ours.send(1, random_bytes(LARGE_BYTES)))
            await asyncio.sleep(0.05)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            await _lost(ours.recv(2, bytearray(8)))
            await _lost(theirs.recv(1, np.zeros(LARGE_BYTES, np.uint8)))

    async def test_connecting_to_nobody_fails_in_time(self, transport: Transport) -> None:
        """A port that had a listener a moment ago."""
        listener = await transport.listen(lambda connection: connection.abort())
        listener.close()
        begun = time.monotonic()
        with pytest.raises(PeerLostError):
            await in_time(transport.connect(HOST, listener.port, 0.3))
        assert time.monotonic() - begun < 2

    async def test_closing_a_listener_keeps_its_connections(self, transport: Transport) -> None:
        """It only accepts no more."""
        accepted: asyncio.Queue[Connection] = asyncio.Queue()
        listener = await transport.listen(accepted.put_nowait)
        assert 0 < listener.port < 65536
        ours = await transport.connect(HOST, listener.port, CALL_SECONDS)
        theirs = await in_time(accepted.get())
        listener.close()
        data = random_bytes(1 << 20)
        assert np.array_equal(await exchange(ours, theirs, 1, data), data)
        with pytest.raises(PeerLostError):
            await in_time(transport.connect(HOST, listener.port, 0.3))
        ours.abort()
        theirs.abort()

    async def test_connections_of_one_listener_do_not_mix(self, transport: Transport) -> None:
        """Equal tags on different connections are different; one that ends leaves the others."""
        async with connected_pairs(transport, 3) as pairs:
            sent = [random_bytes(1 << 20, number) for number in range(3)]
            landed = await asyncio.gather(
                *(
                    exchange(ours, theirs, 1, data)
                    for (ours, theirs), data in zip(pairs, sent, strict=True)
                )
            )
            for data, copy in zip(sent, landed, strict=True):
                assert np.array_equal(data, copy)
            pairs[1][0].abort()
            await _lost(_until_lost(pairs[1][1]))
            for ours, theirs in (pairs[0], pairs[2]):
                data = random_bytes(1000)
                assert np.array_equal(await exchange(theirs, ours, 2, data), data)

    async def test_lanes_are_named_at_both_ends_and_after_the_end(
        self, transport: Transport
    ) -> None:
        """Reports are written when the connection is gone already."""
        async with connected_pairs(transport) as [(ours, theirs)]:
            await exchange(ours, theirs, 1, random_bytes(1000))
            lanes = (ours.lanes, theirs.lanes)
            assert all(lanes)
            ours.abort()
            theirs.abort()
            assert (ours.lanes, theirs.lanes) == lanes


async def _until_lost(connection: Connection) -> None:
    """Call until the loss shows; a call that was under way may end in peace."""
    while True:
        await connection.recv((1 << 50) + 1, bytearray(1))
