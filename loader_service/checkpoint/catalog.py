"""The catalog: every tensor of a checkpoint with its exact place, as pure values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Checkpoint", "CheckpointFile", "TensorCatalog", "TensorInfo"]


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One file that holds tensors, with what tells whether it changed since.

    Attributes:
        name: file name inside the checkpoint.
        path: where the file really is, symbolic links resolved.
        size: bytes of the file.
        mtime_ns: time of the last change, in nanoseconds.
        inode: inode number.
    """

    name: str
    path: str
    size: int
    mtime_ns: int
    inode: int


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint.

    Attributes:
        name: tensor name.
        dtype: safetensors dtype name.
        shape: elements of each dim.
        file: name of the file that holds it.
        offset: first payload byte, counted from the start of the file.
        nbytes: payload bytes on disk.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


class TensorCatalog:
    """Tensors of a checkpoint by name, read from headers only. Immutable."""

    def __init__(self, tensors: Mapping[str, TensorInfo], files: Mapping[str, CheckpointFile]):
        """Keep the tensors sorted by name and the files by name."""
        self._tensors = dict(sorted(tensors.items()))
        self.files = dict(sorted(files.items()))

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of this name."""
        return name in self._tensors

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._tensors)

    def __iter__(self) -> Iterator[TensorInfo]:
        """Walk the tensors by name."""
        return iter(self._tensors.values())

    def get(self, name: str) -> TensorInfo | None:
        """Return the tensor, or None."""
        return self._tensors.get(name)

    def by_prefix(self, prefix: str) -> list[TensorInfo]:
        """Return the tensors whose names start with `prefix`, by name."""
        return [tensor for tensor in self if tensor.name.startswith(prefix)]

    @property
    def payload_bytes(self) -> int:
        """Payload bytes of all tensors on disk."""
        return sum(tensor.nbytes for tensor in self)


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as far as metadata tells.

    Attributes:
        path: the folder or file, as it was resolved.
        catalog: its tensors.
        config: `config.json`, or None where there is none.
        warnings: findings that did not stop the reading.
    """

    path: str
    catalog: TensorCatalog
    config: Mapping[str, Any] | None
    warnings: tuple[str, ...]

    @property
    def architecture(self) -> str:
        """First entry of the config's `architectures`; empty without one."""
        names = self.config.get("architectures") if self.config else None
        return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
