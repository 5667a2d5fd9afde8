"""Version of the package and of the protocol between coordinator and worker."""

__all__ = ["PROTOCOL_VERSION", "__version__"]

__version__ = "0.1.0"

PROTOCOL_VERSION = 1
"""Grows when a coordinator and a worker of different versions could misunderstand each other."""
