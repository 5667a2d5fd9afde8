"""WeightStore: the weights that a worker's device holds, by name.

Item numbers (WS-1 ...) are those of the project's contract.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
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

    No call but `free_matching` and `release` waits for the device.

    An alias finds its tensor and counts as contained, but `names`, `len` and all byte counts know a
    tensor once, under its own name.
    """

    def __init__(self, device: Device) -> None:
        """Start empty on `device`."""
        self._device = device
        # Never held while the device frees: that can take seconds, and readers run in event loops.
        self._lock = threading.Condition()
        self._tensors: dict[str, WeightTensor] = {}
        self._aliases: dict[str, str] = {}
        self._freed: set[str] = set()
        self._readers: Counter[WeightTensor] = Counter()
        self._resident_bytes = 0
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
            self._loaded_bytes = sum(tensor.nbytes for tensor in by_name.values())
            # Added: an earlier load may still be on its way out.
            self._resident_bytes += self._loaded_bytes

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

    @contextlib.contextmanager
    def reading(self, tensor: WeightTensor) -> Iterator[None]:
        """Keep `tensor` from being freed inside the block; keep the block short: freeing waits for it.

        Raises:
            WeightNotFoundError: the store does not hold this very tensor any more.
        """
        with self._lock:
            if self._tensors.get(tensor.name) is not tensor:
                raise WeightNotFoundError(f"weight {tensor.name!r} has been freed")
            self._readers[tensor] += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers[tensor] -= 1
                if not self._readers[tensor]:
                    del self._readers[tensor]
                    self._lock.notify_all()

    def resident_bytes(self) -> int:
        """Device bytes still held; shrinks when a tensor has been freed (WS-7)."""
        return self._resident_bytes

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

        The caller knows that nothing but `reading` uses these tensors. An exception of `predicate`
        comes through before anything is freed. A name is gone before its memory is, so that the store
        never holds a dead buffer; the first failing free ends the sweep, the other tensors stay.

        Returns:
            (tensors freed, device bytes freed).

        Raises:
            RuntimeError: a free failed; the text names the tensor.
        """
        with self._lock:
            matching = [name for name in self._tensors if predicate(name)]
        count = freed = 0
        for name in matching:
            with self._lock:
                tensor = self._tensors.pop(name, None)
                if tensor is None:  # Somebody else has freed it meanwhile.
                    continue
                self._freed |= {name, *tensor.aliases}
                for alias in tensor.aliases:
                    del self._aliases[alias]
                self._freed_bytes += tensor.nbytes
            self._free(tensor)
            count += 1
            freed += tensor.nbytes
        return count, freed

    def _free(self, tensor: WeightTensor) -> None:
        """Free a tensor that is forgotten already, once nobody reads it."""
        with self._lock:
            self._lock.wait_for(lambda: tensor not in self._readers)
        try:
            self._device.free(tensor.buffer)
        except Exception as error:
            raise RuntimeError(f"freeing weight {tensor.name!r} failed: {error}") from error
        finally:
            with self._lock:
                self._resident_bytes -= tensor.nbytes

    def release(self) -> None:
        """Free every tensor and become empty; repeating it is harmless (WS-16).

        The names are gone at once; `resident_bytes` falls as their memory is freed.

        Raises:
            RuntimeError: the first free that failed; the others were freed all the same.
        """
        with self._lock:
            tensors, self._tensors = self._tensors, {}
            self._aliases = {}
            self._freed.clear()
            self._freed_bytes = 0
            self._loaded_bytes = 0
            self._prepartitioned_tp = None
        first: RuntimeError | None = None
        for tensor in tensors.values():
            try:
                self._free(tensor)
            except RuntimeError as error:
                first = first or error
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
