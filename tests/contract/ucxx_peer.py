"""The other end of a connection, as a process that a test kills or stops: accepts and does nothing."""

from __future__ import annotations

import asyncio

from loader_service.stream.transport import Connection
from loader_service.stream.ucxx_transport import UcxxTransport


async def main() -> None:
    accepted: list[Connection] = []
    listener = await UcxxTransport.start().listen(accepted.append)
    print(listener.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
