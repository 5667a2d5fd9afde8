"""The client of the service: typed calls, the server's own errors, pages joined.

```python
with LoaderClient("coordinator:50051") as client:
    load = client.load("llama-8b", tp=4)
    for load in client.watch(load.load_id):
        print(f"{load.progress:.0%}", [rank.done_bytes for rank in load.ranks])
```

A load that fails raises nothing; it ends the watch, and `load.state` and `load.failure` say how.
`AsyncLoaderClient` has the same methods as coroutines. Both need grpcio and protobuf only.
"""

from __future__ import annotations

from loader_service.channel_security import ChannelSecurity
from loader_service.client._async import AsyncLoaderClient
from loader_service.client._sync import LoaderClient

__all__ = ["AsyncLoaderClient", "ChannelSecurity", "LoaderClient"]
