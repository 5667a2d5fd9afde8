"""Cuts by hand: packed dtypes, fused matrices, and how few runs describe a cut."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from loader_service.checkpoint.catalog import TensorInfo
from loader_service.checkpoint.files import read_checkpoint
from loader_service.errors import PlanRefused
from loader_service.plan.cuts import Cut, Even, Fused, Heads, Replicated, Vocab, cut_tensor
from loader_service.plan.planner import PlanOptions, UnknownTensorPolicy, plan_load
from loader_service.plan.slices import StridedRun
from tests.checkpoints import RawTensor, payload_bytes, random_tensor, write_file
from tests.oracle import apply_runs

ROWS, COLUMNS = Even("column", 0), Even("row", 1)


def info(dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo("t.weight", dtype, shape, "f", 100, payload_bytes(dtype, shape))


def cut_bytes(tensor: RawTensor, cut: Cut, tp: int) -> list[bytes]:
    pieces = cut_tensor(info(tensor.dtype, tensor.shape), cut, tp)
    return [apply_runs(tensor.data, piece.runs, piece.nbytes) for piece in pieces]


# ---------------------------------------------------------------- A14

S = RawTensor("s", "F8_E8M0", (2, 4), bytes(range(126, 134)))
Q = RawTensor("q", "F4", (2, 8), bytes(range(8)))
H = RawTensor("h", "F4", (4, 3), bytes(range(10, 16)))
R = RawTensor("r", "F6_E2M3", (4,), bytes([0xAB, 0xCD, 0xEF]))


def test_a14_packed_tensors_reach_every_rank_whole(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", [S, Q, H, R])
    checkpoint = read_checkpoint(str(path), str(tmp_path))
    plan = plan_load(checkpoint, 2, PlanOptions(unknown_tensors=UnknownTensorPolicy.REPLICATE))
    content = path.read_bytes()
    for rank in range(2):
        found = {}
        for tensor in plan.tensors:
            source, piece = tensor.source, tensor.slices[rank]
            payload = content[source.offset : source.offset + source.nbytes]
            data = apply_runs(payload, piece.runs, piece.nbytes)
            found[source.name] = RawTensor(source.name, piece.dtype, piece.shape, data)
        assert found == {"s": S, "q": Q, "h": H, "r": R}


def test_a14_rows_of_whole_bytes_are_cut() -> None:
    assert cut_bytes(Q, ROWS, 2) == [bytes(range(4)), bytes(range(4, 8))]
    assert [piece.shape for piece in cut_tensor(info("F4", (2, 8)), ROWS, 2)] == [(1, 8)] * 2


def test_a14_two_rows_of_one_and_a_half_bytes_are_cut_together() -> None:
    assert cut_bytes(H, ROWS, 2) == [H.data[:3], H.data[3:]]


def test_a14_a_row_of_twelve_bits_is_not_cut_off() -> None:
    with pytest.raises(PlanRefused, match="12 bits") as caught:
        cut_tensor(info("F4", (4, 3)), ROWS, 4)
    assert caught.value.reason == "SUB_BYTE_CUT"
    assert caught.value.metadata == {"tensor": "t.weight", "dtype": "F4"}


def test_a14_columns_are_cut_on_byte_boundaries_only() -> None:
    assert cut_bytes(Q, COLUMNS, 4) == [bytes([i, i + 4]) for i in range(4)]
    for shape, tp in (((2, 8), 8), ((3, 2), 2)):
        with pytest.raises(PlanRefused, match="inside a byte"):
            cut_tensor(info("F4", shape), COLUMNS, tp)


def test_a14_padding_rows_of_a_packed_vocabulary_fill_whole_bytes() -> None:
    pieces = cut_tensor(info("F4", (5, 2)), Vocab(), 4)
    assert [(piece.nbytes, piece.wire_bytes, piece.padding_rows) for piece in pieces] == [
        (2, 2, 0),
        (2, 2, 0),
        (2, 1, 1),
        (2, 0, 2),
    ]


# ---------------------------------------------------------------- fused matrices


def fused_qkv(query_heads: int, kv_heads: int, head_size: int, dim: int = 0) -> Fused:
    query = Heads("column", dim, query_heads, head_size, replicable=False)
    key_value = Heads("column", dim, kv_heads, head_size, replicable=True)
    width = kv_heads * head_size
    parts = ((query_heads * head_size, query), (width, key_value), (width, key_value))
    return Fused("fused", dim, parts)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_fused_qkv_is_cut_by_part_and_joined_again(tp: int, dim: int) -> None:
    """Four query heads and two key/value heads of 3: at tp = 4 two ranks share one of the latter."""
    shape = (24, 5) if dim == 0 else (5, 24)
    tensor = random_tensor("qkv", "F32", shape)
    matrix = np.frombuffer(tensor.data, "<u4").reshape(shape)
    q, k, v = np.split(matrix, [12, 18], axis=dim)
    expected = []
    for rank in range(tp):
        own = np.split(q, tp, axis=dim)[rank]
        heads = [np.split(part, min(tp, 2), axis=dim)[rank * min(tp, 2) // tp] for part in (k, v)]
        expected.append(np.concatenate([own, *heads], axis=dim).tobytes())
    assert cut_bytes(tensor, fused_qkv(4, 2, 3, dim), tp) == expected


def test_fused_gate_and_up_are_cut_by_part() -> None:
    fused = Fused("fused", 0, ((4, ROWS), (4, ROWS)))
    tensor = RawTensor("gate_up", "U8", (8, 1), bytes(range(8)))
    assert cut_bytes(tensor, fused, 2) == [bytes([0, 1, 4, 5]), bytes([2, 3, 6, 7])]


@pytest.mark.parametrize(
    ("cut", "shape", "tp", "reason", "words"),
    [
        (fused_qkv(4, 2, 3), (23, 1), 2, "SHAPE_MISMATCH", r"not 12 \+ 6 \+ 6"),
        (fused_qkv(4, 2, 3), (24, 1), 8, "TP_NOT_DIVISIBLE", "4 heads .* 8 ranks"),
        (fused_qkv(6, 4, 2), (28, 1), 6, "TP_NOT_DIVISIBLE", "4 heads .* 6 ranks"),
        (Fused("fused", 0, ((4, ROWS), (3, ROWS))), (7, 1), 2, "TP_NOT_DIVISIBLE", "of 3"),
    ],
)
def test_fused_cut_is_refused_where_a_part_is(
    cut: Fused, shape: tuple[int, ...], tp: int, reason: str, words: str
) -> None:
    with pytest.raises(PlanRefused, match=words) as caught:
        cut_tensor(info("BF16", shape), cut, tp)
    assert caught.value.reason == reason


def test_part_that_would_need_zero_rows_inside_the_slice_is_refused() -> None:
    """Zero rows follow a slice's bytes, so only sizes that need none can be cut."""
    cut = Fused("fused", 0, ((6, Vocab()), (12, ROWS)))
    with pytest.raises(PlanRefused, match="zero rows in the middle for 4 ranks") as caught:
        cut_tensor(info("U8", (18, 1)), cut, 4)
    assert caught.value.reason == "TP_NOT_DIVISIBLE"
    assert [piece.shape for piece in cut_tensor(info("U8", (18, 1)), cut, 3)] == [(6, 1)] * 3


