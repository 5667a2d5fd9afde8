"""What the coordinator tells its streamer, and what it hears back. Values that survive pickling."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import struct
from typing import Any

from loader_service.errors import LoaderError
from loader_service.plan.slices import LoadPlan

__all__ = [
    "LOCAL_LANES",
    "CancelStream",
    "Command",
    "Event",
    "RankEndpoint",
    "StartStream",
    "StreamConnected",
    "StreamEnded",
    "StreamProgress",
    "read_message",
    "write_message",
]


LOCAL_LANES = "local"
"""What is said to carry the bytes of a rank whose worker reads them from the files."""


@dataclasses.dataclass(frozen=True, slots=True)
class RankEndpoint:
    """Where a rank's slices go.

    Attributes:
        worker_id: worker that holds the rank.
        host: host of its data-plane listener.
        port: port of its data-plane listener.
        token: one-time token that opens it.
        device: device that the slices go to.
        machine: name of the worker's machine.
        reads_itself: the worker reads its slices from the files; it is only listened to.
    """

    worker_id: str
    host: str
    port: int
    token: bytes
    device: str = "numpy"
    machine: str = ""
    reads_itself: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class StartStream:
    """Read a plan's files and send every rank its slices.

    Attributes:
        load_id: name of the load.
        plan: the plan.
        chunk_bytes: chunk size that the manifests were made with.
        endpoints: one per rank.
    """

    load_id: str
    plan: LoadPlan
    chunk_bytes: int
    endpoints: tuple[RankEndpoint, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CancelStream:
    """Drop a load's connections and report its end."""

    load_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class StreamConnected:
    """All ranks have let the streamer in.

    Attributes:
        load_id: name of the load.
        lanes: what carries each rank's data.
    """

    load_id: str
    lanes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class StreamProgress:
    """Payload bytes of each rank that have landed and been hashed.

    Attributes:
        load_id: name of the load.
        done_bytes: one count per rank; never shrinks.
        verified: ranks whose worker has verified every slice.
    """

    load_id: str
    done_bytes: tuple[int, ...]
    verified: tuple[bool, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class StreamEnded:
    """Nothing of the load is left in the streamer.

    Attributes:
        load_id: name of the load.
        error: why it ended, None when every rank has verified its slices and no file changed.
    """

    load_id: str
    error: LoaderError | None


Command = StartStream | CancelStream
Event = StreamConnected | StreamProgress | StreamEnded

_LENGTH = struct.Struct("<Q")


async def read_message(reader: asyncio.StreamReader) -> Any:
    """Return the next message of a parent's or child's socket, None at its end.

    The coordinator reads `Event`s, the streamer reads `Command`s.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        body = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    # The socket joins a parent and its own child; nobody else can write to it.
    return await asyncio.to_thread(pickle.loads, body)


async def write_message(writer: asyncio.StreamWriter, message: Command | Event) -> None:
    """Write a message to a parent's or child's socket.

    Raises:
        ConnectionError: the other end is gone.
    """
    body = await asyncio.to_thread(pickle.dumps, message)
    writer.write(_LENGTH.pack(len(body)) + body)
    await writer.drain()
