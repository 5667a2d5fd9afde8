"""The Transport over UCX, through UCXX. Settings and their reasons: docs/transport.md.

Error handling stays on (a listener cannot be opened without it), and the options below let UCX use
shared memory and large TCP segments with it. Python futures keep the event loop asleep while UCX's
progress thread works.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from loader_service.stream.transport import Connection, PeerLostError

__all__ = ["UcxxTransport"]

_log = logging.getLogger(__name__)

_OPTIONS = {
    # With peer error handling UCX drops shared memory unless these say that it can cope.
    "CMA_MEMORY_INVALIDATE": "y",
    "POSIX_ERROR_HANDLING": "y",
    # With 512 KiB segments the TCP planner takes zero-copy messages, not 8 KiB copies.
    "TCP_TX_SEG_SIZE": "512K",
    "TCP_RX_SEG_SIZE": "512K",
    # Host memory reaches a GPU in a pipeline, also with peer error handling: 3 times as fast.
    "RNDV_PIPELINE_ERROR_HANDLING": "y",
}
_ENVIRONMENT = {
    # UCX warns of variables that UCXX itself plants.
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    # A cached mapping of a peer's device memory would keep that memory after the peer freed it. No
    # option, because where there is no GPU UCX does not know it.
    "UCX_CUDA_IPC_CACHE": "n",
    # UCXX plants `cuda`, and UCX would keep 130 to 260 MiB of each GPU for its pipeline.
    "UCX_RNDV_FRAG_MEM_TYPE": "host",
}
"""Set before UCXX is imported, unless the operator has set them."""

_ABORT_NANOSECONDS = 1_000_000_000
"""How long one step of closing an endpoint may take; measured: 0.1 to 5 ms."""

FINISH_SECONDS = 5.0
"""How long an aborted request may take to end; measured: some milliseconds."""


class UcxxTransport:
    """UCX for this process. Made by `start` inside the running event loop, once per process."""

    def __init__(self, ucxx: Any, data_ports: range | None) -> None:
        """Use `start`."""
        self._ucxx = ucxx
        self._data_ports = data_ports

    @classmethod
    def start(cls, data_ports: range | None = None) -> UcxxTransport:
        """Load and initialise UCX.

        Args:
            data_ports: ports that listeners and UCX's own TCP connections may use; None is any.
                Variables `UCX_*` of the environment win over the options set here.
        """
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import ucxx

        options = dict(_OPTIONS)
        if data_ports is not None:
            options["TCP_PORT_RANGE"] = f"{data_ports.start}-{data_ports.stop - 1}"
        ucxx.init(
            options=options,
            env_takes_precedence=True,
            progress_mode="thread",
            enable_python_future=True,
        )
        version = ".".join(map(str, ucxx.get_ucx_version()))
        _log.info("UCX %s, UCXX %s", version, ucxx.__version__)
        return cls(ucxx, data_ports)

    async def listen(self, accepted: Callable[[Connection], None]) -> _UcxxListener:
        """Open a listener on a free port of `data_ports`, or on any free one."""

        def on_endpoint(endpoint: Any) -> None:
            accepted(_UcxxConnection(self._ucxx, endpoint))

        ports: Sequence[int] = self._data_ports if self._data_ports is not None else (0,)
        refusals = []
        for port in ports:
            try:
                return _UcxxListener(self._ucxx.create_listener(on_endpoint, port))
            except self._ucxx.exceptions.UCXError as error:
                refusals.append(error)
        raise OSError(f"no free port for a data-plane listener in {ports}: {refusals}")

    async def connect(self, host: str, port: int, timeout_seconds: float) -> _UcxxConnection:
        """Connect to a listener; nobody there shows as a timeout."""
        try:
            endpoint = await self._ucxx.create_endpoint(host, port, connect_timeout=timeout_seconds)
        except (self._ucxx.exceptions.UCXError, TimeoutError, OSError) as error:
            raise PeerLostError(f"no data-plane connection to {host}:{port}: {error}") from error
        return _UcxxConnection(self._ucxx, endpoint)

    async def close(self) -> None:
        """Stop UCX's threads; the process could not end otherwise."""
        # The notifier thread polls once a second; waiting for it here would stop the event loop.
        await asyncio.get_running_loop().run_in_executor(None, self._ucxx.stop_notifier_thread)


class _UcxxListener:
    def __init__(self, listener: Any) -> None:
        self._listener = listener
        self._port = int(listener.port)

    @property
    def port(self) -> int:
        return self._port

    def close(self) -> None:
        self._listener.close()


