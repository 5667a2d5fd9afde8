"""Chunks: every slice of every rank is covered exactly once, in blocks, within the bounds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader_kernels.digest import BLOCK_BYTES
from loader_service.errors import InvalidRequest
from loader_service.plan.cuts import Even, Vocab
from loader_service.plan.slices import LoadPlan
from loader_service.stream.chunks import (
    BUNDLE_BYTES,
    BUNDLE_EXTENTS,
    CREDITS,
    MAX_CHUNK_BYTES,
    SLOTS_PER_RANK,
    Chunk,
    Extent,
    Step,
    chunk_bytes_for,
    largest_bundle_bytes,
    plan_steps,
    rank_chunks,
    staging_bytes,
)
from tests.checkpoints import random_tensor
from tests.plans import MAX_TP, Part, plan_of_many, random_parts, sized, write_plan

MIB = 1 << 20


def check_tiling(plan: LoadPlan, steps: list[Step], chunk_bytes: int) -> None:
    """Walk the chunks of every rank as a worker does; every slice must fill up front to back."""
    for rank in range(plan.tp):
        filled: dict[int, int] = {}
        for chunk in rank_chunks(steps, rank):
            assert chunk.extents
            assert chunk.nbytes <= chunk_bytes
            for extent in chunk.extents:
                assert extent.offset == filled.get(extent.slice_index, 0)
                assert extent.offset % BLOCK_BYTES == 0
                assert extent.length > 0 or extent.slice_index not in filled
                filled[extent.slice_index] = extent.offset + extent.length
        wanted = {index: piece.wire_bytes for index, piece in enumerate(plan.rank_slices(rank))}
        assert filled == wanted


def check_steps(plan: LoadPlan, steps: list[Step]) -> None:
    """All chunks of a step come from the same tensors, so that a shared byte is read once."""
    order = []
    for step in steps:
        assert len(step.chunks) == plan.tp
        tensors = {
            tuple(extent.slice_index for extent in chunk.extents) for chunk in step.chunks if chunk
        }
        assert len(tensors) == 1
        order += [index for index in next(iter(tensors)) if index not in order]
    assert set(order) == set(range(len(plan.tensors)))


@settings(max_examples=80, deadline=None)
@given(data=st.data(), tp=st.integers(1, MAX_TP), blocks=st.integers(1, 3))
def test_steps_tile_every_slice_of_every_rank(
    data: st.DataObject, tp: int, blocks: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    parts = data.draw(random_parts(tp, max_rows=4000))
    plan = write_plan(tmp_path_factory.mktemp("plan"), parts, tp)
    steps = plan_steps(plan, blocks * BLOCK_BYTES)
    check_tiling(plan, steps, blocks * BLOCK_BYTES)
    check_steps(plan, steps)


@pytest.mark.parametrize("nbytes", [MIB, MIB + 1, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 5 * MIB + 3])
def test_a_tensor_around_the_chunk_size_is_tiled(nbytes: int, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, [sized("t", nbytes)], 1)
    steps = plan_steps(plan, 2 * MIB)
    check_tiling(plan, steps, 2 * MIB)
    assert len(steps) == math.ceil(nbytes / (2 * MIB))


def test_small_tensors_travel_together_and_a_large_one_alone(tmp_path: Path) -> None:
    parts = [sized("a", 10), sized("large", 3 * MIB), sized("b", MIB), sized("c", 1)]
    chunks = rank_chunks(plan_steps(write_plan(tmp_path, parts, 1), 4 * MIB), 0)
    assert sorted(tuple(extent.slice_index for extent in chunk.extents) for chunk in chunks) == [
        (0, 2, 3),
        (1,),
    ]


def test_bundles_stay_below_their_size(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, [sized(f"t{number:02}", MIB - 7) for number in range(20)], 1)
    chunks = rank_chunks(plan_steps(plan, 16 * MIB), 0)
    assert max(chunk.nbytes for chunk in chunks) <= BUNDLE_BYTES
    assert len(chunks) == math.ceil(20 / (BUNDLE_BYTES // (MIB - 7)))
    check_tiling(plan, plan_steps(plan, 16 * MIB), 16 * MIB)


def test_bundles_stay_below_their_number_of_slices() -> None:
    chunks = rank_chunks(plan_steps(plan_of_many(BUNDLE_EXTENTS * 2 + 1), MIB), 0)
    assert [len(chunk.extents) for chunk in chunks] == [BUNDLE_EXTENTS, BUNDLE_EXTENTS, 1]


def test_a_bundle_is_bounded_for_every_rank_by_the_largest_slice(tmp_path: Path) -> None:
    # Vocabulary cuts give the last ranks less, so ranks fill up at different speeds.
    parts = [Part(random_tensor(f"t{n:02}", "U8", (5, 1000)), Vocab()) for n in range(40)]
    plan = write_plan(tmp_path, parts, 4)
    steps = plan_steps(plan, BLOCK_BYTES)
    check_tiling(plan, steps, BLOCK_BYTES)
    check_steps(plan, steps)


def test_a_tensor_without_bytes_gets_an_extent_and_no_payload_a12(tmp_path: Path) -> None:
    parts = [sized("e", 0), Part(random_tensor("z", "F32", (2, 0))), sized("w", 16)]
    chunks = rank_chunks(plan_steps(write_plan(tmp_path, parts, 1), MIB), 0)
    assert chunks == [Chunk((Extent(0, 0, 0), Extent(1, 0, 0), Extent(2, 0, 16)))]


def test_a_checkpoint_without_any_byte_has_a_chunk_of_no_payload_a12(tmp_path: Path) -> None:
    (chunk,) = rank_chunks(plan_steps(write_plan(tmp_path, [sized("e", 0)], 1), MIB), 0)
    assert (chunk.nbytes, chunk.extents) == (0, (Extent(0, 0, 0),))


@pytest.mark.parametrize("columns", [3, 3 * MIB])
def test_a_rank_that_is_all_padding_gets_one_empty_extent(columns: int, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, [Part(random_tensor("v", "U8", (2, columns)), Vocab())], 4)
    steps = plan_steps(plan, 2 * MIB)
    for rank in (2, 3):
        assert rank_chunks(steps, rank) == [Chunk((Extent(0, 0, 0),))]
    check_tiling(plan, steps, 2 * MIB)


def test_ranks_of_different_sizes_end_at_different_steps(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, [Part(random_tensor("v", "U8", (3, 2 * MIB)), Vocab())], 2)
    steps = plan_steps(plan, MIB)
    assert [len(rank_chunks(steps, rank)) for rank in range(2)] == [4, 2]
    assert [step.chunks[1] is None for step in steps] == [False, False, True, True]


# ---------------------------------------------------------------- bounds


@settings(max_examples=200, deadline=None)
@given(window=st.integers(0, 1 << 33), tp=st.integers(1, 64))
def test_the_window_holds_all_slots_of_all_ranks(window: int, tp: int) -> None:
    if window < BLOCK_BYTES * SLOTS_PER_RANK * tp:
        with pytest.raises(InvalidRequest, match="too small"):
            chunk_bytes_for(window, tp)
        return
    chunk_bytes = chunk_bytes_for(window, tp)
    assert 0 < chunk_bytes <= MAX_CHUNK_BYTES
    assert chunk_bytes % BLOCK_BYTES == 0
    assert chunk_bytes * SLOTS_PER_RANK * tp <= window
    more = chunk_bytes + BLOCK_BYTES
    assert more > MAX_CHUNK_BYTES or more * SLOTS_PER_RANK * tp > window


def test_staging_is_room_for_the_bundles_on_the_way(tmp_path: Path) -> None:
    parts = [sized("a", 10), sized("b", 20), sized("large", 3 * MIB)]
    chunks = rank_chunks(plan_steps(write_plan(tmp_path, parts, 1), MIB), 0)
    assert largest_bundle_bytes(chunks) == 30
    assert staging_bytes(chunks) == 30 * min(CREDITS, len(chunks))


def test_chunks_of_one_slice_need_no_staging(tmp_path: Path) -> None:
    part = Part(random_tensor("t", "U8", (4, MIB)), Even("row", 1))
    chunks = rank_chunks(plan_steps(write_plan(tmp_path, [part], 2), MIB), 1)
    assert (len(chunks), staging_bytes(chunks), staging_bytes([])) == (2, 0, 0)