# ---------------------------------------------------------------- bytes that ranks share


@pytest.mark.parametrize(
    ("cut", "shape", "tp", "shared"),
    [
        (ROWS, (8, 3), 4, [0] * 4),
        (Replicated(), (8, 3), 1, [0]),
        (Replicated(), (8, 3), 2, [24, 24]),
        (Replicated(), (), 2, [1, 1]),
        (Heads("kv", 0, 2, 2, replicable=True), (4, 3), 4, [6] * 4),
        (fused_qkv(4, 2, 3), (24, 5), 2, [0] * 2),
        (fused_qkv(4, 2, 3), (24, 5), 4, [2 * 3 * 5] * 4),
        (fused_qkv(4, 2, 3, dim=1), (5, 24), 4, [2 * 3 * 5] * 4),
        (fused_qkv(4, 1, 3), (18, 5), 4, [2 * 3 * 5] * 4),
        (Vocab(), (2, 3), 4, [0] * 4),
        (Vocab(), (1, 3), 3, [0] * 3),
    ],
    ids=str,
)
def test_replicated_bytes_are_those_that_another_rank_gets_too(
    cut: Cut, shape: tuple[int, ...], tp: int, shared: list[int]
) -> None:
    """U8. Of a fused tensor only the shared parts count, of a vocabulary no zero rows."""
    pieces = cut_tensor(info("U8", shape), cut, tp)
    assert [piece.replicated_bytes for piece in pieces] == shared


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize(
    ("cut", "shape", "rank", "run"),
    [
        (Replicated(), (6, 4), 1, StridedRun(0, 48, 0, 48, 48, 1)),
        (ROWS, (6, 4), 1, StridedRun(24, 24, 0, 24, 24, 1)),
        (COLUMNS, (6, 4), 1, StridedRun(4, 8, 0, 4, 4, 6)),
        (COLUMNS, (1, 4), 1, StridedRun(4, 4, 0, 4, 4, 1)),
        (Even("last", 2), (2, 3, 4), 1, StridedRun(4, 8, 0, 4, 4, 6)),
        (Even("middle", 1), (2, 4, 3), 1, StridedRun(12, 24, 0, 12, 12, 2)),
        (Vocab(), (3, 4), 1, StridedRun(16, 8, 0, 8, 8, 1)),
    ],
)
def test_a_cut_is_one_run_whatever_its_dim(
    cut: Cut, shape: tuple[int, ...], rank: int, run: StridedRun
) -> None:
    """BF16 for two ranks. A device copies one run with one 2-D copy."""
    (found,) = cut_tensor(info("BF16", shape), cut, 2)[rank].runs
    assert found == run
    assert found.nbytes == run.length * run.count


