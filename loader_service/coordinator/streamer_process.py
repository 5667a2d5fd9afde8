"""The coordinator's hold on its streamer process: start, commands, events, restart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable

from loader_service.errors import LoaderError, StreamerLost
from loader_service.stream.jobs import (
    CancelStream,
    Command,
    Event,
    StartStream,
    StreamEnded,
    read_message,
    write_message,
)

__all__ = ["StreamerProcess"]

_log = logging.getLogger(__name__)

RESTART_SECONDS = 0.5
"""Pause before a dead streamer is started again, so that one that cannot start does not spin."""

END_SECONDS = 1.0
"""How long a streamer may take to end after its socket was closed; a stopped one never would."""

CANCEL_SECONDS = 1.0
"""How long a cancelled load may take to leave the streamer before nobody waits for it any more."""


class StreamerProcess:
    """Keeps one streamer running and carries commands to it and events from it."""

    def __init__(self, window_bytes: int, data_ports: str, staging: str = "auto") -> None:
        """Describe the child; `run` starts it."""
        self._arguments = (
            *("--window-bytes", str(window_bytes)),
            *("--data-ports", data_ports),
            *("--staging", staging),
        )
        self._writer: asyncio.StreamWriter | None = None
        self._ready = asyncio.Event()
        self._streams: dict[str, _Stream] = {}

    async def run(self) -> None:
        """Keep the streamer alive until cancelled; then it ends by itself, or is made to."""
        while True:
            try:
                process, reader, writer = await self._start()
            except OSError as error:
                _log.error("the streamer cannot be started: %s; trying again", error)
                await asyncio.sleep(RESTART_SECONDS)
                continue
            self._writer = writer
            self._ready.set()
            try:
                while (event := await read_message(reader)) is not None:
                    self._dispatch(event)
                code = await process.wait()
            finally:
                self._ready.clear()
                writer.close()
                await _end(process)
            self._lose(_exit_text(code))
            await asyncio.sleep(RESTART_SECONDS)

    async def stream(self, job: StartStream, on_event: Callable[[Event], None]) -> None:
        """Run one load; `on_event` gets everything but its end.

        A cancelled caller waits a moment for the streamer to drop the load.

        Raises:
            LoaderError: why the load ended; StreamerLost when the process died.
        """
        await self._ready.wait()
        stream = _Stream(on_event)
        self._streams[job.load_id] = stream
        try:
            await self._send(job)
            error = await asyncio.shield(stream.ended)
        except asyncio.CancelledError:
            with contextlib.suppress(StreamerLost, TimeoutError):
                async with asyncio.timeout(CANCEL_SECONDS):
                    await self._send(CancelStream(job.load_id))
                    await stream.ended
            raise
        finally:
            del self._streams[job.load_id]
        if error is not None:
            raise error

    async def _start(
        self,
    ) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "loader_service.stream.streamer",
                "--control-fd",
                str(theirs.fileno()),
                *self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        _log.info("streamer started as process %d", process.pid)
        return process, reader, writer

    async def _send(self, command: Command) -> None:
        assert self._writer is not None
        try:
            await write_message(self._writer, command)
        except ConnectionError as error:
            raise StreamerLost(f"the streamer is gone: {error}") from error

    def _dispatch(self, event: Event) -> None:
        stream = self._streams.get(event.load_id)
        if stream is None:
            return
        if isinstance(event, StreamEnded):
            stream.end(event.error)
        else:
            stream.on_event(event)

    def _lose(self, how: str) -> None:
        _log.error("the streamer ended %s; starting it again", how)
        for stream in self._streams.values():
            stream.end(StreamerLost(f"the streamer ended {how}"))


class _Stream:
    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self.on_event = on_event
        self.ended: asyncio.Future[LoaderError | None] = asyncio.get_running_loop().create_future()

    def end(self, error: LoaderError | None) -> None:
        if not self.ended.done():
            self.ended.set_result(error)


async def _end(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _exit_text(code: int) -> str:
    """Say how a child ended; a signal by number and name, so that nobody takes it for a time-out."""
    if code >= 0:
        return f"with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"by signal {-code} ({name})"
