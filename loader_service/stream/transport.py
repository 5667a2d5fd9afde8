"""The Transport port: connections that carry tagged messages between buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Connection", "Listener", "PeerLostError", "Transport"]


class PeerLostError(ConnectionError):
    """The connection is gone: reset, aborted, closed or unreachable. Nothing more will arrive."""


class Connection(Protocol):
    """One connection. Messages with different tags may overtake each other; equal tags keep order.

    A buffer given to `send` or `recv` must be contiguous and must not be touched until the call
    returns. Cancelling a call aborts the whole connection, so that nothing can reach into the buffer
    afterwards.
    """

    @property
    def lanes(self) -> str:
        """What carries the data, for people and for reports."""
        ...

    async def send(self, tag: int, buffer: Any) -> None:
        """Send the whole buffer under `tag`; it may be reused when the call returns.

        Raises:
            PeerLostError: the connection is gone.
            ValueError: the buffer is not contiguous, or empty.
        """
        ...

    async def recv(self, tag: int, buffer: Any) -> None:
        """Fill `buffer` from the next message under `tag`, which must have exactly its size.

        Raises:
            PeerLostError: the connection is gone.
            ValueError: the buffer is not contiguous, not writable, or empty.
        """
        ...

    def abort(self) -> None:
        """Drop the connection at once; pending calls raise `PeerLostError`. Never raises."""
        ...


class Listener(Protocol):
    """Accepts connections until closed."""

    @property
    def port(self) -> int:
        """Port that peers connect to."""
        ...

    def close(self) -> None:
        """Accept no more connections; accepted ones stay."""
        ...


class Transport(Protocol):
    """Opens listeners and connections. One per process, used from one event loop."""

    async def listen(self, accepted: Callable[[Connection], None]) -> Listener:
        """Open a listener; `accepted` is called on the event loop for every new connection."""
        ...

    async def connect(self, host: str, port: int, timeout_seconds: float) -> Connection:
        """Connect to a listener.

        Raises:
            PeerLostError: nobody answered in time.
        """
        ...

    async def close(self) -> None:
        """Give back what the transport itself holds; all connections must be gone."""
        ...
