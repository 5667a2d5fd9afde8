"""Finding and reading a checkpoint's metadata on disk. Only headers, indexes and configs are read."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from loader_service.background import until_cancelled
from loader_service.checkpoint.catalog import (
    Checkpoint,
    CheckpointFile,
    TensorCatalog,
    TensorInfo,
)
from loader_service.checkpoint.header import (
    LENGTH_BYTES,
    check_coverage,
    loads_strict,
    parse_header,
)
from loader_service.errors import (
    CheckpointNotFound,
    DataLoss,
    IndexMismatch,
    InvalidCheckpoint,
    LfsPointer,
    LimitExceeded,
    PathOutsideRoot,
)

__all__ = [
    "DEFAULT_MAX_HEADER_BYTES",
    "DEFAULT_MAX_TENSORS",
    "file_identity",
    "read_checkpoint",
    "resolve_path",
]

DEFAULT_MAX_HEADER_BYTES = 256 << 20
"""A file with 1.3 million tensors has a header of 119 MiB (safetensors/safetensors#668)."""

DEFAULT_MAX_TENSORS = 2_000_000

_SUFFIX = ".safetensors"
_INDEX_NAMES = ("model.safetensors.index.json", "consolidated.safetensors.index.json")
_SINGLE_NAME = "model.safetensors"
_LFS_POINTER = re.compile(rb"\Aversion \S+\noid sha256:[0-9a-f]{64}\nsize (\d+)\n?", re.ASCII)
_LFS_POINTER_MAX_BYTES = 1024
_REFERENCE_MAX_BYTES = 200
_REVISION = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_NAMES_IN_ERROR = 5


class _Header(NamedTuple):
    file: CheckpointFile
    tensors: list[TensorInfo]
    warning: str | None


def resolve_path(path: str, model_root: str) -> Path:
    """Return where `path` really is, links resolved, and check that it lies inside the root.

    Args:
        path: relative to `model_root`, or absolute inside it. A repository folder of a Hub cache
            (`models--*` with `refs/main`) stands for its main snapshot.
        model_root: folder that checkpoints must lie in.

    Raises:
        PathOutsideRoot: when the path leaves the root, also through a symbolic link.
        CheckpointNotFound: when nothing is there.
    """
    if "\0" in path or not _is_unicode(path):
        raise CheckpointNotFound(f"no checkpoint at {path!a}: no path reads so", path=ascii(path))
    root = Path(os.path.realpath(model_root))
    place = root / path
    if _type_of(place) == stat.S_IFDIR:
        real = folder = Path(os.path.realpath(place))
    else:
        # A file keeps its own name: in a Hub snapshot it is a link to a blob named by its hash.
        folder = Path(os.path.realpath(place.parent))
        real = folder / place.name
    if not folder.is_relative_to(root) or not _is_inside(real, _allowed_roots(folder, root)):
        raise PathOutsideRoot(f"{path!r} lies outside the model root", path=path)
    if not _type_of(real):
        raise CheckpointNotFound(f"no checkpoint at {path!r}", path=path)
    return _main_snapshot(real, root)


def read_checkpoint(
    path: str,
    model_root: str,
    *,
    max_header_bytes: int = DEFAULT_MAX_HEADER_BYTES,
    max_tensors: int = DEFAULT_MAX_TENSORS,
    allow_trailing_bytes: bool = False,
) -> Checkpoint:
    """Read the metadata of the checkpoint at `path`.

    A folder is read by its index where it has one, else by `model.safetensors`, else by all its
    `.safetensors` files. Sub-folders are never searched.

    Args:
        path: folder or single `.safetensors` file, see `resolve_path`.
        model_root: folder that every file must lie in; the blobs of a Hub snapshot count as inside.
        max_header_bytes: largest header that is accepted (setting `--max-header-bytes`).
        max_tensors: most tensors of the whole checkpoint (setting `--max-tensors`).
        allow_trailing_bytes: whether bytes after the last tensor of a file are only a warning.

    Raises:
        LoaderError: CheckpointNotFound, PathOutsideRoot, LfsPointer, InvalidCheckpoint,
            LimitExceeded, IndexMismatch or DataLoss, before any payload is read.
    """
    real = resolve_path(path, model_root)
    is_folder = _type_of(real) == stat.S_IFDIR
    folder = real if is_folder else real.parent
    roots = _allowed_roots(folder, Path(os.path.realpath(model_root)))
    index_path = _find_index(folder) if is_folder else None
    index = _read_index(index_path, roots) if index_path else None
    names = sorted(set(index[0].values())) if index else _scan(real)

    def read(name: str) -> _Header:
        return _read_header(folder, name, roots, max_header_bytes, allow_trailing_bytes)

    if index and index_path:
        _check_shards_exist(folder, index[0], index_path.name)
    headers = []
    tensor_count = 0
    for name in until_cancelled(names):
        headers.append(read(name))
        tensor_count += len(headers[-1].tensors)
        if tensor_count > max_tensors:
            raise LimitExceeded(
                f"{path} holds more than {max_tensors} tensors; the coordinator's --max-tensors "
                "says how many are accepted",
                limit="max_tensors",
            )
    catalog = _join(headers)
    warnings = [header.warning for header in headers if header.warning]
    if index and index_path:
        _check_index(index[0], catalog, index_path.name)
        warnings += _check_total(index[1], catalog)
    config = _read_json(folder / "config.json", roots, reason="INVALID_CONFIG", allow_infinity=True)
    return Checkpoint(str(real), catalog, config, tuple(warnings))


def file_identity(descriptor: int) -> tuple[int, int, int]:
    """Return (size, mtime in ns, inode) of an open file: what must not change during a load."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns, status.st_ino


def _type_of(path: Path) -> int:
    """Return the file type as `stat.S_IFMT` does, links followed; 0 where nothing can be found."""
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except (OSError, ValueError):  # ValueError: no file can have such a name
        return 0


def _is_unicode(text: str) -> bool:
    """Whether a message can carry `text`; names on disk that are not UTF-8 hold lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_inside(path: Path, roots: tuple[Path, ...]) -> bool:
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(root) for root in roots)


