"""Reading one safetensors file: what a header may say, and how everything else is refused."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import ml_dtypes
import numpy as np
import pytest
import safetensors

from loader_service.checkpoint.catalog import Checkpoint
from loader_service.checkpoint.dtypes import DTYPE_BITS
from loader_service.checkpoint.files import DEFAULT_MAX_HEADER_BYTES, read_checkpoint
from loader_service.errors import DataLoss, InvalidCheckpoint, LfsPointer, LimitExceeded
from loader_service.plan.planner import PlanOptions, UnknownTensorPolicy, plan_load
from tests.checkpoints import (
    BITS,
    RawTensor,
    entry,
    lfs_pointer,
    payload_bytes,
    raw_file,
    safetensors_file,
    tensor_of_array,
    tensors_of_every_dtype,
    write_file,
)

NAME = "model.safetensors"


def read(folder: Path, content: bytes | None = None, **options: int) -> Checkpoint:
    """Read a folder, with `content` as its only file where it is given."""
    if content is not None:
        (folder / NAME).write_bytes(content)
    return read_checkpoint(str(folder), str(folder), **options)  # type: ignore[arg-type]


def refuse(folder: Path, content: bytes, **options: int) -> InvalidCheckpoint:
    """Read a file that must be refused as malformed, not with some error of the parser."""
    with pytest.raises(InvalidCheckpoint) as caught:
        read(folder, content, **options)
    assert caught.value.status is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.metadata["file"].endswith(NAME)
    return caught.value


# ---------------------------------------------------------------- what a good file says


def test_every_dtype_is_catalogued_with_its_exact_place(tmp_path: Path) -> None:
    """Scalars, zero-sized and unaligned tensors of all dtypes included."""
    tensors = tensors_of_every_dtype()
    path = write_file(tmp_path / NAME, tensors, {"format": "pt"})
    catalog = read(tmp_path).catalog
    content = path.read_bytes()
    found = [
        RawTensor(t.name, t.dtype, t.shape, content[t.offset : t.offset + t.nbytes])
        for t in catalog
    ]
    assert found == sorted(tensors, key=lambda tensor: tensor.name)
    assert catalog.payload_bytes == sum(len(tensor.data) for tensor in tensors)
    assert any(t.offset % (BITS[t.dtype] // 8) for t in catalog if BITS[t.dtype] > 8)


def test_dtypes_are_those_of_the_format() -> None:
    assert DTYPE_BITS == BITS


def test_catalog_is_looked_up_by_name_and_prefix(tmp_path: Path) -> None:
    names = ["b.2", "a.1", "b.10", "c"]
    write_file(tmp_path / NAME, [RawTensor(name, "U8", (1,), b"x") for name in names])
    catalog = read(tmp_path).catalog
    assert [tensor.name for tensor in catalog] == ["a.1", "b.10", "b.2", "c"]
    assert [tensor.name for tensor in catalog.by_prefix("b.")] == ["b.10", "b.2"]
    assert "a.1" in catalog
    assert "a" not in catalog
    assert catalog.get("a") is None
    assert len(catalog) == 4


def test_file_identity_is_recorded(tmp_path: Path) -> None:
    path = write_file(tmp_path / NAME, [RawTensor("t", "U8", (3,), b"abc")])
    status = path.stat()
    file = read(tmp_path).catalog.files[NAME]
    assert (file.path, file.size) == (str(path), status.st_size)
    assert (file.mtime_ns, file.inode) == (status.st_mtime_ns, status.st_ino)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {**entry("U8", [1], 0, 1), "note": [1, {}]}},
        {"__metadata__": {"format": "pt"}, "a": entry("U8", [1], 0, 1)},
        {"__metadata__": None, "a": entry("U8", [1], 0, 1)},
        b' \n{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}  \t',
        {"\N{GRINNING FACE} \n": entry("U8", [1], 0, 1)},
    ],
    ids=["unknown-field", "metadata", "null-metadata", "whitespace", "escaped-name"],
)
def test_legal_header_is_accepted(tmp_path: Path, header: object) -> None:
    content = raw_file(header, b"x")
    assert len(safetensors.deserialize(content)) == 1
    assert len(read(tmp_path, content).catalog) == 1


# ---------------------------------------------------------------- A01 A02 A03 A04


def test_a01_lfs_pointer_is_recognised_before_parsing(tmp_path: Path) -> None:
    stub = lfs_pointer(4096)
    assert len(stub) == 129
    assert int.from_bytes(stub[:8], "little") == 2336927755350992246
    with pytest.raises(LfsPointer, match=r"model\.safetensors.* 4096 bytes") as caught:
        read(tmp_path, stub)
    assert caught.value.reason == "LFS_POINTER"
    assert caught.value.status is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.metadata == {"file": NAME, "size": "4096"}


def test_a02_truncated_shard_is_found_before_anything_is_sent(tmp_path: Path) -> None:
    good = tensor_of_array("first", np.arange(8, dtype=np.float32))
    a = tensor_of_array("a", np.arange(64, dtype=np.float32))
    b = tensor_of_array("b", np.arange(100, 164, dtype=np.float32))
    write_file(tmp_path / "model-00001-of-00002.safetensors", [good])
    second = write_file(tmp_path / "model-00002-of-00002.safetensors", [a, b])
    assert len(read(tmp_path).catalog) == 3

    second.write_bytes(second.read_bytes()[:-100])
    with pytest.raises(DataLoss) as caught:
        read(tmp_path)
    assert caught.value.reason == "FILE_TRUNCATED"
    assert caught.value.status is grpc.StatusCode.DATA_LOSS
    assert caught.value.metadata == {
        "file": second.name,
        "wanted_bytes": "512",
        "found_bytes": "412",
    }
    for fact in (second.name, "512", "412", "100 bytes are missing"):
        assert fact in caught.value.message


@pytest.mark.parametrize(
    ("content", "reason", "words"),
    [
        (b"", "FILE_TOO_SHORT", "0 bytes"),
        (b"\1" * 7, "FILE_TOO_SHORT", "7 bytes"),
        (bytes(8), "BAD_HEADER_LENGTH", "length: 0, the file has 0 bytes"),
        ((2**63 - 1).to_bytes(8, "little") + b"{}", "BAD_HEADER_LENGTH", str(2**63 - 1)),
        ((100).to_bytes(8, "little") + b"{}", "BAD_HEADER_LENGTH", "100, the file has 2 bytes"),
        ((3).to_bytes(8, "little") + b"{}", "BAD_HEADER_LENGTH", "3, the file has 2 bytes"),
        ((2**64 - 1).to_bytes(8, "little") + b"{}", "BAD_HEADER_LENGTH", str(2**64 - 1)),
    ],
    ids=["empty", "7-bytes", "zero", "2^63-1", "past-the-end", "one-past", "2^64-1"],
)
def test_a03_header_length_is_checked_against_the_file(
    tmp_path: Path, content: bytes, reason: str, words: str
) -> None:
    refusal = refuse(tmp_path, content)
    assert refusal.reason == reason
    assert words in refusal.message


def test_a04_header_cap_is_a_setting_named_in_the_error(tmp_path: Path) -> None:
    tensors = [tensor_of_array(f"t{i:04}", np.array([i], np.float32)) for i in range(60)]
    plain = safetensors_file(tensors)
    length = int.from_bytes(plain[:8], "little")
    content = raw_file(plain[8 : 8 + length].ljust(5120), plain[8 + length :])

    refusal = refuse(tmp_path, content, max_header_bytes=4096)
    assert isinstance(refusal, LimitExceeded)
    assert refusal.reason == "LIMIT"
    for fact in ("5120", "4096", "--max-header-bytes"):
        assert fact in refusal.message

    catalog = read(tmp_path, max_header_bytes=16384).catalog
    assert [content[t.offset : t.offset + t.nbytes] for t in catalog] == [t.data for t in tensors]
    assert len(read(tmp_path, max_header_bytes=5120).catalog) == 60
    assert DEFAULT_MAX_HEADER_BYTES == 268_435_456


# ---------------------------------------------------------------- A07 A09 A10


def test_a07_gap_between_tensors_is_refused_even_leniently(tmp_path: Path) -> None:
    header = {"k": entry("F32", [2], 0, 8), "v": entry("F32", [1], 12, 16)}
    for lenient in (False, True):
        refusal = refuse(tmp_path, raw_file(header, bytes(16)), allow_trailing_bytes=lenient)
        assert refusal.reason == "UNCOVERED_BYTES"
        assert "[8,12]" in refusal.message


def test_a07_gap_before_the_first_tensor_is_refused(tmp_path: Path) -> None:
    refusal = refuse(tmp_path, raw_file({"k": entry("F32", [1], 4, 8)}, bytes(8)))
    assert refusal.reason == "UNCOVERED_BYTES"
    assert "[0,4]" in refusal.message


def test_a07_trailing_bytes_are_refused_and_leniently_warned_about(tmp_path: Path) -> None:
    tensor = tensor_of_array("t", np.arange(4, dtype=np.float32))
    content = safetensors_file([tensor]) + bytes(64)
    refusal = refuse(tmp_path, content)
    assert refusal.reason == "TRAILING_BYTES"
    assert "64" in refusal.message
    assert refusal.metadata["length"] == "64"

    checkpoint = read(tmp_path, allow_trailing_bytes=True)
    assert len(checkpoint.catalog) == 1
    assert checkpoint.warnings == (f"{NAME}: ignored 64 bytes after the last tensor",)


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    header = {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}
    refusal = refuse(tmp_path, raw_file(header, bytes(6)))
    assert refusal.reason == "OVERLAPPING_TENSORS"
    assert "'b'" in refusal.message


@pytest.mark.parametrize(
    ("shape", "end"), [([1000, 1000], 4), ([2], 16), ([2], 7)], ids=["short", "long", "uneven"]
)
def test_a09_shape_and_byte_range_must_agree(tmp_path: Path, shape: list[int], end: int) -> None:
    refusal = refuse(tmp_path, raw_file({"t": entry("F32", shape, 0, end)}, bytes(end)))
    assert refusal.reason == "INVALID_HEADER"
    assert refusal.metadata["tensor"] == "t"
    for fact in (str(shape), "F32", f"[0,{end}]", str(end * 8)):
        assert fact in refusal.message


MALFORMED_ENTRIES: dict[str, dict[str, object]] = {
    "reversed-offsets": entry("F32", [1], 4, 0),
    "negative-offset": entry("F32", [1], -4, 0),
    "float-offsets": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]},
    "three-offsets": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]},
    "missing-offsets": {"dtype": "F32", "shape": [1]},
    "overflowing-shape": entry("F32", [4611686018427387904, 4], 0, 4),
    "negative-shape": entry("F32", [-1], 0, 4),
    "true-shape": entry("F32", True, 0, 4),
    "true-size": entry("F32", [True], 0, 4),
    "float-size": entry("F32", [1.0], 0, 4),
    "text-size": entry("F32", ["1"], 0, 4),
    "two-negative-sizes": entry("F32", [-1, -1], 0, 4),
    "missing-shape": {"dtype": "F32", "data_offsets": [0, 4]},
    "null-shape": entry("F32", None, 0, 4),
    "missing-dtype": {"shape": [1], "data_offsets": [0, 4]},
    "list-dtype": entry(["F32"], [1], 0, 4),
    "null-dtype": entry(None, [1], 0, 4),
    "true-offset": entry("F32", [1], False, 4),
    "object-offsets": {"dtype": "F32", "shape": [1], "data_offsets": {"0": 0, "1": 4}},
    "huge-offset": entry("F32", [1], 2**70, 2**70 + 4),
    "overflow-behind-zero": entry("F32", [4611686018427387904, 4, 0], 0, 0),
    "huge-size-beside-zero": entry("F32", [2**70, 0], 0, 0),
}


@pytest.mark.parametrize("malformed", MALFORMED_ENTRIES.values(), ids=MALFORMED_ENTRIES.keys())
def test_a10_malformed_entry_is_refused_by_name(
    tmp_path: Path, malformed: dict[str, object]
) -> None:
    refusal = refuse(tmp_path, raw_file({"t": malformed}, bytes(4)))
    assert type(refusal) is InvalidCheckpoint
    assert refusal.reason == "INVALID_HEADER"
    assert refusal.metadata["tensor"] == "t"
    assert "'t'" in refusal.message


@pytest.mark.parametrize("value", [None, 1, "F32", ["F32", [1], [0, 4]]])
def test_a10_entry_must_be_an_object(tmp_path: Path, value: object) -> None:
    refusal = refuse(tmp_path, raw_file({"t": value}, bytes(4)))
    assert refusal.metadata["tensor"] == "t"


VALID = json.dumps(entry("U8", [1], 0, 1))
MALFORMED_HEADERS: dict[str, tuple[bytes, str]] = {
    "list": (b"[1,2]", "list"),
    "text": (b'"{}"', "str"),
    "null": (b"null", "NoneType"),
    "no-json": (b"{]", "JSON"),
    "two-objects": (b"{}{}", "JSON"),
    "not-utf8": (b'{"\xff":' + VALID.encode() + b"}", "utf-8"),
    "utf16": (f'{{"a":{VALID}}}'.encode("utf-16"), "utf-8"),
    "byte-order-mark": (b"\xef\xbb\xbf{}", "JSON"),
    "duplicate-tensor": (f'{{"aa":{VALID},"aa":{VALID}}}'.encode(), "'aa' stands there twice"),
    "duplicate-field": (b'{"a":{"dtype":"U8","dtype":"I8","shape":[1]}}', "'dtype'"),
    "deeply-nested": (b'{"a":' * 100_000, "JSON"),
    "not-a-number": (f'{{"a":{VALID},"b":{{"x":NaN}}}}'.encode(), "NaN"),
    "infinity": (f'{{"a":{VALID},"b":{{"x":-Infinity}}}}'.encode(), "Infinity"),
    "surrogate-name": (f'{{"a\\ud800":{VALID}}}'.encode(), "surrogates"),
    "surrogate-metadata": (b'{"__metadata__":{"a":"\\udc80"}}', "surrogates"),
    "endless-number": (b'{"a":{"x":' + b"1" * 5000 + b"}}", "JSON"),
    "metadata-number": (b'{"__metadata__":{"a":1}}', "__metadata__"),
    "metadata-list": (b'{"__metadata__":["a"]}', "__metadata__"),
    "metadata-nested": (b'{"__metadata__":{"a":{}}}', "__metadata__"),
}


@pytest.mark.parametrize(
    ("header", "words"), MALFORMED_HEADERS.values(), ids=MALFORMED_HEADERS.keys()
)
def test_a10_malformed_header_is_refused(tmp_path: Path, header: bytes, words: str) -> None:
    refusal = refuse(tmp_path, raw_file(header, b"x"))
    assert type(refusal) is InvalidCheckpoint
    assert refusal.reason == "INVALID_HEADER"
    assert words in refusal.message
    refusal.message.encode()  # it must be able to travel


# ---------------------------------------------------------------- A12 A14 A27


def test_a12_zero_sized_tensors_are_planned_without_payload(tmp_path: Path) -> None:
    header = {
        "e": entry("F32", [0], 0, 0),
        "z": entry("F32", [2, 0], 0, 0),
        "w": entry("F32", [4], 0, 16),
    }
    checkpoint = read(tmp_path, raw_file(header, bytes(range(16))))
    shapes = {tensor.name: tensor.shape for tensor in checkpoint.catalog}
    assert shapes == {"e": (0,), "w": (4,), "z": (2, 0)}

    options = PlanOptions(unknown_tensors=UnknownTensorPolicy.REPLICATE)
    plan = plan_load(checkpoint, 2, options)
    for rank in range(2):
        pieces = {piece.name: piece for piece in plan.rank_slices(rank)}
        assert {name: piece.shape for name, piece in pieces.items()} == shapes
        assert pieces["e"].runs == pieces["z"].runs == ()
        assert plan.totals(rank).tensor_count == 3
        assert plan.totals(rank).resident_bytes == 16


def test_a12_element_without_bytes_is_refused(tmp_path: Path) -> None:
    refusal = refuse(tmp_path, raw_file({"e": entry("F32", [1], 0, 0)}))
    assert refusal.metadata["tensor"] == "e"


def test_a12_zero_sized_tensor_inside_another_is_refused(tmp_path: Path) -> None:
    header = {"a": entry("U8", [4], 0, 4), "e": entry("U8", [0], 2, 2)}
    refusal = refuse(tmp_path, raw_file(header, bytes(4)))
    assert refusal.reason == "OVERLAPPING_TENSORS"


@pytest.mark.parametrize("dtype", ["NOPE", "f32", "", "F32 ", "BF8"])
def test_a14_unknown_dtype_is_refused_by_tensor(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(InvalidCheckpoint) as caught:
        read(tmp_path, raw_file({"x.weight": entry(dtype, [1], 0, 4)}, bytes(4)))
    refusal = caught.value
    assert refusal.reason == "UNKNOWN_DTYPE"
    assert refusal.metadata == {"tensor": "x.weight", "dtype": dtype}
    assert "'x.weight'" in refusal.message
    assert repr(dtype) in refusal.message


@pytest.mark.parametrize(
    ("dtype", "shape", "end"), [("F4", [3], 1), ("F4", [3], 2), ("F6_E2M3", [2], 1)]
)
def test_a14_sub_byte_tensor_must_fill_its_bytes(
    tmp_path: Path, dtype: str, shape: list[int], end: int
) -> None:
    refusal = refuse(tmp_path, raw_file({"t": entry(dtype, shape, 0, end)}, bytes(end)))
    assert refusal.metadata["tensor"] == "t"


def test_a27_writer_keeps_the_values_of_strided_and_foreign_arrays(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(3, 2).T
    assert not values.flags.c_contiguous
    eight_bits = np.arange(6, dtype=np.uint8)[::2].view(ml_dtypes.float8_e4m3fn)
    tensors = [
        tensor_of_array("big", values.astype(">f4")),
        tensor_of_array("f8", eight_bits),
        tensor_of_array("transposed", values),
    ]
    path = write_file(tmp_path / NAME, tensors)
    content = path.read_bytes()
    header_length = int.from_bytes(content[:8], "little")
    assert len(content) == 8 + header_length + 24 + 3 + 24

    found = {t.name: content[t.offset : t.offset + t.nbytes] for t in read(tmp_path).catalog}
    for name in ("big", "transposed"):
        assert (np.frombuffer(found[name], "<f4").reshape(2, 3) == values).all()
    assert found["f8"] == bytes([0, 2, 4])


def test_a27_writer_refuses_what_the_format_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no dtype"):
        tensor_of_array("t", np.zeros(2, np.complex128))
    with pytest.raises(ValueError, match="do not fit"):
        write_file(tmp_path / NAME, [RawTensor("t", "F32", (2,), bytes(7))])
    with pytest.raises(ValueError, match="whole bytes"):
        payload_bytes("F4", (3,))


def test_a27_writer_reopens_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = RawTensor("t", "U8", (2,), b"ab")
    lying = [("t", {"dtype": "U8", "shape": [2], "data": bytearray(b"ax")})]
    monkeypatch.setattr(safetensors, "deserialize", lambda data: lying)
    with pytest.raises(ValueError, match="reads back differently"):
        write_file(tmp_path / NAME, [tensor])
