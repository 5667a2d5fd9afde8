"""Where a checkpoint may lie: model root, symbolic links, Hugging Face cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loader_service.checkpoint.files import read_checkpoint, resolve_path
from loader_service.errors import CheckpointNotFound, PathOutsideRoot
from tests.checkpoints import (
    RawTensor,
    safetensors_file,
    write_config,
    write_file,
    write_hub_cache,
    write_index,
)

SHARD = safetensors_file([RawTensor("a", "U8", (1,), b"x")])
FILES = {
    "config.json": json.dumps({"architectures": ["HubModel"]}).encode(),
    "model.safetensors": SHARD,
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A model root that holds the checkpoint `inside`; `outside` lies beside the root."""
    for place in (tmp_path / "root" / "inside", tmp_path / "outside"):
        write_file(place / "model.safetensors", [RawTensor("a", "U8", (1,), b"x")])
        write_config(place, {})
    return tmp_path / "root"


def names(path: str | Path, root: Path) -> list[str]:
    return [tensor.name for tensor in read_checkpoint(str(path), str(root)).catalog]


def test_path_is_relative_to_the_root_or_absolute_inside_it(root: Path) -> None:
    for path in ("inside", "./inside/", "inside/../inside", str(root / "inside")):
        assert resolve_path(path, str(root)) == root / "inside"
        assert names(path, root) == ["a"]


@pytest.mark.parametrize(
    "path",
    [
        "..",
        "../outside",
        "inside/../../outside",
        "/etc",
        "/etc/passwd",
        "../outside/model.safetensors",
        "nowhere/../../outside/model.safetensors",
    ],
)
def test_path_that_leaves_the_root_is_refused(root: Path, path: str) -> None:
    with pytest.raises(PathOutsideRoot) as caught:
        read_checkpoint(path, str(root))
    assert caught.value.reason == "PATH_OUTSIDE_ROOT"


def test_root_beside_another_of_the_same_beginning_is_not_left(root: Path) -> None:
    (root.parent / "root2").mkdir()
    with pytest.raises(PathOutsideRoot):
        resolve_path("../root2", str(root))


def test_folder_link_that_leaves_the_root_is_refused(root: Path) -> None:
    (root / "link").symlink_to(root.parent / "outside")
    for path in ("link", "link/model.safetensors"):
        with pytest.raises(PathOutsideRoot):
            read_checkpoint(path, str(root))


def test_root_may_itself_be_a_link(root: Path) -> None:
    link = root.parent / "link"
    link.symlink_to(root)
    assert names("inside", link) == ["a"]
    assert names(link / "inside", link) == ["a"]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "model.safetensors.index.json"]
)
def test_file_link_that_leaves_the_root_is_refused(root: Path, name: str) -> None:
    write_index(root.parent / "outside", {"a": "model.safetensors"})
    (root / "inside" / name).unlink(missing_ok=True)
    (root / "inside" / name).symlink_to(root.parent / "outside" / name)
    with pytest.raises(PathOutsideRoot, match=name):
        read_checkpoint("inside", str(root))


def test_single_file_link_that_leaves_the_root_is_refused(root: Path) -> None:
    (root / "x.safetensors").symlink_to(root.parent / "outside" / "model.safetensors")
    with pytest.raises(PathOutsideRoot):
        resolve_path("x.safetensors", str(root))


def test_file_link_inside_the_root_is_followed_and_keeps_its_name(root: Path) -> None:
    folder = root / "linked"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to("../inside/model.safetensors")
    write_config(folder, {"architectures": ["Linked"]})
    for path in ("linked", "linked/model.safetensors"):
        checkpoint = read_checkpoint(path, str(root))
        assert checkpoint.architecture == "Linked"
        file = checkpoint.catalog.files["model.safetensors"]
        assert file.path == str(root / "inside" / "model.safetensors")


# ---------------------------------------------------------------- Hugging Face cache


def test_hub_repository_stands_for_its_main_snapshot(tmp_path: Path) -> None:
    snapshot = write_hub_cache(tmp_path, "org/name", FILES)
    for path in ("models--org--name", str(snapshot), str(snapshot / "model.safetensors")):
        checkpoint = read_checkpoint(path, str(tmp_path))
        assert Path(checkpoint.path) in {snapshot, snapshot / "model.safetensors"}
        assert checkpoint.architecture == "HubModel"
        blob = Path(checkpoint.catalog.files["model.safetensors"].path)
        assert blob.parent.name == "blobs"
        assert blob.read_bytes() == SHARD


def test_blobs_count_as_inside_when_the_snapshot_is(tmp_path: Path) -> None:
    """The model root may be the snapshot itself, whose blobs lie beside it."""
    snapshot = write_hub_cache(tmp_path, "org/name", FILES)
    assert names("", snapshot) == ["a"]
    assert names("model.safetensors", snapshot) == ["a"]


def test_only_the_blobs_of_the_same_repository_count_as_inside(tmp_path: Path) -> None:
    other = write_hub_cache(tmp_path, "org/other", FILES)
    snapshot = write_hub_cache(tmp_path, "org/name", FILES)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to((other / "model.safetensors").resolve())
    assert names("models--org--name", tmp_path) == ["a"]
    with pytest.raises(PathOutsideRoot):
        names("", snapshot)


def test_snapshot_outside_the_root_does_not_bring_its_blobs_in(tmp_path: Path, root: Path) -> None:
    snapshot = write_hub_cache(tmp_path / "outside", "org/name", FILES)
    for path in (snapshot, snapshot / "model.safetensors"):
        with pytest.raises(PathOutsideRoot):
            resolve_path(str(path), str(root))


@pytest.mark.parametrize(
    "revision", [b"gone", b"..", b"", b"a/b", b"\xff\xfe", b"a\0b", b"x" * 999]
)
def test_main_must_name_a_snapshot(tmp_path: Path, revision: bytes) -> None:
    snapshot = write_hub_cache(tmp_path, "org/name", FILES)
    (snapshot.parent.parent / "refs" / "main").write_bytes(revision)
    with pytest.raises(CheckpointNotFound, match="refs/main"):
        read_checkpoint("models--org--name", str(tmp_path))


def test_main_that_links_out_of_the_root_is_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("password")
    snapshot = write_hub_cache(tmp_path / "root", "org/name", FILES)
    main = snapshot.parent.parent / "refs" / "main"
    main.unlink()
    main.symlink_to(secret)
    with pytest.raises(PathOutsideRoot) as caught:
        read_checkpoint("models--org--name", str(tmp_path / "root"))
    assert "password" not in caught.value.message


def test_snapshot_that_links_out_of_the_root_is_refused(tmp_path: Path, root: Path) -> None:
    snapshot = write_hub_cache(root, "org/name", FILES)
    moved = tmp_path / "outside" / "snapshot"
    snapshot.rename(moved)
    snapshot.symlink_to(moved)
    with pytest.raises(PathOutsideRoot):
        resolve_path("models--org--name", str(root))


def test_folder_without_main_reference_is_read_as_it_is(tmp_path: Path) -> None:
    snapshot = write_hub_cache(tmp_path, "org/name", FILES)
    repository = snapshot.parent.parent
    (repository / "refs" / "main").unlink()
    assert resolve_path("models--org--name", str(tmp_path)) == repository
