"""What the operator of a coordinator chooses."""

from __future__ import annotations

import dataclasses

from loader_service.checkpoint.files import DEFAULT_MAX_HEADER_BYTES, DEFAULT_MAX_TENSORS

__all__ = ["DEFAULT_MAX_LOADS", "DEFAULT_WINDOW_BYTES", "Settings"]

DEFAULT_WINDOW_BYTES = 512 << 20
DEFAULT_MAX_LOADS = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one coordinator.

    Attributes:
        model_root: folder that checkpoints must lie in.
        window_bytes: host memory that the streamer reads to, all loads together.
        max_header_bytes: largest safetensors header that is accepted.
        heartbeat_seconds: how often workers report.
        lease_seconds: how long a worker counts as alive after a report.
        stall_seconds: a rank that no chunk reaches for so long counts as stalled.
        max_loads: most loads on their way that one identity may have.
        max_tensors: most tensors of a checkpoint that is accepted.
    """

    model_root: str
    window_bytes: int = DEFAULT_WINDOW_BYTES
    max_header_bytes: int = DEFAULT_MAX_HEADER_BYTES
    heartbeat_seconds: float = 1.0
    lease_seconds: float = 10.0
    stall_seconds: float = 2.0
    max_loads: int = DEFAULT_MAX_LOADS
    max_tensors: int = DEFAULT_MAX_TENSORS
