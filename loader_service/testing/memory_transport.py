"""A Transport inside one process, for tests."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from loader_service.stream.transport import Connection, PeerLostError

__all__ = ["MemoryNetwork", "MemoryTransport"]


class MemoryNetwork:
    """The wire that joins the transports of one test."""

    def __init__(self) -> None:
        """Start without listeners."""
        self._ports = itertools.count(1)
        self._listeners: dict[int, Callable[[Connection], None]] = {}

    def open(self, accepted: Callable[[Connection], None]) -> int:
        """Register a listener and return its port."""
        port = next(self._ports)
        self._listeners[port] = accepted
        return port

    def shut(self, port: int) -> None:
        """Forget a listener."""
        self._listeners.pop(port, None)

    def dial(self, port: int) -> Connection:
        """Join a new connection to the listener at `port`."""
        accepted = self._listeners.get(port)
        if accepted is None:
            raise PeerLostError(f"nobody listens at port {port}")
        ours, theirs = _MemoryConnection(), _MemoryConnection()
        ours.peer, theirs.peer = theirs, ours
        accepted(theirs)
        return ours


class MemoryTransport:
    """One process's end of a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork) -> None:
        """Join `network`."""
        self._network = network

    async def listen(self, accepted: Callable[[Connection], None]) -> _MemoryListener:
        """Open a listener."""
        return _MemoryListener(self._network, self._network.open(accepted))

    async def connect(self, host: str, port: int, timeout_seconds: float) -> Connection:
        """Connect to a listener; the host does not matter."""
        await asyncio.sleep(0)
        return self._network.dial(port)

    async def close(self) -> None:
        """Nothing to give back."""


class _MemoryListener:
    def __init__(self, network: MemoryNetwork, port: int) -> None:
        self._network = network
        self._port = port

    @property
    def port(self) -> int:
        return self._port

    def close(self) -> None:
        self._network.shut(self._port)


class _Message:
    def __init__(self, data: bytes, taken: asyncio.Future[None]) -> None:
        self.data = data
        self.taken = taken


class _MemoryConnection:
    """Sends complete when the peer has taken the message, as a rendezvous does."""

    def __init__(self) -> None:
        self.peer: _MemoryConnection | None = None
        self._arrived: defaultdict[int, asyncio.Queue[_Message]] = defaultdict(asyncio.Queue)
        self._gone = asyncio.get_running_loop().create_future()

    @property
    def lanes(self) -> str:
        return "memory"

    async def send(self, tag: int, buffer: Any) -> None:
        data = bytes(_flat(buffer))
        self._check()
        assert self.peer is not None
        taken = asyncio.get_running_loop().create_future()
        self.peer._arrived[tag].put_nowait(_Message(data, taken))
        await self._unless_gone(taken)

    async def recv(self, tag: int, buffer: Any) -> None:
        target = _flat(buffer)
        if not target.flags.writeable:
            raise ValueError("cannot receive into read-only memory")
        self._check()
        message = await self._unless_gone(asyncio.ensure_future(self._arrived[tag].get()))
        if len(message.data) != target.nbytes:
            self.abort()
            raise PeerLostError(f"{len(message.data)} bytes arrived, {target.nbytes} were expected")
        target[:] = np.frombuffer(message.data, dtype=np.uint8)
        if not message.taken.done():
            message.taken.set_result(None)

    def abort(self) -> None:
        for side in (self, self.peer):
            if side is not None and not side._gone.done():
                side._gone.set_result(None)

    def _check(self) -> None:
        if self._gone.done():
            raise PeerLostError("the connection is closed")

    async def _unless_gone(self, wanted: asyncio.Future[Any]) -> Any:
        try:
            await asyncio.wait((wanted, self._gone), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            wanted.cancel()
            self.abort()
            raise
        if wanted.done():
            return wanted.result()
        wanted.cancel()
        raise PeerLostError("the connection was aborted")


def _flat(buffer: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    view = memoryview(buffer)
    if not view.c_contiguous or not view.nbytes:
        raise ValueError("a message must be contiguous and not empty")
    return np.frombuffer(view, dtype=np.uint8)