class _UcxxConnection:
    def __init__(self, ucxx: Any, endpoint: Any) -> None:
        from ucxx._lib.arr import Array
        from ucxx._lib_async.utils import hash64bits

        self._ucxx = ucxx
        self._public = endpoint
        # `Endpoint.send` and `recv` swallow a cancelled request while the endpoint lives and would
        # report success for bytes that never moved; the requests below it tell the truth.
        self._endpoint = endpoint._ep
        self._tags = endpoint._tags
        self._array = Array
        self._hash = hash64bits
        self._lanes = ""

    @property
    def lanes(self) -> str:
        if not self._public.closed:
            self._lanes = ",".join(dict.fromkeys(_query_lanes(self._public.ucp_endpoint)))
        return self._lanes

    async def send(self, tag: int, buffer: Any) -> None:
        await self._transfer("tag_send", "msg_send", tag, self._contiguous(buffer))

    async def recv(self, tag: int, buffer: Any) -> None:
        array = self._contiguous(buffer)
        # UCXX does not look at this flag and would write into constant memory.
        if array.readonly:
            raise ValueError("cannot receive into read-only memory")
        await self._transfer("tag_recv", "msg_recv", tag, array)

    def abort(self) -> None:
        try:
            self._public.abort(period=_ABORT_NANOSECONDS)
        except self._ucxx.exceptions.UCXError as error:
            _log.debug("aborting a connection that was gone already: %s", error)

    def _contiguous(self, buffer: Any) -> Any:
        array = self._array(buffer)
        # UCXX sends strided memory as if it were contiguous.
        if not array.c_contiguous or not array.nbytes:
            raise ValueError("a message must be contiguous and not empty")
        return array

    async def _transfer(self, verb: str, side: str, tag: int, array: Any) -> None:
        if self._public.closed:
            raise PeerLostError("the connection is closed")
        key = self._ucxx.types.Tag(self._hash(self._tags[side], tag))
        try:
            await self._wait(getattr(self._endpoint, verb)(array, key), array)
        except self._ucxx.exceptions.UCXError as error:
            # UCX itself goes on after a message that was too long for its buffer.
            self.abort()
            raise PeerLostError(f"{type(error).__name__}: {error}") from error

    async def _wait(self, request: Any, array: Any) -> None:
        try:
            await request.wait()
        except asyncio.CancelledError:
            self.abort()
            await _finished(request, array)
            raise


_unfinished: list[tuple[Any, Any]] = []
"""Requests that did not end in time, with their memory: neither may be freed any more."""


async def _finished(request: Any, array: Any) -> None:
    """Wait until an aborted request has ended, so that nothing touches its memory any more.

    A request that is dropped while UCX's progress thread completes it deadlocks with that thread
    (the two take the same two locks in different orders), and a receive that is under way would
    write into memory that its owner has freed meanwhile.
    """
    deadline = time.monotonic() + FINISH_SECONDS
    while not request.completed:
        if time.monotonic() > deadline:
            _log.error("an aborted request did not end; its memory is kept")
            _unfinished.append((request, array))
            return
        # The task is being cancelled already; another cancel must not cut this short.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.001)


class _TransportEntry(ctypes.Structure):
    _fields_ = (("transport_name", ctypes.c_char_p), ("device_name", ctypes.c_char_p))


class _Transports(ctypes.Structure):
    _fields_ = (
        ("entries", ctypes.POINTER(_TransportEntry)),
        ("num_entries", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
    )


class _EndpointAttributes(ctypes.Structure):
    """`ucp_ep_attr_t` of ucp.h, UCX 1.12 and later."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_sockaddr", ctypes.c_char * 128),
        ("remote_sockaddr", ctypes.c_char * 128),
        ("transports", _Transports),
        ("user_data", ctypes.c_void_p),
    )


_FIELD_TRANSPORTS = 1 << 3
_MAX_LANES = 16


def _query_lanes(handle: int) -> list[str]:
    """Ask `ucp_ep_query` which transports and devices an endpoint uses; UCXX has no call for it."""
    query = ctypes.CDLL("libucp.so.0").ucp_ep_query
    query.restype = ctypes.c_int8
    query.argtypes = (ctypes.c_void_p, ctypes.POINTER(_EndpointAttributes))
    entries = (_TransportEntry * _MAX_LANES)()
    attributes = _EndpointAttributes(
        field_mask=_FIELD_TRANSPORTS,
        transports=_Transports(
            ctypes.cast(entries, ctypes.POINTER(_TransportEntry)),
            _MAX_LANES,
            ctypes.sizeof(_TransportEntry),
        ),
    )
    status = query(handle, ctypes.byref(attributes))
    if status:
        _log.warning("ucp_ep_query answered with status %d", status)
        return []
    # The connection manager's lane has a transport but no device.
    return [
        "/".join(filter(None, (entry.transport_name.decode(), entry.device_name.decode())))
        for entry in entries[: attributes.transports.num_entries]
    ]
