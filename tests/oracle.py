"""An independent cutter: what each rank must hold, stated plainly and computed by other libraries.

It imports nothing of ours. Bytes come from the safetensors library: through PyTorch where PyTorch
has the dtype, as raw bytes where it has not. The rules are those of docs/tp_plans.md for Llama,
Mistral, Qwen2, Qwen3, Gemma, Phi-3 and BERT, written as one table of name patterns.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class ExpectedSlice:
    """What a rank must hold of one tensor; `data` includes the zero rows."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    padding_rows: int = 0
    aliases: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        """SHA-256 of `data` in hex."""
        return hashlib.sha256(self.data).hexdigest()


def expected_slices(folder: Path, tp: int) -> list[dict[str, ExpectedSlice]]:
    """Cut the checkpoint in `folder` for `tp` ranks: by rank, then by tensor name.

    A folder without a config is replicated. A head that the config ties is dropped in favour of an
    alias of the embedding.
    """
    config = _config(folder)
    # Of the known families only Gemma ties its head where the config does not say.
    gemma = str(config.get("model_type")).startswith("gemma")
    tied = bool(config.get("tie_word_embeddings", gemma)) and not _is_headless(config)
    ranks: list[dict[str, ExpectedSlice]] = [{} for _ in range(tp)]
    for name, tensor in _tensors(folder).items():
        if tied and name == HEAD:
            continue
        aliases = (HEAD,) if tied and _EMBEDDING.search(name) else ()
        cut = _cut(name, tensor.shape, config, tp)
        for rank in range(tp):
            ranks[rank][name] = _expected(tensor, cut, rank, aliases)
    return ranks


def reassemble(folder: Path, ranks: Sequence[dict[str, ExpectedSlice]]) -> dict[str, bytes]:
    """Put slices of all ranks together again: the bytes of every whole tensor by name."""
    config = _config(folder)
    whole = {}
    for name in ranks[0]:
        tensor = _tensors(folder)[name]
        cut = _cut(name, tensor.shape, config, len(ranks))
        whole[name] = ranks[0][name].data if cut is None else _join(tensor, cut, ranks)
    return whole


def shared_bytes(folder: Path, tp: int) -> list[int]:
    """Bytes of each rank that another rank keeps too, zero rows aside: index by index."""
    config = _config(folder)
    shared = [0] * tp
    for name, tensor in _tensors(folder).items():
        cut = _cut(name, tensor.shape, config, tp)
        if cut is None:
            cut = _Cut(0, [[(0, (tensor.shape or (1,))[0])]] * tp, [0] * tp)
        kept = [
            {index for start, stop in intervals for index in range(start, stop)}
            for intervals in cut.intervals
        ]
        index_bytes = tensor.nbytes // (tensor.shape or (1,))[cut.dim]
        for rank in range(tp):
            others = set().union(*(kept[other] for other in range(tp) if other != rank))
            shared[rank] += len(kept[rank] & others) * index_bytes
    return shared


def _join(tensor: _Stored, cut: _Cut, ranks: Sequence[dict[str, ExpectedSlice]]) -> bytes:
    pieces: dict[tuple[int, int], bytes] = {}  # ranks may share an interval
    outer = math.prod(tensor.shape[: cut.dim])
    for rank, intervals in enumerate(cut.intervals):
        piece = ranks[rank][tensor.name]
        index_bytes = len(piece.data) // outer // piece.shape[cut.dim]
        local = np.frombuffer(piece.data, np.uint8).reshape(outer, -1)
        begin = 0
        for start, stop in intervals:
            end = begin + (stop - start) * index_bytes
            pieces[start, stop] = local[:, begin:end].tobytes()
            begin = end
    rows = [np.frombuffer(pieces[at], np.uint8).reshape(outer, -1) for at in sorted(pieces)]
    return np.concatenate(rows, axis=1).tobytes()


def original_bytes(folder: Path) -> dict[str, bytes]:
    """The bytes of every tensor of a checkpoint, read by the safetensors library."""
    return {
        name: bytes(tensor["data"])
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in safetensors.deserialize(path.read_bytes())
    }


def apply_runs(payload: bytes, runs: Sequence[Any], nbytes: int) -> bytes:
    """Copy strided `runs` out of a tensor's payload into a zeroed buffer of `nbytes`."""
    local = bytearray(nbytes)
    for run in runs:
        for piece in range(run.count):
            source = run.source_offset + piece * run.source_stride
            target = run.local_offset + piece * run.local_stride
            assert 0 <= source <= source + run.length <= len(payload), "outside the tensor"
            assert 0 <= target <= target + run.length <= nbytes, "outside the slice"
            local[target : target + run.length] = payload[source : source + run.length]
    return bytes(local)


# ---------------------------------------------------------------- rules


@dataclasses.dataclass(frozen=True)
class _Cut:
    """What each rank keeps of `dim`: (start, stop) of every part, and the zero rows after it."""

    dim: int
    intervals: list[list[tuple[int, int]]]
    padding: list[int]


