"""Slice digest v1: a hash of a slice that many threads can compute at once.

XXH3-64 (seed 0) of each 16 KiB block of the slice's bytes in C order, the last block may be short;
then XXH3-128 over the block hashes (little-endian u64 each), the byte count (u64 LE), the safetensors
dtype name and the shape (u64 LE each). It depends neither on chunks nor on the transport. XXH3 is
specified at https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import xxhash

__all__ = [
    "ALGORITHM",
    "BLOCK_BYTES",
    "DIGEST_BYTES",
    "HASH_BYTES",
    "block_count",
    "combine",
    "extend_with_zeros",
    "hash_blocks",
]

ALGORITHM = "loader-slice-v1"
"""Name that travels in the manifest."""

BLOCK_BYTES = 16 << 10
"""Bytes of one block; chunk boundaries inside a slice are multiples of it."""

DIGEST_BYTES = 16
HASH_BYTES = 8
"""Bytes of one block's hash."""


def block_count(nbytes: int) -> int:
    """Return how many blocks a slice of `nbytes` bytes has."""
    return -(-nbytes // BLOCK_BYTES)


def hash_blocks(view: memoryview) -> bytes:
    """Return the block hashes of contiguous bytes, little-endian u64 each.

    Args:
        view: bytes of shape (n,), starting at a block boundary of the slice.
    """
    digest = xxhash.xxh3_64_intdigest
    hashes = [
        digest(view[start : start + BLOCK_BYTES]) for start in range(0, len(view), BLOCK_BYTES)
    ]
    return np.array(hashes, dtype="<u8").tobytes()


def extend_with_zeros(hashes: bytes, view: memoryview, zero_bytes: int) -> bytes:
    """Return the block hashes of `view` followed by `zero_bytes` zeros that nobody stored.

    Args:
        hashes: what `hash_blocks(view)` gave.
        view: the bytes in front of the zeros, starting at a block boundary.
        zero_bytes: number of zeros.
    """
    if not zero_bytes:
        return hashes
    whole = len(view) // BLOCK_BYTES
    begun = bytes(view[whole * BLOCK_BYTES :])
    mixed = begun + bytes(min(zero_bytes, BLOCK_BYTES - len(begun))) if begun else b""
    full, rest = divmod(zero_bytes - (len(mixed) - len(begun)), BLOCK_BYTES)
    tail = hash_blocks(memoryview(mixed))
    tail += hash_blocks(memoryview(bytes(BLOCK_BYTES))) * full
    return hashes[: whole * HASH_BYTES] + tail + hash_blocks(memoryview(bytes(rest)))


def combine(hashes: bytes, nbytes: int, dtype: str, shape: Sequence[int]) -> bytes:
    """Return the digest of a slice from its block hashes, canonical big-endian XXH3-128.

    Args:
        hashes: what `hash_blocks` gave for the blocks, in order.
        nbytes: bytes of the slice, zero rows included.
        dtype: safetensors dtype name.
        shape: local shape.
    """
    if len(hashes) != block_count(nbytes) * HASH_BYTES:
        raise ValueError(f"{len(hashes)} bytes of hashes do not fit {nbytes} bytes")
    tail = struct.pack(f"<Q{len(dtype)}s{len(shape)}Q", nbytes, dtype.encode(), *shape)
    return xxhash.xxh3_128_digest(hashes + tail)
