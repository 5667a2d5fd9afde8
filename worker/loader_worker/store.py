"""WeightStore: the weights that a worker's device holds, by name.

Item numbers (WS-1 ...) are those of the project's contract.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType

from loader_kernels.device import Buffer, Device

__all__ = ["WeightNotFoundError", "WeightStore", "WeightTensor"]


class WeightNotFoundError(KeyError):
    """The store has no tensor of this name; the text says whether it was freed."""

    def __str__(self) -> str:
        """Return the sentence itself; `KeyError` would quote it."""
        return str(self.args[0])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WeightTensor:
    """One tensor on the device: the file's dtype and bytes, never converted.

    Attributes:
        name: tensor name in the checkpoint.
        dtype: safetensors dtype name.
        shape: local shape, zero rows included.
        buffer: device memory of its own, `nbytes` bytes in C order; owned by the store.
        padding_rows: zero rows at the end of dim 0.
        aliases: other names of the same tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    buffer: Buffer
    padding_rows: int = 0
    aliases: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Device bytes, zero rows included."""
        return self.buffer.nbytes


class WeightStore:
    """Weights by name (WS-1). Readers may run in other threads than the owner.

    An alias finds its tensor and counts as contained, but `names`, `len` and all byte counts know a
    tensor once, under its own name.
    """

    def __init__(self, device: Device) -> None:
        """Start empty on `device`."""
        self._device = device
        self._lock = threading.RLock()
        self._tensors: dict[str, WeightTensor] = {}
        self._aliases: dict[str, str] = {}
        self._freed: set[str] = set()
        self._loaded_bytes = 0
        self._freed_bytes = 0
        self._prepartitioned_tp: tuple[int, int] | None = None

    @classmethod
    def from_map(cls, weights: Mapping[str, WeightTensor], device: Device) -> WeightStore:
        """Wrap tensors that somebody else has put on `device` (WS-5).

        The store owns the tensors from now on; the mapping itself is copied. `prepartitioned_tp` is
        None.

        Raises:
            ValueError: a key is not its tensor's name, two tensors share a name, an alias or a
                buffer.
        """
        store = cls(device)
        for name, tensor in weights.items():
            if name != tensor.name:
                raise ValueError(f"key {name!r} holds the tensor {tensor.name!r}")
        store._add(weights.values())
        return store

    def publish(self, tensors: Iterable[WeightTensor], rank: int, tp: int) -> None:
        """Make the verified slices of a whole load visible, all at once (WS-15).

        The store owns the tensors from now on. This is the one place that sets `prepartitioned_tp`.

        Raises:
            ValueError: the store is not empty, or two tensors share a name, an alias or a buffer;
                nothing was taken over then.
        """
        with self._lock:
            if self._tensors:
                raise ValueError("the store already holds a load")
            self._add(tensors)
            self._prepartitioned_tp = (rank, tp)

    def _add(self, tensors: Iterable[WeightTensor]) -> None:
        by_name: dict[str, WeightTensor] = {}
        aliases: dict[str, str] = {}
        buffers: set[int] = set()
        for tensor in tensors:
            for name in (tensor.name, *tensor.aliases):
                if name in by_name or name in aliases:
                    raise ValueError(f"two tensors are called {name!r}")
                aliases[name] = tensor.name
            by_name[tensor.name] = tensor
            del aliases[tensor.name]
            if id(tensor.buffer) in buffers:
                raise ValueError(f"tensor {tensor.name!r} shares its buffer with another")
            buffers.add(id(tensor.buffer))
        with self._lock:
            self._tensors = dict(sorted(by_name.items()))
            self._aliases = aliases
            self._freed.clear()
            self._freed_bytes = 0
            self._loaded_bytes = self.resident_bytes()

    def __contains__(self, name: str) -> bool:
        """Whether a tensor has this name or alias."""
        with self._lock:
            return name in self._tensors or name in self._aliases

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._tensors)

    @property
    def is_empty(self) -> bool:
        """Whether the store holds no tensor."""
        return not self._tensors

    def names(self) -> list[str]:
        """Return the tensors' own names in order."""
        with self._lock:
            return list(self._tensors)

    def get(self, name: str) -> WeightTensor:
        """Return the tensor with this name or alias (WS-6).

        Raises:
            WeightNotFoundError: naming it, and saying whether it was freed.
        """
        with self._lock:
            tensor = self._tensors.get(self._aliases.get(name, name))
            if tensor is not None:
                return tensor
            if name in self._freed:
                raise WeightNotFoundError(f"weight {name!r} has been freed")
            raise WeightNotFoundError(f"the store has no weight {name!r}")

    def resident_bytes(self) -> int:
        """Device bytes still held; shrinks when tensors are freed (WS-7)."""
        with self._lock:
            return sum(tensor.nbytes for tensor in self._tensors.values())

    def total_bytes(self) -> int:
        """Bytes of all weight tensors on the device; the same sum as `resident_bytes` (WS-8)."""
        return self.resident_bytes()

    @property
    def loaded_bytes(self) -> int:
        """Device bytes when the load was published; freeing does not change it."""
        return self._loaded_bytes

    @property
    def freed_bytes(self) -> int:
        """Device bytes freed by name since the load was published."""
        return self._freed_bytes

    @property
    def prepartitioned_tp(self) -> tuple[int, int] | None:
        """(rank, tp) after a load was published whole, otherwise None (WS-15)."""
        return self._prepartitioned_tp

    def free_matching(self, predicate: Callable[[str], bool]) -> tuple[int, int]:
        """Free and forget every tensor whose own name satisfies `predicate` (WS-9).

        The caller knows that nothing uses these tensors. An exception of `predicate` comes through
        before anything is freed. A name is gone before its memory is, so that the store never holds
        a dead buffer; the first failing free ends the sweep, the other tensors stay.

        Returns:
            (tensors freed, device bytes freed).

        Raises:
            RuntimeError: a free failed; the text names the tensor.
        """
        with self._lock:
            matching = [name for name in self._tensors if predicate(name)]
            freed = 0
            for name in matching:
                freed += self._free(name)
            return len(matching), freed

    def _free(self, name: str) -> int:
        tensor = self._tensors.pop(name)
        gone = {name, *tensor.aliases}
        self._freed |= gone
        for alias in tensor.aliases:
            del self._aliases[alias]
        nbytes = tensor.nbytes
        self._freed_bytes += nbytes
        try:
            self._device.free(tensor.buffer)
        except Exception as error:
            raise RuntimeError(f"freeing weight {name!r} failed: {error}") from error
        return nbytes

    def release(self) -> None:
        """Free every tensor and become empty; repeating it is harmless (WS-16).

        Raises:
            RuntimeError: the first free that failed; the others were freed all the same.
        """
        with self._lock:
            names = list(self._tensors)
            first: RuntimeError | None = None
            for name in names:
                try:
                    self._free(name)
                except RuntimeError as error:
                    first = first or error
            self._aliases.clear()
            self._freed.clear()
            self._freed_bytes = 0
            self._loaded_bytes = 0
            self._prepartitioned_tp = None
        if first is not None:
            raise first

    def __enter__(self) -> WeightStore:
        """Return the store; leaving the block releases it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release the store."""
        self.release()
