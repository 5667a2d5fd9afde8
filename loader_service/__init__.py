"""Distributed model loading: a coordinator streams exact tensor-parallel slices to workers."""

from loader_service.version import PROTOCOL_VERSION, __version__

__all__ = ["PROTOCOL_VERSION", "__version__"]
