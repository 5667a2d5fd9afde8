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

from loader_kernels.device import Device
from loader_kernels.devices import open_device
from loader_service import addresses
from loader_service.errors import InternalError, LoadCancelled, LoaderError
from loader_service.logs import log_to_stderr
from loader_service.stream.feed import DeviceFeed, Feed, HostFeed
from loader_service.stream.jobs import (
    LOCAL_LANES,
    CancelStream,
    StartStream,
    StreamConnected,
    StreamEnded,
    StreamProgress,
    read_message,
    write_message,
)
from loader_service.stream.sender import LoadSender
from loader_service.stream.threads import switch_often
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
        self,
        transport: Transport,
        writer: asyncio.StreamWriter,
        window_bytes: int,
        device: Device | None = None,
    ) -> None:
        """Share one set of reading threads, one window and one ring among all loads.

        Args:
            transport: how chunks travel.
            writer: where events go.
            window_bytes: most bytes of the window on the host, and as many of the ring on `device`.
            device: GPU of this process; None makes all chunks on the host.
        """
        self._transport = transport
        self._writer = writer
        self._readers = ThreadPoolExecutor(
            min(_MAX_READERS, os.cpu_count() or 1), thread_name_prefix="reader"
        )
        self._host_feed = HostFeed(HostWindow(window_bytes), self._readers)
        self._device_feed = DeviceFeed(device, window_bytes, self._readers) if device else None
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
            feed = self._feed_for(job)
            sender = LoadSender(job, self._transport, feed, self._readers)
            reporter = asyncio.create_task(self._report(job.load_id, sender))

            async def connected(lanes: tuple[str, ...]) -> None:
                lanes = tuple(
                    LOCAL_LANES
                    if endpoint.reads_itself
                    else f"{lane},through {feed.name}"
                    if feed.name
                    else lane
                    for lane, endpoint in zip(lanes, job.endpoints, strict=True)
                )
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

    def _feed_for(self, job: StartStream) -> Feed:
        """Choose where chunks are made: on the GPU for GPUs of this machine, which it reaches."""
        here = socket.gethostname()
        near = all(
            endpoint.device.startswith("cuda") and endpoint.machine == here
            for endpoint in job.endpoints
            if not endpoint.reads_itself
        )
        return self._device_feed if self._device_feed and near else self._host_feed

    async def _report(self, load_id: str, sender: LoadSender) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                await asyncio.sleep(PROGRESS_SECONDS)
                await self._progress(load_id, sender)

    async def _progress(self, load_id: str, sender: LoadSender) -> None:
        message = StreamProgress(load_id, sender.done_bytes, sender.verified)
        await write_message(self._writer, message)


async def _main(
    control: socket.socket, window_bytes: int, data_ports: range | None, staging: str
) -> None:
    # UCX needs the device's context before it starts.
    device = _open_gpu() if staging == "auto" else None
    if device is not None:
        switch_often()
    transport = UcxxTransport.start(data_ports)
    reader, writer = await asyncio.open_connection(sock=control)
    await Streamer(transport, writer, window_bytes, device).serve(reader)
    # The coordinator is gone and nobody waits for an answer. UCX's threads would delay the end.
    logging.shutdown()
    os._exit(0)


def _open_gpu() -> Device | None:
    """Return this machine's first GPU, None without one or without CuPy."""
    try:
        device = open_device("cuda:0")
    except ValueError as error:
        _log.info("chunks are made on the host: %s", error)
        return None
    _log.info("chunks for GPUs of this machine are made on %s", device.name)
    return device


def main(arguments: list[str] | None = None) -> None:
    """Run as a child of the coordinator; see `StreamerProcess`."""
    parser = argparse.ArgumentParser(description="child process of loader-coordinator")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--window-bytes", type=int, required=True)
    parser.add_argument("--data-ports", default="")
    parser.add_argument("--staging", default="auto")
    options = parser.parse_args(arguments)
    log_to_stderr("streamer")
    control = socket.socket(fileno=options.control_fd)
    data_ports = addresses.parse_ports(options.data_ports)
    asyncio.run(_main(control, options.window_bytes, data_ports, options.staging))


if __name__ == "__main__":
    main()
