"""Proving that two processes open the same file, before one of them reads for itself what the other planned.

The coordinator hashes the header and samples of the payload at places that it draws anew for every load;
a worker computes the same from the file that it opens. Equal headers put every tensor at the same place;
equal samples tell a copy from another fine-tune of the same shapes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import secrets
import stat
from pathlib import Path

from loader_service.checkpoint.catalog import CheckpointFile
from loader_service.checkpoint.files import file_identity
from loader_service.errors import DataLoss

__all__ = ["LARGEST_SAMPLES_BYTES", "FileProof", "NotTheSameError", "prove", "same_file"]

SAMPLES = 16
SAMPLE_BYTES = 4096
"""As few and small that they cost a file on a disk or a network some milliseconds."""

LARGEST_SAMPLES_BYTES = 1 << 20
"""Most bytes of all samples that a proof may ask for."""

_LENGTH_BYTES = 8
_READ_BYTES = 1 << 20


class NotTheSameError(Exception):
    """The file is not there, cannot be read, or is another one; the text says which."""


@dataclasses.dataclass(frozen=True, slots=True)
class FileProof:
    """What another process must find in a file to take it for the same.

    Attributes:
        name: file name inside the checkpoint.
        path: absolute path, links resolved.
        size: bytes of the file.
        header_bytes: bytes in front of the payload.
        header_sha256: SHA-256 of these.
        sample_offsets: first byte of each sample.
        sample_bytes: bytes of each; one at the end of the file may have fewer.
        samples_sha256: SHA-256 of the samples, one after the other.
    """

    name: str
    path: str
    size: int
    header_bytes: int
    header_sha256: bytes
    sample_offsets: tuple[int, ...]
    sample_bytes: int
    samples_sha256: bytes


def prove(file: CheckpointFile) -> FileProof:
    """Make the proof of a file that was planned; reads it.

    Raises:
        DataLoss: READ_FAILED or FILE_CHANGED.
    """
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if file_identity(descriptor) != (file.size, file.mtime_ns, file.inode):
                raise DataLoss(
                    f"{file.name} changed after it was planned",
                    reason="FILE_CHANGED",
                    file=file.name,
                )
            length = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
            header_bytes = _LENGTH_BYTES + length
            payload = max(1, file.size - header_bytes)
            offsets = tuple(
                sorted(header_bytes + secrets.randbelow(payload) for _ in range(SAMPLES))
            )
            return FileProof(
                name=file.name,
                path=file.path,
                size=file.size,
                header_bytes=header_bytes,
                header_sha256=_sha256(descriptor, [(0, header_bytes)]),
                sample_offsets=offsets,
                sample_bytes=SAMPLE_BYTES,
                samples_sha256=_sha256(descriptor, [(at, SAMPLE_BYTES) for at in offsets]),
            )
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataLoss(
            f"{file.name}: {error.strerror}", reason="READ_FAILED", file=file.name
        ) from error


def same_file(proof: FileProof, root: Path | None) -> CheckpointFile:
    """Open the file at the proof's path and return it as this process sees it, if it is the same.

    Args:
        proof: the coordinator's.
        root: folder that the file must lie in, links resolved; None allows every place.

    Raises:
        NotTheSameError: it is not.
    """
    try:
        # Not blocking: a pipe in the file's place must not hold the caller.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        descriptor = os.open(proof.path, flags)
    except (OSError, ValueError) as error:
        raise NotTheSameError(f"{proof.path} cannot be opened: {_text(error)}") from error
    try:
        real = Path(f"/proc/self/fd/{descriptor}").readlink()
        if root is not None and not real.is_relative_to(root):
            raise NotTheSameError(f"{proof.path} lies outside of {root}")
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotTheSameError(f"{proof.path} is not a file")
        size, mtime_ns, inode = file_identity(descriptor)
        if size != proof.size:
            raise NotTheSameError(f"{proof.path} has {size} bytes here, not {proof.size}")
        if _sha256(descriptor, [(0, proof.header_bytes)]) != proof.header_sha256:
            raise NotTheSameError(f"{proof.path} has another header here")
        samples = [(offset, proof.sample_bytes) for offset in proof.sample_offsets]
        if _sha256(descriptor, samples) != proof.samples_sha256:
            raise NotTheSameError(f"{proof.path} holds other bytes here")
        return CheckpointFile(proof.name, str(real), size, mtime_ns, inode)
    except OSError as error:
        raise NotTheSameError(f"{proof.path} cannot be read: {_text(error)}") from error
    finally:
        os.close(descriptor)


def _sha256(descriptor: int, ranges: list[tuple[int, int]]) -> bytes:
    digest = hashlib.sha256()
    for begin, length in ranges:
        for offset in range(begin, begin + length, _READ_BYTES):
            digest.update(os.pread(descriptor, min(_READ_BYTES, begin + length - offset), offset))
    return digest.digest()


def _text(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
