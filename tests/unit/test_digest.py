"""Slice digest v1 against its definition, written down here once more with xxhash alone."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from loader_kernels import digest

BLOCK = 16 * 1024
GOLDEN = "de6e68a0f26d610f4e866b7cb7e4f2bf"
SIZES = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 77)


def defined_digest(data: bytes, dtype: str, shape: Sequence[int]) -> bytes:
    """XXH3-64 of every block, then XXH3-128 of the hashes, byte count, dtype and shape."""
    outer = xxhash.xxh3_128(seed=0)
    for start in range(0, len(data), BLOCK):
        hashed = xxhash.xxh3_64_intdigest(data[start : start + BLOCK], seed=0)
        outer.update(hashed.to_bytes(8, "little"))
    outer.update(len(data).to_bytes(8, "little"))
    outer.update(dtype.encode("ascii"))
    for size in shape:
        outer.update(size.to_bytes(8, "little"))
    return outer.digest()


def our_digest(data: bytes, dtype: str, shape: Sequence[int]) -> bytes:
    return digest.combine(digest.hash_blocks(memoryview(data)), len(data), dtype, shape)


def pattern(nbytes: int) -> bytes:
    return bytes(i * 31 % 251 for i in range(nbytes))


@pytest.mark.parametrize("nbytes", SIZES)
def test_digest_is_what_its_definition_says(nbytes: int) -> None:
    data = pattern(nbytes)
    assert our_digest(data, "U8", (nbytes,)) == defined_digest(data, "U8", (nbytes,))


def test_digest_of_a_known_slice_never_changes() -> None:
    # Both ends of a transfer may run different releases; the name in the manifest stands for this.
    assert digest.ALGORITHM == "loader-slice-v1"
    assert our_digest(pattern(2 * BLOCK + 5), "BF16", (3, 7)).hex() == GOLDEN


@pytest.mark.parametrize(
    ("dtype", "shape"), [("F16", (4, 2)), ("BF16", (2, 4)), ("BF16", (8,)), ("BF16", (4, 2, 1))]
)
def test_digest_covers_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    data = pattern(16)
    assert our_digest(data, dtype, shape) != our_digest(data, "BF16", (4, 2))


@pytest.mark.parametrize("position", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 4])
def test_digest_changes_with_any_byte(position: int) -> None:
    data = bytearray(pattern(2 * BLOCK + 5))
    before = our_digest(bytes(data), "U8", (len(data),))
    data[position] ^= 1
    assert our_digest(bytes(data), "U8", (len(data),)) != before


def test_swapped_blocks_change_the_digest() -> None:
    first, second = pattern(BLOCK), bytes(BLOCK)
    shape = (2 * BLOCK,)
    assert our_digest(first + second, "U8", shape) != our_digest(second + first, "U8", shape)


@pytest.mark.parametrize("nbytes", SIZES)
def test_block_count_is_the_number_of_hashes(nbytes: int) -> None:
    hashes = digest.hash_blocks(memoryview(bytes(nbytes)))
    assert len(hashes) == digest.block_count(nbytes) * digest.HASH_BYTES


@settings(max_examples=30, deadline=None)
@given(blocks=st.lists(st.integers(1, 3), min_size=1, max_size=4), tail=st.integers(0, BLOCK - 1))
def test_hashes_do_not_depend_on_the_chunks(blocks: list[int], tail: int) -> None:
    data = pattern(sum(blocks) * BLOCK + tail)
    edges = [0, *(edge * BLOCK for edge in itertools.accumulate(blocks))]
    edges[-1] += tail
    parts = [
        digest.hash_blocks(memoryview(data)[start:stop])
        for start, stop in itertools.pairwise(edges)
    ]
    assert b"".join(parts) == digest.hash_blocks(memoryview(data))


@settings(max_examples=60, deadline=None)
@given(
    nbytes=st.one_of(st.integers(0, 40), st.integers(BLOCK - 3, BLOCK + 3)),
    zero_bytes=st.one_of(st.integers(0, 40), st.integers(2 * BLOCK - 3, 3 * BLOCK + 3)),
)
def test_zeros_that_nobody_stored_hash_like_stored_ones(nbytes: int, zero_bytes: int) -> None:
    data = pattern(nbytes)
    extended = digest.extend_with_zeros(
        digest.hash_blocks(memoryview(data)), memoryview(data), zero_bytes
    )
    assert extended == digest.hash_blocks(memoryview(data + bytes(zero_bytes)))


def test_zeros_after_the_last_part_of_a_longer_slice_hash_like_stored_ones() -> None:
    first, last = pattern(2 * BLOCK), pattern(BLOCK + 9)
    hashes = digest.extend_with_zeros(digest.hash_blocks(memoryview(last)), memoryview(last), BLOCK)
    whole = digest.hash_blocks(memoryview(first + last + bytes(BLOCK)))
    assert digest.hash_blocks(memoryview(first)) + hashes == whole


@pytest.mark.parametrize("count", [0, 1, 3])
def test_hashes_that_do_not_fit_the_bytes_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        digest.combine(struct.pack(f"<{count}Q", *range(count)), BLOCK + 1, "U8", (BLOCK + 1,))
