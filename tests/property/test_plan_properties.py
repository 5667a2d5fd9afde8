"""Properties of every cut and every plan, on random shapes, heads, dtypes and group sizes.

The reference works on single bits: a tensor is an array of elements of so many bits each, little
end first, so that packed dtypes are cut like all others. It keeps what `owners` says in plain words.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from loader_service.checkpoint.catalog import Checkpoint, TensorCatalog, TensorInfo
from loader_service.errors import PlanRefused
from loader_service.plan.cuts import Cut, Even, Fused, Heads, Replicated, Vocab, cut_tensor
from loader_service.plan.planner import plan_load
from loader_service.plan.slices import Slice
from tests.checkpoints import BITS, payload_bytes
from tests.oracle import apply_runs


@dataclasses.dataclass(frozen=True)
class Case:
    """A tensor, a cut of it, and how its elements along the dim go to ranks by the rules.

    Attributes:
        tensor: the tensor.
        cut: the cut under test.
        tp: ranks.
        owners: indices along the dim that each rank keeps, None where the rules refuse.
        local: elements along the dim of every slice, zero rows included.
    """

    tensor: TensorInfo
    cut: Cut
    tp: int
    owners: list[list[int]] | None
    local: int


def even_owners(size: int, tp: int) -> list[list[int]] | None:
    """Rank r keeps the r-th of tp equal parts."""
    if size % tp:
        return None
    return [[i for i in range(size) if i * tp // size == rank] for rank in range(tp)]


def head_owners(count: int, width: int, tp: int, replicable: bool) -> list[list[int]] | None:
    """Every rank keeps count / tp whole heads; tp / count neighbours share one where there are less."""
    if count % tp == 0:
        return even_owners(count * width, tp)
    if not replicable or tp % count:
        return None
    return [
        [head * width + i for i in range(width)]
        for head in range(count)
        for _ in range(tp // count)
    ]


def vocabulary_owners(size: int, tp: int) -> list[list[int]]:
    """Row i belongs to rank i // ceil(size / tp)."""
    rows = math.ceil(size / tp)
    return [[i for i in range(size) if i // rows == rank] for rank in range(tp)]


@st.composite
def cuts(draw: st.DrawFn, tp: int, dim: int) -> tuple[Cut, int, list[list[int]] | None]:
    """A cut of `dim`, the size of the dim, and the owners of its elements."""
    kind = draw(st.sampled_from(["even", "heads", "vocab", "replicated", "fused"]))
    if kind == "vocab":
        size = draw(st.integers(1, 20))
        return Vocab(dim=dim), size, vocabulary_owners(size, tp)
    if kind == "replicated":
        size = draw(st.integers(1, 9))
        return Replicated(dim=dim), size, [list(range(size))] * tp
    if kind == "even":
        size = draw(st.integers(1, 4)) * draw(st.sampled_from([1, tp]))
        return Even("column", dim), size, even_owners(size, tp)
    parts: list[tuple[int, Cut]] = []
    joined: list[list[int]] | None = [[] for _ in range(tp)]
    base = 0
    for _ in range(1 if kind == "heads" else draw(st.integers(1, 3))):
        count, width = draw(st.integers(1, 8)), draw(st.integers(1, 4))
        replicable = draw(st.booleans())
        owners = head_owners(count, width, tp, replicable)
        parts.append((count * width, Heads("column", dim, count, width, replicable)))
        if joined is not None:
            joined = owners and [
                [*before, *(base + i for i in own)]
                for before, own in zip(joined, owners, strict=True)
            ]
        base += count * width
    return (parts[0][1] if kind == "heads" else Fused("fused", dim, tuple(parts))), base, joined


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tp = draw(st.integers(1, 8))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    cut, size, owners = draw(cuts(tp, dim))
    if isinstance(cut, Vocab) and dim:
        # Padding is at the end of the buffer, so a vocabulary is dim 0 of every model.
        shape[dim], dim, cut = 1, 0, Vocab()
    shape[dim] = size
    dtype = draw(st.sampled_from(["U8", "BF16", "F32", "C64", "F4", "F4", "F6_E2M3"]))
    assume(BITS[dtype] * math.prod(shape) % 8 == 0)
    nbytes = payload_bytes(dtype, shape)
    local = -(-size // tp) if isinstance(cut, Vocab) else len(owners[0]) if owners else 0
    return Case(TensorInfo("t", dtype, tuple(shape), "f", 0, nbytes), cut, tp, owners, local)


def elements(case: Case) -> tuple[bytes, npt.NDArray[np.uint8]]:
    """A random payload, and its elements: shape (*tensor.shape, bits)."""
    payload = np.random.default_rng(case.tensor.nbytes).bytes(case.tensor.nbytes)
    bits = np.unpackbits(np.frombuffer(payload, np.uint8), bitorder="little")
    return payload, bits.reshape(*case.tensor.shape, BITS[case.tensor.dtype])


def taken(case: Case, values: npt.NDArray[np.uint8], rank: int) -> bytes:
    """What the rules give `rank`, zero rows included; only for whole bytes."""
    assert case.owners is not None
    part = np.take(values, case.owners[rank], axis=case.cut.dim)
    missing = [(0, 0)] * values.ndim
    missing[case.cut.dim] = (0, case.local - len(case.owners[rank]))
    return np.packbits(np.pad(part, missing).reshape(-1), bitorder="little").tobytes()


def slices_or_reason(case: Case) -> tuple[tuple[Slice, ...], str]:
    try:
        return cut_tensor(case.tensor, case.cut, case.tp), ""
    except PlanRefused as refused:
        return (), refused.reason


def falls_inside_a_byte(case: Case) -> bool:
    """Whether some rank's piece of some row begins or ends between two bytes."""
    assert case.owners is not None
    shape, dim = case.tensor.shape, case.cut.dim
    inner = BITS[case.tensor.dtype] * math.prod(shape[dim + 1 :])
    if len({*map(tuple, case.owners)}) == 1 and case.local == shape[dim]:
        return False  # whole on every rank: rows lie side by side as in the file
    edges = {case.local}
    for own in case.owners:
        for index in own:
            if index - 1 not in own:
                edges.add(index)
            if index + 1 not in own:
                edges.add(index + 1)
    rows = math.prod(shape[:dim])
    return any(edge * inner % 8 for edge in edges) or (rows > 1 and shape[dim] * inner % 8 != 0)


@settings(max_examples=200, deadline=None)
@given(cases())
def test_every_rank_gets_the_elements_that_the_rules_give_it(case: Case) -> None:
    pieces, reason = slices_or_reason(case)
    if case.owners is None:
        assert reason == "TP_NOT_DIVISIBLE"
        return
    if reason:
        assert reason == "SUB_BYTE_CUT"
        assert falls_inside_a_byte(case)
        return
    payload, values = elements(case)
    for rank, piece in enumerate(pieces):
        local = list(case.tensor.shape)
        local[case.cut.dim] = case.local
        assert piece.shape == tuple(local)
        assert piece.padding_rows == case.local - len(case.owners[rank])
        assert piece.nbytes == payload_bytes(piece.dtype, piece.shape)
        assert apply_runs(payload, piece.runs, piece.nbytes) == taken(case, values, rank)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_runs_fill_a_slice_once_and_use_a_source_byte_once(case: Case) -> None:
    """The wire bytes are the front of the buffer, in the order of the runs; nothing is outside."""
    pieces, _ = slices_or_reason(case)
    for piece in pieces:
        target = np.zeros(piece.nbytes, int)
        source = np.zeros(case.tensor.nbytes, int)
        for run in piece.runs:
            assert run.length > 0
            assert run.count > 0
            for i in range(run.count):
                at, to = (
                    run.source_offset + i * run.source_stride,
                    run.local_offset + i * run.local_stride,
                )
                assert at + run.length <= case.tensor.nbytes
                assert to + run.length <= piece.nbytes
                source[at : at + run.length] += 1
                target[to : to + run.length] += 1
        assert (target[: piece.wire_bytes] == 1).all()
        assert (target[piece.wire_bytes :] == 0).all()
        assert source.max(initial=0) <= 1
        assert source.sum() == piece.wire_bytes


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_source_byte_is_kept_by_the_ranks_that_own_it(case: Case) -> None:
    """Once for column, row and vocabulary; tp / heads times for shared heads; tp times if whole."""
    pieces, _ = slices_or_reason(case)
    assume(pieces)
    assert case.owners is not None
    keepers = np.zeros(case.tensor.nbytes, int)
    places = np.arange(case.tensor.nbytes)
    for piece in pieces:
        for run in piece.runs:
            for i in range(run.count):
                start = run.source_offset + i * run.source_stride
                keepers[places[start : start + run.length]] += 1
    times = np.bincount(np.concatenate([*map(np.array, case.owners)]).astype(int))
    shape = [1] * len(case.tensor.shape)
    shape[case.cut.dim] = len(times)
    wanted = np.broadcast_to(times.reshape(shape), case.tensor.shape).reshape(-1)
    bits = np.repeat(wanted, BITS[case.tensor.dtype]).reshape(-1, 8)
    assert (bits == keepers[:, None]).all()


@settings(max_examples=100, deadline=None)
@given(cases())
def test_equal_ranks_share_one_slice_and_others_do_not(case: Case) -> None:
    pieces, _ = slices_or_reason(case)
    assume(pieces)
    assert case.owners is not None
    for rank, own in enumerate(case.owners):
        for other, its in enumerate(case.owners):
            assert (pieces[rank] is pieces[other]) == (own == its)


# ---------------------------------------------------------------- whole models

_LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
NORMS = {
    "Llama": _LAYER_NORMS,
    "Gemma2": (*_LAYER_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    "Phi3": _LAYER_NORMS,
}
"""Families, and the norms of a layer."""


@dataclasses.dataclass(frozen=True)
class Model:
    """Numbers of a decoder; `feed_forward` and `vocabulary` are rows."""

    family: str
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    feed_forward: int
    vocabulary: int
    layers: int
    tied: bool
    biased: bool

    def allows(self, tp: int) -> bool:
        """By the rules in words: whole query heads, whole or shared kv heads, equal feed-forward."""
        shared = tp % self.kv_heads == 0 if tp > self.kv_heads else self.kv_heads % tp == 0
        return self.heads % tp == 0 and shared and self.feed_forward % tp == 0

    def rank_elements(self, tp: int) -> int:
        """Elements that each rank holds, zero rows included."""
        query = self.heads * self.head_size // tp
        key_value = max(1, self.kv_heads // tp) * self.head_size
        layer = 2 * query * self.hidden + 2 * key_value * self.hidden
        layer += 3 * self.feed_forward // tp * self.hidden + len(NORMS[self.family]) * self.hidden
        if self.biased:
            layer += query + 2 * key_value + self.hidden
        tables = (1 if self.tied else 2) * math.ceil(self.vocabulary / tp) * self.hidden
        return self.layers * layer + tables

    def attention(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one layer's attention."""
        query, key_value = self.heads * self.head_size, self.kv_heads * self.head_size
        parts = {"q_proj": query, "k_proj": key_value, "v_proj": key_value}
        if self.family == "Phi3":
            parts = {"qkv_proj": query + 2 * key_value}
        shapes: dict[str, tuple[int, ...]] = {"o_proj.weight": (self.hidden, query)}
        for part, rows in parts.items():
            shapes[f"{part}.weight"] = (rows, self.hidden)
            if self.biased:
                shapes[f"{part}.bias"] = (rows,)
        if self.biased:
            shapes["o_proj.bias"] = (self.hidden,)
        return shapes

    def mlp(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one layer's feed-forward."""
        parts = {"gate_proj": self.feed_forward, "up_proj": self.feed_forward}
        if self.family == "Phi3":
            parts = {"gate_up_proj": 2 * self.feed_forward}
        shapes: dict[str, tuple[int, ...]] = {"down_proj.weight": (self.hidden, self.feed_forward)}
        return shapes | {f"{part}.weight": (rows, self.hidden) for part, rows in parts.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors."""
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocabulary, self.hidden)
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes |= {f"{prefix}{name}.weight": (self.hidden,) for name in NORMS[self.family]}
            shapes |= {f"{prefix}self_attn.{name}": its for name, its in self.attention().items()}
            shapes |= {f"{prefix}mlp.{name}": its for name, its in self.mlp().items()}
        return shapes

    def checkpoint(self) -> Checkpoint:
        """The model as metadata, in F16; the tied flag is left out where it says the usual."""
        tensors, offset = {}, 64
        for name, shape in self.shapes().items():
            nbytes = 2 * math.prod(shape)
            tensors[name] = TensorInfo(name, "F16", shape, "model.safetensors", offset, nbytes)
            offset += nbytes
        config = {
            "architectures": [f"{self.family}ForCausalLM"],
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "hidden_size": self.hidden,
            "intermediate_size": self.feed_forward,
            "num_hidden_layers": self.layers,
        }
        if self.tied is not (self.family == "Gemma2"):
            config["tie_word_embeddings"] = self.tied
        return Checkpoint("/m", TensorCatalog(tensors, {}), config, ())


models = st.builds(
    Model,
    family=st.sampled_from(["Llama", "Gemma2", "Phi3"]),
    heads=st.sampled_from([1, 2, 4, 6, 8, 12]),
    kv_heads=st.sampled_from([1, 2, 3, 4, 8]),
    head_size=st.integers(1, 4),
    hidden=st.integers(1, 9),
    feed_forward=st.sampled_from([4, 6, 8, 24, 48]),
    vocabulary=st.integers(1, 40),
    layers=st.integers(1, 2),
    tied=st.booleans(),
    biased=st.booleans(),
).map(lambda model: dataclasses.replace(model, biased=model.biased and model.family != "Phi3"))


@settings(max_examples=150, deadline=None)
@given(models, st.integers(1, 12))
def test_model_is_planned_exactly_where_the_rules_allow_the_group(model: Model, tp: int) -> None:
    checkpoint = model.checkpoint()
    if not model.allows(tp):
        with pytest.raises(PlanRefused) as caught:
            plan_load(checkpoint, tp)
        assert caught.value.reason == "TP_NOT_DIVISIBLE"
        assert caught.value.valid_tp == tuple(size for size in range(1, 13) if model.allows(size))
        return
    plan = plan_load(checkpoint, tp)
    assert plan.source_bytes == checkpoint.catalog.payload_bytes
    totals = [plan.totals(rank) for rank in range(tp)]
    assert {total.resident_bytes for total in totals} == {2 * model.rank_elements(tp)}
    padding = sum(
        piece.nbytes - piece.wire_bytes for r in range(tp) for piece in plan.rank_slices(r)
    )
    rows = math.ceil(model.vocabulary / tp) * tp - model.vocabulary
    assert padding == 2 * rows * model.hidden * (1 if model.tied else 2)
    assert sum(t.wire_bytes for t in totals) == 2 * model.rank_elements(tp) * tp - padding
