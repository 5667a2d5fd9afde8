"""Messages of the data plane: fixed sizes, round trips, and refusals of everything else."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loader_service.errors import DigestMismatch, InternalError, LoaderError, OutOfMemory
from loader_service.stream import wire

TOKEN = bytes(range(wire.TOKEN_BYTES))


def test_hello_carries_the_token() -> None:
    message = wire.encode_hello(TOKEN)
    assert len(message) == wire.HELLO_BYTES
    assert wire.decode_hello(message) == TOKEN


@pytest.mark.parametrize("position", [0, 7, 8, 11])
def test_a_hello_of_another_protocol_or_version_is_refused(position: int) -> None:
    message = bytearray(wire.encode_hello(TOKEN))
    message[position] ^= 0x40
    with pytest.raises(wire.ProtocolError):
        wire.decode_hello(bytes(message))


@pytest.mark.parametrize("credits", [1, 4, 2**31])
def test_welcome_carries_the_credits(credits: int) -> None:
    message = wire.encode_welcome(credits)
    assert len(message) == wire.WELCOME_BYTES
    assert wire.decode_welcome(message) == credits


@pytest.mark.parametrize(
    "message", [wire.encode_welcome(0), bytes(wire.WELCOME_BYTES), b"\xff" * wire.WELCOME_BYTES]
)
def test_a_welcome_without_credits_or_of_another_protocol_is_refused(message: bytes) -> None:
    with pytest.raises(wire.ProtocolError):
        wire.decode_welcome(message)


@pytest.mark.parametrize("index", [0, 1, 2**40])
def test_credit_carries_the_number_of_the_chunk(index: int) -> None:
    message = wire.encode_credit(index)
    assert (len(message), wire.decode_credit(message)) == (wire.CREDIT_BYTES, index)


def test_verified_is_no_error() -> None:
    message = wire.encode_verdict(None)
    assert (len(message), wire.decode_verdict(message)) == (wire.VERDICT_BYTES, None)


@pytest.mark.parametrize(
    "error",
    [
        DigestMismatch("tensor 'wörter' differs", tensor="wörter", rank=3),
        OutOfMemory("too little", wanted_bytes=2**50),
        InternalError("odd", reason="ODD_REASON"),
    ],
)
def test_verdict_carries_class_reason_message_and_facts(error: LoaderError) -> None:
    message = wire.encode_verdict(error)
    told = wire.decode_verdict(message)
    assert len(message) == wire.VERDICT_BYTES
    assert type(told) is type(error)
    assert told is not None
    assert (told.reason, told.message, told.metadata) == (
        error.reason,
        error.message,
        error.metadata,
    )


LONG = st.builds(str.__mul__, st.text(max_size=4), st.integers(0, 5000))


@settings(max_examples=100, deadline=None)
@given(name=LONG, sentence=LONG)
@example(name="n", sentence="\N{GRINNING FACE}" * 5000)
@example(name="\0" * 5000, sentence="\0" * 300)
def test_a_verdict_about_long_names_keeps_its_size_class_and_reason(
    name: str, sentence: str
) -> None:
    message = wire.encode_verdict(DigestMismatch(sentence, tensor=name))
    assert len(message) == wire.VERDICT_BYTES
    told = wire.decode_verdict(message)
    assert isinstance(told, DigestMismatch)
    assert told.reason == "DIGEST_MISMATCH"
    assert sentence.startswith(told.message)


@pytest.mark.parametrize(
    "body",
    [b"", b"verified?", b"nonsense", b"\xff\xfe", b"refused ", b"refused {", b"refused []",
     b'refused ["A", "b"]', b'refused ["A", "b", 7]', b'refused "abc"', b"refused \xff"],
)  # fmt: skip
def test_anything_else_is_no_verdict(body: bytes) -> None:
    with pytest.raises(wire.ProtocolError):
        wire.decode_verdict(body.ljust(wire.VERDICT_BYTES, b"\0"))


def test_tags_of_all_messages_are_different() -> None:
    control = (
        wire.TAG_HELLO,
        wire.TAG_WELCOME,
        wire.TAG_CREDIT,
        wire.TAG_VERDICT,
        wire.TAG_CLOSED,
    )
    indices = (0, 1, 2, 1000, 2**31)
    tags = itertools.chain(control, map(wire.chunk_tag, indices), map(wire.end_tag, indices))
    assert len(set(tags)) == len(control) + 2 * len(indices)
