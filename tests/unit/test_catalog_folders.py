"""Reading a folder: which files belong to a checkpoint, and whether its index tells the truth."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from loader_service.checkpoint.catalog import Checkpoint
from loader_service.checkpoint.files import file_identity, read_checkpoint
from loader_service.errors import (
    CheckpointNotFound,
    DataLoss,
    IndexMismatch,
    InvalidCheckpoint,
    LfsPointer,
    LoaderError,
    PathOutsideRoot,
)
from loader_service.plan.planner import plan_load
from tests.checkpoints import (
    INDEX_NAME,
    RawTensor,
    lfs_pointer,
    random_tensor,
    write_config,
    write_file,
    write_index,
    write_sharded,
)


def read(folder: Path, path: str = "") -> Checkpoint:
    return read_checkpoint(path, str(folder))


def refuse(kind: type[LoaderError], folder: Path, path: str = "") -> LoaderError:
    """Read what must be refused with exactly `kind`."""
    with pytest.raises(kind) as caught:
        read(folder, path)
    assert type(caught.value) is kind
    caught.value.message.encode()  # it must be able to travel
    for value in caught.value.metadata.values():
        value.encode()
    return caught.value


def value_of(checkpoint: Checkpoint, name: str) -> bytes:
    tensor = checkpoint.catalog.get(name)
    assert tensor is not None
    content = Path(checkpoint.catalog.files[tensor.file].path).read_bytes()
    return content[tensor.offset : tensor.offset + tensor.nbytes]


def byte(name: str, value: int = 0) -> RawTensor:
    return RawTensor(name, "U8", (1,), bytes([value]))


# ---------------------------------------------------------------- A17: index against shards

WEIGHT_MAP = {"a": "s1.safetensors", "b": "s2.safetensors", "mtp.fc": "s2.safetensors"}


def test_a17_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_file(tmp_path / "s1.safetensors", [byte("a")])
    write_index(tmp_path, WEIGHT_MAP)
    refusal = refuse(IndexMismatch, tmp_path)
    assert refusal.reason == "SHARD_MISSING"
    assert "s2.safetensors" in refusal.message
    assert refusal.metadata["shards"] == "s2.safetensors"


def test_a17_shard_that_is_a_dangling_link_is_missing(tmp_path: Path) -> None:
    """A Hub snapshot whose blob was not fetched looks so."""
    write_file(tmp_path / "s1.safetensors", [byte("a")])
    (tmp_path / "s2.safetensors").symlink_to("../../blobs/0123")
    write_index(tmp_path, WEIGHT_MAP)
    assert refuse(IndexMismatch, tmp_path).reason == "SHARD_MISSING"


def test_a17_shard_that_lacks_a_mapped_tensor_is_named(tmp_path: Path) -> None:
    write_file(tmp_path / "s1.safetensors", [byte("a")])
    write_file(tmp_path / "s2.safetensors", [byte("b")])
    write_index(tmp_path, WEIGHT_MAP)
    refusal = refuse(IndexMismatch, tmp_path)
    assert refusal.reason == "TENSOR_NOT_IN_SHARD"
    assert "'mtp.fc'" in refusal.message
    assert "s2.safetensors" in refusal.message


def test_a17_tensor_in_another_shard_is_named_with_both(tmp_path: Path) -> None:
    write_file(tmp_path / "s1.safetensors", [byte("a"), byte("b")])
    write_file(tmp_path / "s2.safetensors", [byte("mtp.fc")])
    write_index(tmp_path, WEIGHT_MAP)
    refusal = refuse(IndexMismatch, tmp_path)
    assert refusal.reason == "TENSOR_IN_OTHER_SHARD"
    for fact in ("'b'", "s1.safetensors", "s2.safetensors"):
        assert fact in refusal.message


def test_a17_tensor_that_the_index_omits_is_named(tmp_path: Path) -> None:
    write_file(tmp_path / "s1.safetensors", [byte("a"), byte("extra")])
    write_index(tmp_path, {"a": "s1.safetensors"})
    refusal = refuse(IndexMismatch, tmp_path)
    assert refusal.reason == "TENSOR_NOT_IN_INDEX"
    assert "extra" in refusal.message


def test_a17_without_an_index_the_headers_decide(tmp_path: Path) -> None:
    write_file(tmp_path / "s1.safetensors", [byte("a"), byte("b")])
    write_file(tmp_path / "s2.safetensors", [byte("mtp.fc")])
    files = {tensor.name: tensor.file for tensor in read(tmp_path).catalog}
    assert files == {"a": "s1.safetensors", "b": "s1.safetensors", "mtp.fc": "s2.safetensors"}


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "s1.safetensors", [byte("a", 1)])
    write_file(tmp_path / "s2.safetensors", [byte("a", 2)])
    refusal = refuse(InvalidCheckpoint, tmp_path)
    assert refusal.reason == "DUPLICATE_TENSOR"
    for fact in ("'a'", "s1.safetensors", "s2.safetensors"):
        assert fact in refusal.message


# ---------------------------------------------------------------- A19: total_size


@pytest.mark.parametrize(
    ("total_size", "warning_count"), [(768, 0), (900, 1), (0, 1), (None, 0), ("768", 1)]
)
def test_a19_total_size_is_advice(tmp_path: Path, total_size: object, warning_count: int) -> None:
    write_file(tmp_path / "s1.safetensors", [random_tensor("a", "U8", (512,))])
    write_file(tmp_path / "s2.safetensors", [random_tensor("b", "F32", (64,))])
    write_index(tmp_path, {"a": "s1.safetensors", "b": "s2.safetensors"}, total_size)
    checkpoint = read(tmp_path)
    assert len(checkpoint.warnings) == warning_count
    assert all(f"total_size {total_size}" in warning for warning in checkpoint.warnings)
    assert all("768" in warning for warning in checkpoint.warnings)

    plan = plan_load(checkpoint, 1)
    assert plan.warnings == checkpoint.warnings
    assert plan.source_bytes == plan.totals(0).wire_bytes == 768


# ---------------------------------------------------------------- A23 and which files are read


def test_a23_index_counts_for_its_own_folder_only(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", [byte("a", 1)])
    write_index(tmp_path, {"a": "model.safetensors"})
    write_file(tmp_path / "talker" / "model.safetensors", [byte("a", 2)])
    for path, value in (("", 1), ("talker", 2), ("talker/model.safetensors", 2)):
        checkpoint = read(tmp_path, path)
        assert value_of(checkpoint, "a") == bytes([value])
        assert len(checkpoint.catalog.files) == 1


def test_single_file_is_preferred_to_other_files_beside_it(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", [byte("a")])
    write_file(tmp_path / "adapter.safetensors", [byte("b")])
    assert [tensor.name for tensor in read(tmp_path).catalog] == ["a"]
    assert [t.name for t in read(tmp_path, "adapter.safetensors").catalog] == ["b"]


def test_index_of_one_unusual_shard_is_followed(tmp_path: Path) -> None:
    write_file(tmp_path / "weights", [byte("a")])
    write_index(tmp_path, {"a": "weights"}, name="consolidated.safetensors.index.json")
    assert list(read(tmp_path).catalog.files) == ["weights"]


@pytest.mark.parametrize("path", ["", "nowhere", "nowhere/model.safetensors", "x" * 5000, "a\0b"])
def test_nothing_at_the_path_is_not_found(tmp_path: Path, path: str) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"other formats are not read")
    assert refuse(CheckpointNotFound, tmp_path, path).reason == "CHECKPOINT_NOT_FOUND"


@pytest.mark.parametrize("path", ["\ud800", "\udcff/model"])
def test_path_that_is_no_text_is_not_found(tmp_path: Path, path: str) -> None:
    refuse(CheckpointNotFound, tmp_path, path)


# ---------------------------------------------------------------- index and config files


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": ["s.safetensors"]}}',
        '{"weight_map": {"a": "s.safetensors", "a": "t.safetensors"}}',
        '{"weight_map": {"\\ud800": "s.safetensors"}}',
        '{"weight_map": {"a": "\\udcff.safetensors"}}',
    ],
)
def test_malformed_index_is_refused(tmp_path: Path, index: str) -> None:
    write_file(tmp_path / "s.safetensors", [byte("a")])
    (tmp_path / INDEX_NAME).write_text(index)
    refusal = refuse(InvalidCheckpoint, tmp_path)
    assert refusal.reason == "INVALID_INDEX"
    assert INDEX_NAME in refusal.message


@pytest.mark.parametrize("name", ["../x", "/abs", "sub/x", "..", ".", "", "a\0b", "x/", "./x"])
def test_index_may_name_files_of_its_folder_only(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    for place in (tmp_path / "x", folder / "sub" / "x", folder / "x"):
        write_file(place, [byte("a")])
    write_index(folder, {"a": name})
    refusal = refuse(PathOutsideRoot, tmp_path, "model")
    assert repr(name) in refusal.message


def test_index_with_a_name_too_long_for_any_file_is_refused(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "x" * 300})
    assert refuse(IndexMismatch, tmp_path).reason == "SHARD_MISSING"


def test_index_that_is_an_lfs_pointer_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", [byte("a")])
    (tmp_path / INDEX_NAME).write_bytes(lfs_pointer(23950))
    refusal = refuse(LfsPointer, tmp_path)
    assert refusal.metadata == {"file": INDEX_NAME, "size": "23950"}


def test_index_that_is_a_dangling_link_is_not_passed_over(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", [byte("a")])
    (tmp_path / INDEX_NAME).symlink_to("gone")
    refuse(CheckpointNotFound, tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}', '"\\ud800"', "\0"])
def test_malformed_config_is_refused(tmp_path: Path, text: str) -> None:
    write_file(tmp_path / "model.safetensors", [byte("a")])
    (tmp_path / "config.json").write_text(text)
    refusal = refuse(InvalidCheckpoint, tmp_path)
    assert refusal.reason == "INVALID_CONFIG"
    assert "config.json" in refusal.message


def test_config_is_read_as_it_is(tmp_path: Path) -> None:
    """Infinity stands in configs of state-space models; no other file may hold it."""
    write_file(tmp_path / "model.safetensors", [byte("a")])
    write_config(tmp_path, {"architectures": ["ModelX"], "time_step_limit": [0.0, float("inf")]})
    checkpoint = read(tmp_path)
    assert checkpoint.architecture == "ModelX"
    assert checkpoint.config == json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLM", 5, [5], {}])
def test_config_without_usable_architecture_names_none(
    tmp_path: Path, architectures: object
) -> None:
    write_file(tmp_path / "model.safetensors", [byte("model.embed_tokens.weight")])
    config = {"architectures": architectures, "tie_word_embeddings": True}
    write_config(tmp_path, config)
    checkpoint = read(tmp_path)
    assert checkpoint.architecture == ""
    assert plan_load(checkpoint, 1).architecture == "unknown"


# ---------------------------------------------------------------- things that are no files


def pipe(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [pipe, folder])
@pytest.mark.parametrize("name", ["s2.safetensors", "config.json", INDEX_NAME])
def test_pipe_or_folder_in_place_of_a_file_is_refused(
    tmp_path: Path, make: Callable[[Path], None], name: str
) -> None:
    write_sharded(tmp_path, [[byte("a")]])
    write_index(tmp_path, {"a": "model-00001-of-00001.safetensors", "b": "s2.safetensors"})
    write_file(tmp_path / "s2.safetensors", [byte("b")])
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    refusal = refuse(InvalidCheckpoint, tmp_path)
    assert refusal.reason == "NOT_A_FILE"
    assert name in refusal.message


def test_pipe_as_the_path_itself_is_refused(tmp_path: Path) -> None:
    pipe(tmp_path / "model")
    assert refuse(InvalidCheckpoint, tmp_path, "model").reason == "NOT_A_FILE"


def test_shard_that_links_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").symlink_to("x.safetensors")
    assert refuse(DataLoss, tmp_path).reason == "READ_FAILED"


def test_file_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    good = write_file(tmp_path / "a.safetensors", [byte("a")])
    good.rename(tmp_path / os.fsdecode(b"\xff.safetensors"))
    assert refuse(InvalidCheckpoint, tmp_path).reason == "INVALID_FILE_NAME"


# ---------------------------------------------------------------- A25: did the file change


def test_a25_identity_tells_that_a_file_changed(tmp_path: Path) -> None:
    """Truncated by another process, replaced under the same name, or rewritten in place."""
    path = tmp_path / "shard"
    path.write_bytes(b"a" * 65536)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        identity = file_identity(descriptor)
        assert identity == file_identity(descriptor)
        assert identity[0] == 65536
        subprocess.run(
            [sys.executable, "-c", "import os, sys; os.truncate(sys.argv[1], 4096)", path],
            check=True,
        )
        truncated = file_identity(descriptor)
        assert truncated[0] == 4096
        assert truncated[1] != identity[1]
        assert truncated[2] == identity[2]
        assert os.pread(descriptor, 100, 40960) == b""  # a reader survives it
    finally:
        os.close(descriptor)

    (tmp_path / "new").write_bytes(b"b" * 4096)
    (tmp_path / "new").replace(path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        replaced = file_identity(descriptor)
        assert replaced[0] == truncated[0]
        assert replaced[2] != identity[2]
        os.utime(path, ns=(0, replaced[1] + 1))
        assert file_identity(descriptor) != replaced
    finally:
        os.close(descriptor)
