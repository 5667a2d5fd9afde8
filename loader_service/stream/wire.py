"""Messages of the data plane and their tags. Pure.

On one connection, in order: the streamer sends HELLO, the worker answers WELCOME. Then chunk `i`
travels under `chunk_tag(i)`; when slices end in it, their digests follow under `end_tag(i)`, 16 bytes
each in the order of the chunk's extents. The worker sends a CREDIT for every chunk it has taken out of
the way; the streamer never has more chunks on the way than credits. The worker closes the exchange
with VERDICT, at any time: verified, or why not.

Every message but chunks and end records has a fixed size, because a receiver is not told how much
arrived.
"""

from __future__ import annotations

import json
import struct

from loader_service.errors import CLASS_KEY, LoaderError, from_fields, to_fields

__all__ = [
    "CREDIT_BYTES",
    "HELLO_BYTES",
    "TAG_CLOSED",
    "TAG_CREDIT",
    "TAG_HELLO",
    "TAG_VERDICT",
    "TAG_WELCOME",
    "TOKEN_BYTES",
    "VERDICT_BYTES",
    "WELCOME_BYTES",
    "ProtocolError",
    "chunk_tag",
    "decode_credit",
    "decode_hello",
    "decode_verdict",
    "decode_welcome",
    "encode_credit",
    "encode_hello",
    "encode_verdict",
    "encode_welcome",
    "end_tag",
]

_VERSION = 1
_MAGIC = b"LDRSTRM1"
TOKEN_BYTES = 32

TAG_HELLO = 1
TAG_WELCOME = 2
TAG_CREDIT = 3
TAG_VERDICT = 4
TAG_CLOSED = 5
"""Never sent: who receives under it waits for the end of the connection."""

_CHUNK_BASE = 1 << 32
_END_BASE = 1 << 40

_HELLO = struct.Struct(f"<8sI4x{TOKEN_BYTES}s")
_WELCOME = struct.Struct("<8sI4x")
_CREDIT = struct.Struct("<q")
HELLO_BYTES = _HELLO.size
WELCOME_BYTES = _WELCOME.size
CREDIT_BYTES = _CREDIT.size
VERDICT_BYTES = 4096
_VERIFIED = b"verified"
_REFUSED = b"refused "


class ProtocolError(Exception):
    """A peer sent something that the protocol does not allow."""


def chunk_tag(index: int) -> int:
    """Return the tag of a rank's chunk number `index`."""
    return _CHUNK_BASE + index


def end_tag(index: int) -> int:
    """Return the tag of the digests that follow chunk number `index`."""
    return _END_BASE + index


def encode_hello(token: bytes) -> bytes:
    """Return the first message of a connection."""
    return _HELLO.pack(_MAGIC, _VERSION, token)


def decode_hello(message: bytes) -> bytes:
    """Return the token.

    Raises:
        ProtocolError: it is no hello of this version.
    """
    magic, version, token = _HELLO.unpack(message)
    if magic != _MAGIC or version != _VERSION:
        raise ProtocolError("the first message is not a hello of this version")
    return bytes(token)


def encode_welcome(credits: int) -> bytes:
    """Return the answer to a hello: how many chunks may be on the way."""
    return _WELCOME.pack(_MAGIC, credits)


def decode_welcome(message: bytes) -> int:
    """Return the credits.

    Raises:
        ProtocolError: it is no welcome.
    """
    magic, credits = _WELCOME.unpack(message)
    if magic != _MAGIC or credits < 1:
        raise ProtocolError("the answer to the hello is not a welcome")
    return int(credits)


def encode_credit(chunk_index: int) -> bytes:
    """Return the credit for chunk number `chunk_index`, which has landed and been hashed."""
    return _CREDIT.pack(chunk_index)


def decode_credit(message: bytes) -> int:
    """Return the chunk number."""
    return int(_CREDIT.unpack(message)[0])


def encode_verdict(error: LoaderError | None) -> bytes:
    """Return the worker's last message: verified, or the error that ended the load there."""
    if error is None:
        return _VERIFIED.ljust(VERDICT_BYTES, b"\0")
    reason, message, metadata = to_fields(error)
    body = json.dumps([reason, message, metadata]).encode()
    if len(_REFUSED) + len(body) > VERDICT_BYTES:
        # Long names must cost neither the reason nor the class; JSON spends up to 12 bytes on a
        # character.
        short = {CLASS_KEY: metadata[CLASS_KEY]}
        body = json.dumps([reason, message[:256], short]).encode()
    return (_REFUSED + body).ljust(VERDICT_BYTES, b"\0")


def decode_verdict(message: bytes) -> LoaderError | None:
    """Return the error, or None for verified.

    Raises:
        ProtocolError: it is no verdict.
    """
    text = message.rstrip(b"\0")
    if text == _VERIFIED:
        return None
    if not text.startswith(_REFUSED):
        raise ProtocolError("the last message is not a verdict")
    try:
        reason, sentence, metadata = json.loads(text[len(_REFUSED) :])
        return from_fields(reason, sentence, metadata)
    except (AttributeError, TypeError, ValueError) as error:
        raise ProtocolError("the last message is not a verdict") from error
