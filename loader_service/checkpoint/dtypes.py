"""The closed set of safetensors dtypes and their sizes.

Source: the `Dtype` enumeration of the safetensors format, release 0.8.0. Both ends of a transfer
use this one table, so that a name means the same number of bits everywhere.
"""

from __future__ import annotations

from loader_service.errors import InvalidCheckpoint

__all__ = ["DTYPE_BITS", "bits_of"]

DTYPE_BITS: dict[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits of one element. Sub-byte elements are packed without padding between them."""


def bits_of(dtype: str, tensor: str) -> int:
    """Return the bits of one element of `dtype`.

    Raises:
        InvalidCheckpoint: UNKNOWN_DTYPE, naming `tensor` and `dtype`.
    """
    try:
        return DTYPE_BITS[dtype]
    except KeyError:
        raise InvalidCheckpoint(
            f"tensor {tensor!r} has unknown dtype {dtype!r}",
            reason="UNKNOWN_DTYPE",
            tensor=tensor,
            dtype=dtype,
        ) from None