def _main_snapshot(folder: Path, root: Path) -> Path:
    reference, snapshots = folder / "refs" / "main", folder / "snapshots"
    if not _type_of(reference) or _type_of(snapshots) != stat.S_IFDIR:
        return folder
    with _open_inside(reference, (root,)) as descriptor:
        length = min(os.fstat(descriptor).st_size, _REFERENCE_MAX_BYTES)
        content = _pread_exact(descriptor, length, 0, "refs/main")
    revision = content.decode("ascii", "replace").strip()
    if not _REVISION.fullmatch(revision) or _type_of(snapshots / revision) != stat.S_IFDIR:
        raise CheckpointNotFound(
            f"{folder.name}: refs/main names snapshot {revision!r}, which is not there",
            path=str(folder),
        )
    snapshot = Path(os.path.realpath(snapshots / revision))
    if not snapshot.is_relative_to(root):
        raise PathOutsideRoot(f"snapshot {revision} leads outside the model root", path=str(folder))
    return snapshot


def _allowed_roots(folder: Path, root: Path) -> tuple[Path, ...]:
    """Return the folders that a checkpoint's files may really lie in."""
    if folder.parent.name == "snapshots":
        return root, folder.parent.parent / "blobs"
    return (root,)


def _find_index(folder: Path) -> Path | None:
    # A dangling link counts: without its index a folder could be read wrongly.
    return next((folder / name for name in _INDEX_NAMES if os.path.lexists(folder / name)), None)


def _scan(real: Path) -> list[str]:
    if _type_of(real) != stat.S_IFDIR:
        return [real.name]
    return _scan_folder(real)


def _scan_folder(folder: Path) -> list[str]:
    if _type_of(folder / _SINGLE_NAME):
        return [_SINGLE_NAME]
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(_SUFFIX))
    except OSError as error:
        raise _open_error(folder, error) from error
    if not names:
        raise CheckpointNotFound(
            f"{folder} holds no {_SUFFIX} file; other formats are not read", path=str(folder)
        )
    for name in names:
        if not _is_unicode(name):
            raise InvalidCheckpoint(
                f"file name {name!a} is not valid UTF-8",
                reason="INVALID_FILE_NAME",
                file=ascii(name),
            )
    return names


