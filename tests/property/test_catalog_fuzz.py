"""Whatever is done to a file: a typed refusal, or a catalog that the safetensors library confirms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from loader_service.checkpoint.files import read_checkpoint
from loader_service.errors import LoaderError
from tests.checkpoints import entry, random_tensor, raw_file, safetensors_file

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]

VALID = safetensors_file(
    [
        random_tensor("a", "F32", (2, 3)),
        random_tensor("b.weight", "F4", (4, 3)),
        random_tensor("empty", "I64", (0, 2)),
        random_tensor("scalar", "BF16", ()),
    ],
    {"format": "pt"},
)
HEADER_END = 8 + int.from_bytes(VALID[:8], "little")

STRICTER = (
    "stands there twice",  # of two tensors of one name the library keeps the last
    "entry is not an object",  # it takes ["F32", [1], [0, 4]] for an entry
    "more elements than 64 bits can count",  # it counts to 2^64, and a zero ends the counting
    "are negative, reversed or too large",  # the same for offsets of zero-sized tensors
)
"""Words of refusals that are ours alone."""

LAXER = (
    "-0.0",  # it reads -0 as a fraction
    "number out of range",  # it parses numbers in fields that nobody asks for
    "recursion limit",  # it stops 127 levels deep
)
"""Words of the library's refusals that we do not share."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.safetensors"


def ours(path: Path, content: bytes) -> tuple[Tensors | None, str]:
    """Our reading of a file, or None with the words of the refusal."""
    path.write_bytes(content)
    try:
        catalog = read_checkpoint(str(path), str(path.parent)).catalog
    except LoaderError as error:
        error.message.encode()
        return None, error.message
    return {
        t.name: (t.dtype, t.shape, content[t.offset : t.offset + t.nbytes]) for t in catalog
    }, ""


def theirs(content: bytes) -> tuple[Tensors | None, str]:
    """The library's reading of a file, or None with the words of the refusal."""
    try:
        tensors = safetensors.deserialize(content)
    except safetensors.SafetensorError as error:
        return None, str(error)
    return {name: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for name, t in tensors}, ""


def check_agreement(path: Path, content: bytes) -> None:
    mine, my_words = ours(path, content)
    other, other_words = theirs(content)
    if mine is None and other is not None:
        assert any(words in my_words for words in STRICTER), my_words
    elif mine is not None and other is None:
        assert any(words in other_words for words in LAXER), other_words
    else:
        assert mine == other


def spliced(content: bytes, position: int, removed: int, inserted: bytes) -> bytes:
    return content[:position] + inserted + content[position + removed :]


BITS_OF_JSON = [b"-", b"0", b"9", b".0", b"e9", b'"', b",", b":", b"[", b"]", b"{", b"}", b"\\"]
splices = st.tuples(
    st.one_of(st.integers(0, 8), st.integers(8, HEADER_END), st.integers(0, len(VALID))),
    st.integers(0, 6),
    st.one_of(st.just(b""), st.sampled_from(BITS_OF_JSON), st.binary(max_size=6)),
)


@settings(max_examples=250, deadline=None)
@given(st.lists(splices, min_size=1, max_size=3))
def test_changed_bytes_never_break_the_reader(
    path: Path, changes: list[tuple[int, int, bytes]]
) -> None:
    content = VALID
    for position, removed, inserted in changes:
        content = spliced(content, position, removed, inserted)
    check_agreement(path, content)


@settings(max_examples=150, deadline=None)
@given(st.lists(splices, min_size=1, max_size=2))
def test_changed_header_of_the_right_length_never_breaks_the_reader(
    path: Path, changes: list[tuple[int, int, bytes]]
) -> None:
    """The length field is put right again, so that the JSON itself is what is wrong."""
    header, payload = VALID[8:HEADER_END], VALID[HEADER_END:]
    for position, removed, inserted in changes:
        header = spliced(header, position, removed, inserted)
    check_agreement(path, raw_file(header, payload))


numbers = st.one_of(
    st.integers(-2, 9), st.sampled_from([2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**200])
)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.floats(), st.text(max_size=3)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)
entries = st.one_of(
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "U8", "F4", "F6_E2M3", "BF16", "NOPE"]),
            "shape": st.lists(numbers, max_size=3),
            "data_offsets": st.lists(numbers, min_size=2, max_size=2),
        },
        optional={"extra": json_values},
    ),
    st.fixed_dictionaries(
        {}, optional={"dtype": json_values, "shape": json_values, "data_offsets": json_values}
    ),
    json_values,
)


@settings(max_examples=120, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["a", "b", "\ud800", "__metadata__", ""]), entries, max_size=3),
    st.integers(0, 40),
)
def test_any_header_is_read_as_the_library_reads_it_or_refused(
    path: Path, header: Mapping[str, object], payload: int
) -> None:
    check_agreement(path, raw_file(header, bytes(payload)))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["U8", "F4", "F32", "C64"]), st.integers(0, 6), st.integers(0, 2)
        ),
        max_size=4,
    ),
    st.integers(-1, 1),
)
def test_layouts_are_judged_as_the_library_judges_them(
    path: Path, parts: list[tuple[str, int, int]], rest: int
) -> None:
    """Tensors of fitting sizes one after another, sometimes with a gap, an overlap or a rest."""
    header, position = {}, 0
    widths = {"U8": 8, "F4": 4, "F32": 32, "C64": 64}
    for number, (dtype, size, jump) in enumerate(parts):
        begin = max(0, position + (jump == 1) - (jump == 2))
        position = begin + widths[dtype] * size // 8
        header[f"t{len(parts) - number}"] = entry(dtype, [size], begin, position)
    check_agreement(path, raw_file(header, bytes(max(0, position + rest))))


def test_agreement_is_not_vacuous(path: Path) -> None:
    tensors, _ = ours(path, VALID)
    assert tensors == theirs(VALID)[0]
    assert tensors is not None
    assert len(tensors) == 4
    twice = json.dumps(entry("U8", [1], 0, 1))
    for content in (raw_file(f'{{"a":{twice},"a":{twice}}}'.encode(), b"x"), VALID + b"x"):
        check_agreement(path, content)