_VOCABULARY = re.compile(r"(^|\.)(embed_tokens|word_embeddings|lm_head)\.weight$")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|word_embeddings)\.weight$")
_KEY_VALUE = re.compile(r"\.self_attn\.[kv]_proj\.(weight|bias)$")
_COLUMN = re.compile(
    r"\.(self_attn\.q_proj|mlp\.gate_proj|mlp\.up_proj"
    r"|attention\.self\.(query|key|value)|intermediate\.dense)\.(weight|bias)$"
)
_ROW = re.compile(
    r"\.(self_attn\.o_proj|mlp\.down_proj|attention\.output\.dense|\d+\.output\.dense)\.weight$"
)


def _cut(name: str, shape: tuple[int, ...], config: dict[str, Any], tp: int) -> _Cut | None:
    """None stands for a whole tensor on every rank."""
    if not config:
        return None
    if _VOCABULARY.search(name):
        rows, most = shape[0], math.ceil(shape[0] / tp)
        intervals = [(min(rows, rank * most), min(rows, rank * most + most)) for rank in range(tp)]
        return _Cut(0, [[each] for each in intervals], [most - (b - a) for a, b in intervals])
    if _KEY_VALUE.search(name):
        return _Cut(0, [[each] for each in _heads(shape[0], 0, config, tp)], [0] * tp)
    if name.endswith(".qkv_proj.weight"):
        key_value = config["num_key_value_heads"]
        width = shape[0] // (config["num_attention_heads"] + 2 * key_value)
        queries, keys = config["num_attention_heads"] * width, key_value * width
        parts = [
            [(rank * queries // tp, (rank + 1) * queries // tp) for rank in range(tp)],
            _heads(keys, queries, config, tp),
            _heads(keys, queries + keys, config, tp),
        ]
        return _Cut(0, [[part[rank] for part in parts] for rank in range(tp)], [0] * tp)
    if name.endswith(".gate_up_proj.weight"):
        half = shape[0] // 2
        gate = [(rank * half // tp, (rank + 1) * half // tp) for rank in range(tp)]
        return _Cut(0, [[(a, b), (half + a, half + b)] for a, b in gate], [0] * tp)
    if _COLUMN.search(name):
        return _even(0, shape[0], tp)
    if _ROW.search(name):
        return _even(1, shape[1], tp)
    return None


def _heads(rows: int, base: int, config: dict[str, Any], tp: int) -> list[tuple[int, int]]:
    """The rows of key or value heads that each rank keeps; they begin at `base`."""
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    width = rows // heads
    count = max(1, heads // tp)
    first = [rank * count if heads >= tp else rank // (tp // heads) for rank in range(tp)]
    return [(base + head * width, base + (head + count) * width) for head in first]


def _even(dim: int, size: int, tp: int) -> _Cut:
    assert size % tp == 0, f"{size} is not divisible by {tp}"
    part = size // tp
    return _Cut(dim, [[(rank * part, rank * part + part)] for rank in range(tp)], [0] * tp)


def _is_headless(config: dict[str, Any]) -> bool:
    return any(name.endswith("Model") for name in config.get("architectures") or [])


# ---------------------------------------------------------------- bytes

_UNKNOWN_TO_TORCH = {"F4", "F6_E2M3", "F6_E3M2", "F8_E8M0"}


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A tensor as a header describes it."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def _expected(
    tensor: _Stored, cut: _Cut | None, rank: int, aliases: tuple[str, ...]
) -> ExpectedSlice:
    if cut is None:
        return ExpectedSlice(tensor.dtype, tensor.shape, _part(tensor, 0, None), 0, aliases)
    intervals, padding = cut.intervals[rank], cut.padding[rank]
    assert len(intervals) == 1 or cut.dim == 0
    size = sum(stop - start for start, stop in intervals) + padding
    local = (*tensor.shape[: cut.dim], size, *tensor.shape[cut.dim + 1 :])
    data = b"".join(_part(tensor, cut.dim, interval) for interval in intervals)
    if padding:
        data += bytes(padding * tensor.nbytes // tensor.shape[0])
    return ExpectedSlice(tensor.dtype, local, data, padding, aliases)


def _part(tensor: _Stored, dim: int, interval: tuple[int, int] | None) -> bytes:
    """The bytes of one interval of one dim, of everything without an interval."""
    if tensor.dtype in _UNKNOWN_TO_TORCH or not tensor.nbytes or not tensor.shape:
        return _raw_part(tensor, dim, interval)
    if interval is not None and interval[0] == interval[1]:
        return b""
    import torch

    with safetensors.safe_open(tensor.path, framework="pt") as file:
        view = file.get_slice(tensor.name)
        part = view[:] if interval is None else view[(slice(None),) * dim + (slice(*interval),)]
        return bytes(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _raw_part(tensor: _Stored, dim: int, interval: tuple[int, int] | None) -> bytes:
    data = bytes(dict(safetensors.deserialize(tensor.path.read_bytes()))[tensor.name]["data"])
    if interval is None or not data:
        return data
    rows = np.frombuffer(data, np.uint8).reshape(math.prod(tensor.shape[:dim]), -1)
    edges = [edge * rows.shape[1] for edge in interval]
    assert not any(edge % tensor.shape[dim] for edge in edges), "a cut inside a byte"
    start, stop = (edge // tensor.shape[dim] for edge in edges)
    return rows[:, start:stop].tobytes()


def _tensors(folder: Path) -> dict[str, _Stored]:
    """Every tensor of a folder, as the headers describe it."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            tensors[name] = _Stored(path, name, entry["dtype"], tuple(entry["shape"]), end - begin)
    return tensors


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}
