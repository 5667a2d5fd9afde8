"""Parsing one safetensors header: bytes in, tensors out, no file access.

Format: https://huggingface.co/docs/safetensors, "Format": an 8-byte little-endian header length, a
JSON object, then the payload. Every entry is `{"dtype", "shape", "data_offsets": [begin, end]}` with
offsets counted from the start of the payload. Payload ranges must cover the payload without gaps or
overlaps. Fields that the format does not name are ignored, as the safetensors library does.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from loader_service.background import until_cancelled
from loader_service.checkpoint.dtypes import bits_of
from loader_service.errors import DataLoss, InvalidCheckpoint

__all__ = ["LENGTH_BYTES", "HeaderTensor", "check_coverage", "loads_strict", "parse_header"]

LENGTH_BYTES = 8
"""Bytes of the length field in front of the header."""

METADATA_KEY = "__metadata__"
_MAX_SIGNED = 2**63 - 1


@dataclasses.dataclass(frozen=True, slots=True)
class HeaderTensor:
    """One entry of a header.

    Attributes:
        name: tensor name.
        dtype: safetensors dtype name.
        shape: elements of each dim.
        begin: first payload byte, counted from the start of the payload.
        end: byte after the last one, counted the same way.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _DuplicateKey(ValueError):
    pass


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _DuplicateKey(f"key {twice!r} stands there twice")
    return result


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def loads_strict(
    text: bytes, what: str, *, reason: str, allow_infinity: bool = False
) -> dict[str, Any]:
    """Parse `text` as one JSON object without duplicate keys and without lone surrogates.

    Args:
        text: the file's bytes.
        what: name of the file for the error text.
        reason: reason of the error.
        allow_infinity: whether `NaN` and `Infinity` may stand for numbers, as they do in the
            configs of some models.

    Raises:
        InvalidCheckpoint: for anything that is not such an object.
    """
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_object_without_duplicates,
            parse_constant=float if allow_infinity else _refuse_constant,
        )
        if b"\\u" in text:
            # JSON can spell lone surrogates, but no message could carry them.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidCheckpoint(
            f"{what} is not valid JSON: {error}", reason=reason, file=what
        ) from error
    if not isinstance(value, dict):
        raise InvalidCheckpoint(
            f"{what} holds a JSON {type(value).__name__} where an object is wanted",
            reason=reason,
            file=what,
        )
    return value


def parse_header(text: bytes, file: str) -> list[HeaderTensor]:
    """Parse the JSON part of a header and check every entry by itself.

    Args:
        text: the JSON bytes, without the length field.
        file: file name for error texts.

    Returns:
        The tensors ordered by their bytes; ties (zero-sized tensors) by name.

    Raises:
        InvalidCheckpoint: INVALID_HEADER or UNKNOWN_DTYPE, naming file and tensor.
    """
    entries = loads_strict(text, f"header of {file}", reason="INVALID_HEADER")
    _check_metadata(entries.pop(METADATA_KEY, None), file)
    tensors = [_parse_entry(name, entry, file) for name, entry in until_cancelled(entries.items())]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end, tensor.name))
    return tensors


def check_coverage(
    tensors: list[HeaderTensor], payload_bytes: int, file: str, *, allow_trailing_bytes: bool
) -> str | None:
    """Check that the tensors cover the payload without gap, overlap or rest.

    Args:
        tensors: entries ordered by their bytes.
        payload_bytes: bytes of the file after its header.
        file: file name for error texts.
        allow_trailing_bytes: whether bytes after the last tensor are only a warning.

    Returns:
        A warning about trailing bytes, or None.

    Raises:
        InvalidCheckpoint: UNCOVERED_BYTES, OVERLAPPING_TENSORS or TRAILING_BYTES.
        DataLoss: FILE_TRUNCATED when the file ends before its last tensor does.
    """
    covered = 0
    for tensor in tensors:
        if tensor.begin > covered:
            raise InvalidCheckpoint(
                f"{file}: no tensor owns payload bytes [{covered},{tensor.begin}]",
                reason="UNCOVERED_BYTES",
                file=file,
                begin=covered,
                end=tensor.begin,
            )
        if tensor.begin < covered:
            raise InvalidCheckpoint(
                f"{file}: tensor {tensor.name!r} starts at payload byte {tensor.begin}, inside the "
                f"tensor before it, which ends at {covered}",
                reason="OVERLAPPING_TENSORS",
                file=file,
                tensor=tensor.name,
            )
        covered = tensor.end
    if covered > payload_bytes:
        raise DataLoss(
            f"{file} is truncated: its header describes {covered} payload bytes, the file holds "
            f"{payload_bytes}, {covered - payload_bytes} bytes are missing",
            reason="FILE_TRUNCATED",
            file=file,
            wanted_bytes=covered,
            found_bytes=payload_bytes,
        )
    trailing = payload_bytes - covered
    if not trailing:
        return None
    if allow_trailing_bytes:
        return f"{file}: ignored {trailing} bytes after the last tensor"
    raise InvalidCheckpoint(
        f"{file}: no tensor owns the last {trailing} bytes of the file, payload bytes "
        f"[{covered},{payload_bytes}]",
        reason="TRAILING_BYTES",
        file=file,
        begin=covered,
        end=payload_bytes,
        length=trailing,
    )


def _check_metadata(metadata: object, file: str) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise InvalidCheckpoint(
            f"{file}: {METADATA_KEY} must map strings to strings",
            reason="INVALID_HEADER",
            file=file,
        )


def _parse_entry(name: str, entry: object, file: str) -> HeaderTensor:
    def refuse(what: str) -> InvalidCheckpoint:
        return InvalidCheckpoint(
            f"{file}: tensor {name!r}: {what}", reason="INVALID_HEADER", file=file, tensor=name
        )

    if not isinstance(entry, dict):
        raise refuse("entry is not an object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str):
        raise refuse("dtype is missing or not a string")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise refuse("shape is missing or not a list of non-negative integers")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(offset) is int for offset in offsets)
    ):
        raise refuse("data_offsets is missing or not a list of two integers")
    begin, end = offsets
    if not 0 <= begin <= end <= _MAX_SIGNED:
        raise refuse(f"data_offsets [{begin},{end}] are negative, reversed or too large")
    width = bits_of(dtype, name)
    # A zero must not hide dims whose product no 64-bit reader could hold.
    if width * math.prod(size for size in shape if size) > _MAX_SIGNED:
        raise refuse(f"shape {shape} has more elements than 64 bits can count")
    bits = width * math.prod(shape)
    if bits != (end - begin) * 8:
        raise refuse(
            f"shape {shape} of dtype {dtype} needs {bits} bits, data_offsets [{begin},{end}] hold "
            f"{(end - begin) * 8}"
        )
    return HeaderTensor(name, dtype, tuple(shape), begin, end)