@contextlib.contextmanager
def _open_inside(path: Path, roots: tuple[Path, ...]) -> Iterator[int]:
    """Open a regular file whose real place is inside one of `roots`; yields a descriptor."""
    if not _is_inside(path, roots):
        raise PathOutsideRoot(f"{path.name} leads outside the model root", path=str(path))
    try:
        # Non-blocking, so that a named pipe in place of a file cannot hang the reader.
        descriptor = os.open(os.path.realpath(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _open_error(path, error) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InvalidCheckpoint(
                f"{path.name} is not a regular file", reason="NOT_A_FILE", file=path.name
            )
        yield descriptor
    finally:
        os.close(descriptor)


def _open_error(path: Path, error: OSError) -> DataLoss | CheckpointNotFound:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return CheckpointNotFound(f"{path.name} is not there", path=str(path))
    return DataLoss(
        f"{path.name} cannot be opened: {error.strerror}", reason="READ_FAILED", file=path.name
    )


def _pread_exact(descriptor: int, length: int, offset: int, name: str) -> bytes:
    try:
        data = os.pread(descriptor, length, offset)
        while len(data) < length and (
            more := os.pread(descriptor, length - len(data), offset + len(data))
        ):
            data += more
    except OSError as error:
        raise DataLoss(
            f"{name} cannot be read: {error.strerror}", reason="READ_FAILED", file=name
        ) from error
    if len(data) < length:
        raise DataLoss(f"{name} became shorter while it was read", reason="FILE_CHANGED", file=name)
    return data


def _refuse_lfs_pointer(descriptor: int, size: int, name: str) -> None:
    if size > _LFS_POINTER_MAX_BYTES:
        return
    match = _LFS_POINTER.match(_pread_exact(descriptor, size, 0, name))
    if match:
        promised = int(match[1])
        raise LfsPointer(
            f"{name} is a Git LFS pointer, not the file itself; the file has {promised} bytes and "
            "comes with `git lfs pull`",
            file=name,
            size=promised,
        )


def _read_header(
    folder: Path,
    name: str,
    roots: tuple[Path, ...],
    max_header_bytes: int,
    allow_trailing_bytes: bool,
) -> _Header:
    with _open_inside(folder / name, roots) as descriptor:
        size, mtime_ns, inode = file_identity(descriptor)
        _refuse_lfs_pointer(descriptor, size, name)
        length = _header_length(descriptor, size, name, max_header_bytes)
        entries = parse_header(_pread_exact(descriptor, length, LENGTH_BYTES, name), name)
    start = LENGTH_BYTES + length
    warning = check_coverage(entries, size - start, name, allow_trailing_bytes=allow_trailing_bytes)
    file = CheckpointFile(name, os.path.realpath(folder / name), size, mtime_ns, inode)
    tensors = [
        TensorInfo(
            name=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            file=name,
            offset=start + entry.begin,
            nbytes=entry.end - entry.begin,
        )
        for entry in entries
    ]
    return _Header(file, tensors, warning)


def _header_length(descriptor: int, size: int, name: str, max_header_bytes: int) -> int:
    if size < LENGTH_BYTES:
        raise InvalidCheckpoint(
            f"{name} is too short: {size} bytes, the length field alone needs {LENGTH_BYTES}",
            reason="FILE_TOO_SHORT",
            file=name,
            size=size,
        )
    length = int.from_bytes(_pread_exact(descriptor, LENGTH_BYTES, 0, name), "little")
    if not 2 <= length <= size - LENGTH_BYTES:
        raise InvalidCheckpoint(
            f"{name} has a bad header length: {length}, the file has {size - LENGTH_BYTES} bytes "
            "after the length field",
            reason="BAD_HEADER_LENGTH",
            file=name,
            header_bytes=length,
        )
    if length > max_header_bytes:
        raise LimitExceeded(
            f"{name} has a header of {length} bytes, more than the {max_header_bytes} that "
            "--max-header-bytes allows",
            file=name,
            header_bytes=length,
            max_header_bytes=max_header_bytes,
        )
    return length


def _read_json(
    path: Path, roots: tuple[Path, ...], *, reason: str, allow_infinity: bool = False
) -> dict[str, Any] | None:
    """Return the JSON object in a small file, or None where there is no file."""
    if not os.path.lexists(path):
        return None
    with _open_inside(path, roots) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > DEFAULT_MAX_HEADER_BYTES:
            raise LimitExceeded(
                f"{path.name} has {size} bytes, more than {DEFAULT_MAX_HEADER_BYTES}",
                file=path.name,
            )
        _refuse_lfs_pointer(descriptor, size, path.name)
        text = _pread_exact(descriptor, size, 0, path.name)
    return loads_strict(text, path.name, reason=reason, allow_infinity=allow_infinity)


def _read_index(path: Path, roots: tuple[Path, ...]) -> tuple[dict[str, str], object]:
    """Return (tensor name -> file name, `total_size` or None)."""
    index = _read_json(path, roots, reason="INVALID_INDEX") or {}
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise InvalidCheckpoint(
            f"{path.name}: weight_map must map tensor names to file names",
            reason="INVALID_INDEX",
            file=path.name,
        )
    for file in set(weight_map.values()):
        if not file or "\0" in file or Path(file).name != file or file == "..":
            raise PathOutsideRoot(
                f"{path.name} names {file!r}, which is not a plain file name", file=file
            )
    metadata = index.get("metadata")
    return weight_map, metadata.get("total_size") if isinstance(metadata, dict) else None


def _check_shards_exist(folder: Path, weight_map: Mapping[str, str], index_name: str) -> None:
    missing = sorted(name for name in set(weight_map.values()) if not _type_of(folder / name))
    if missing:
        raise IndexMismatch(
            f"{index_name} names {_some(missing)}, which is not there",
            reason="SHARD_MISSING",
            shards=",".join(missing),
        )


def _check_index(weight_map: Mapping[str, str], catalog: TensorCatalog, index_name: str) -> None:
    for name, file in weight_map.items():
        tensor = catalog.get(name)
        if tensor is None:
            raise IndexMismatch(
                f"{index_name} places tensor {name!r} in {file}, but that file does not hold it",
                reason="TENSOR_NOT_IN_SHARD",
                tensor=name,
                shard=file,
            )
        if tensor.file != file:
            raise IndexMismatch(
                f"{index_name} places tensor {name!r} in {file}, but it is in {tensor.file}",
                reason="TENSOR_IN_OTHER_SHARD",
                tensor=name,
                shard=file,
                found_in=tensor.file,
            )
    orphans = [tensor.name for tensor in catalog if tensor.name not in weight_map]
    if orphans:
        raise IndexMismatch(
            f"{index_name} does not mention {_some(orphans)}, which its files hold",
            reason="TENSOR_NOT_IN_INDEX",
            tensors=",".join(orphans[:_NAMES_IN_ERROR]),
        )


def _check_total(total_size: object, catalog: TensorCatalog) -> list[str]:
    """`total_size` is advice only: writers have filled it in with several meanings."""
    if total_size is None or total_size == catalog.payload_bytes:
        return []
    return [f"the index says total_size {total_size}, the files hold {catalog.payload_bytes} bytes"]


def _join(headers: list[_Header]) -> TensorCatalog:
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for tensor in header.tensors:
            earlier = tensors.setdefault(tensor.name, tensor)
            if earlier is not tensor:
                raise InvalidCheckpoint(
                    f"tensor {tensor.name!r} stands in both {earlier.file} and {tensor.file}",
                    reason="DUPLICATE_TENSOR",
                    tensor=tensor.name,
                )
    return TensorCatalog(tensors, {header.file.name: header.file for header in headers})


def _some(names: list[str]) -> str:
    rest = len(names) - _NAMES_IN_ERROR
    return ", ".join(names[:_NAMES_IN_ERROR]) + (f" and {rest} more" if rest > 0 else "")