@pytest.mark.parametrize("cut", [COLUMNS, Fused("fused", 1, ((1, COLUMNS), (3, COLUMNS)))])
def test_what_a_single_rank_keeps_is_one_piece(cut: Cut) -> None:
    (run,) = cut_tensor(info("BF16", (6, 4)), cut, 1)[0].runs
    assert (run.count, run.length) == (1, 48)


def test_a14_packed_tensor_of_a_single_rank_may_have_any_width() -> None:
    """Rows of 12 bits are no obstacle where nothing is cut."""
    assert cut_bytes(H, COLUMNS, 1) == [H.data]


def runs_of(tensor: TensorInfo, cut: Cut, tp: int) -> list[list[tuple[int, int]]]:
    """(offset, length) of the source pieces of every rank."""
    pieces = cut_tensor(tensor, cut, tp)
    return [[(run.source_offset, run.length) for run in piece.runs] for piece in pieces]


def test_parts_that_touch_are_one_run() -> None:
    fused = Fused("fused", 0, ((4, ROWS), (4, Replicated()), (4, Replicated())))
    assert runs_of(info("U8", (12, 1)), fused, 2) == [[(0, 2), (4, 8)], [(2, 2), (4, 8)]]


def test_parts_that_touch_stay_apart_where_another_rank_keeps_only_one() -> None:
    """The reader knows what ranks share by equal pieces: rows 4 to 7 are to be read once."""
    fused = Fused("fused", 0, ((4, ROWS), (4, Replicated()), (4, ROWS)))
    assert runs_of(info("U8", (12, 1)), fused, 2) == [
        [(0, 2), (4, 4), (8, 2)],
        [(2, 2), (4, 4), (10, 2)],
    ]


@pytest.mark.parametrize(
    ("kv_heads", "tp"), [(1, 2), (1, 3), (1, 6), (2, 2), (2, 6), (3, 3), (3, 6), (6, 2), (6, 6)]
)
def test_runs_of_two_ranks_are_the_same_or_apart(kv_heads: int, tp: int) -> None:
    """Where there is one key/value head, query, key and value of the last rank touch."""
    cut = fused_qkv(6, kv_heads, 2)
    runs = runs_of(info("U8", (12 + 4 * kv_heads, 1)), cut, tp)
    distinct = sorted({run for own in runs for run in own})
    assert sum(length for _, length in distinct) == 12 + 4 * kv_heads
    assert all(a + length <= b for (a, length), (b, _) in itertools.pairwise(distinct))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
@pytest.mark.parametrize("cut", [ROWS, COLUMNS, Vocab(), Replicated()])
def test_zero_sized_tensor_has_no_runs(cut: Cut, shape: tuple[int, ...]) -> None:
    for piece in cut_tensor(info("F32", shape), cut, 2):
        assert piece.runs == ()
        assert piece.nbytes == piece.wire_bytes == 0
