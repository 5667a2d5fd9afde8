"""The streamer process: the only one that reads payload and runs UCX for the coordinator.

It is a child of the coordinator and speaks with it over an inherited socket. It ends when that
socket does, so it never outlives its parent; when it dies itself, only the loads it carried end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor

from loader_service import addresses
from loader_service.errors import InternalError, LoadCancelled, LoaderError
from loader_service.logs import log_to_stderr
from loader_service.stream.jobs import (
    CancelStream,
    StartStream,
    StreamConnected,
    StreamEnded,
    StreamProgress,
    read_message,
    write_message,
)
from loader_service.stream.sender import LoadSender
from loader_service.stream.transport import Transport
from loader_service.stream.ucxx_transport import UcxxTransport
from loader_service.stream.window import HostWindow

__all__ = ["Streamer", "main"]

_log = logging.getLogger(__name__)

PROGRESS_SECONDS = 0.1
_MAX_READERS = 16


class Streamer:
    """Runs the loads that the coordinator asks for, side by side."""

    def __init__(
        self, transport: Transport, writer: asyncio.StreamWriter, window_bytes: int
    ) -> None:
        """Share one window and one set of reading threads among all loads."""
        self._transport = transport
        self._writer = writer
        self._window = HostWindow(window_bytes)
        self._readers = ThreadPoolExecutor(
            min(_MAX_READERS, os.cpu_count() or 1), thread_name_prefix="reader"
        )
        self._loads: dict[str, asyncio.Task[None]] = {}

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Obey commands until the coordinator's end of the socket is closed."""
        while (command := await read_message(reader)) is not None:
            match command:
                case StartStream():
                    task = asyncio.create_task(self._run(command), name=command.load_id)
                    self._loads[command.load_id] = task
                    task.add_done_callback(lambda done: self._loads.pop(done.get_name(), None))
                case CancelStream() if command.load_id in self._loads:
                    self._loads[command.load_id].cancel()

    async def _run(self, job: StartStream) -> None:
        error: LoaderError | None = None
        reporter: asyncio.Task[None] | None = None
        try:
            sender = LoadSender(job, self._transport, self._window, self._readers)
            reporter = asyncio.create_task(self._report(job.load_id, sender))

            async def connected(lanes: tuple[str, ...]) -> None:
                await write_message(self._writer, StreamConnected(job.load_id, lanes))

            await sender.run(connected)
            await self._progress(job.load_id, sender)
        except asyncio.CancelledError:
            error = LoadCancelled(f"load {job.load_id} was cancelled")
        except LoaderError as failed:
            error = failed
        except Exception as failed:  # noqa: BLE001 - the boundary of a load: its fault must not end the others
            _log.exception("load %s failed", job.load_id)
            error = InternalError(f"the streamer failed: {type(failed).__name__}: {failed}")
        finally:
            if reporter is not None:
                reporter.cancel()
                await asyncio.wait([reporter])
        with contextlib.suppress(ConnectionError):
            await write_message(self._writer, StreamEnded(job.load_id, error))

    async def _report(self, load_id: str, sender: LoadSender) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                await asyncio.sleep(PROGRESS_SECONDS)
                await self._progress(load_id, sender)

    async def _progress(self, load_id: str, sender: LoadSender) -> None:
        message = StreamProgress(load_id, sender.done_bytes, sender.verified)
        await write_message(self._writer, message)


async def _main(control: socket.socket, window_bytes: int, data_ports: range | None) -> None:
    transport = UcxxTransport.start(data_ports)
    reader, writer = await asyncio.open_connection(sock=control)
    await Streamer(transport, writer, window_bytes).serve(reader)
    # The coordinator is gone and nobody waits for an answer. UCX's threads would delay the end.
    logging.shutdown()
    os._exit(0)


def main(arguments: list[str] | None = None) -> None:
    """Run as a child of the coordinator; see `StreamerProcess`."""
    parser = argparse.ArgumentParser(description="child process of loader-coordinator")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--window-bytes", type=int, required=True)
    parser.add_argument("--data-ports", default="")
    options = parser.parse_args(arguments)
    log_to_stderr("streamer")
    control = socket.socket(fileno=options.control_fd)
    data_ports = addresses.parse_ports(options.data_ports)
    asyncio.run(_main(control, options.window_bytes, data_ports))


if __name__ == "__main__":
    main()
