"""What the operator of a worker chooses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from loader_service.channel_security import ChannelSecurity
from loader_service.serving.options import ServingOptions

__all__ = ["Settings"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one worker; its device is given beside them.

    Attributes:
        coordinator: `HOST:PORT` of the coordinator.
        worker_id: name of the worker, kept across restarts.
        listen: `HOST:PORT` to serve at.
        advertise: `HOST:PORT` given to others; empty for that of `listen`.
        data_ports: ports of the data plane, None for any.
        model_root: folder outside of which the worker reads no file, links resolved; None for any.
        serving: whom to let in, and what to record.
        security: how the coordinator is called.
    """

    coordinator: str
    worker_id: str
    listen: str
    advertise: str = ""
    data_ports: range | None = None
    model_root: Path | None = None
    serving: ServingOptions = dataclasses.field(default_factory=ServingOptions)
    security: ChannelSecurity = dataclasses.field(default_factory=ChannelSecurity)
