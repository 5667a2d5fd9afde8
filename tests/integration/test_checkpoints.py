"""What workers hold after a load equals what the safetensors library cuts, SHA-256 by SHA-256."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from loader_service import demo
from loader_service.v1 import types_pb2
from tests.checkpoints import (
    ModelOptions,
    random_tensor,
    save_model,
    tensors_of_every_dtype,
    write_file,
)
from tests.cluster import Cluster
from tests.oracle import ExpectedSlice, expected_slices, original_bytes, reassemble

FAMILIES = {
    "llama-f32-shards": ModelOptions(dtype="F32", max_shard_size="8KB"),
    "llama-tied-bf16": ModelOptions(tied=True, kv_heads=1, attention_bias=True, mlp_bias=True),
    "mistral-f16": ModelOptions("mistral", "F16", heads=12, kv_heads=4, intermediate=36),
    "qwen2-bias": ModelOptions("qwen2", "BF16", heads=12, kv_heads=3, max_shard_size="8KB"),
    "qwen3-tied-f32": ModelOptions("qwen3", "F32", tied=True, head_size=8, heads=12, kv_heads=12),
    "gemma3-tied": ModelOptions("gemma3", tied=True, head_size=8, kv_heads=1),
    "phi3-fused": ModelOptions("phi3", "F32", kv_heads=2, max_shard_size="8KB"),
    "bert": ModelOptions("bert", "F32", heads=12, hidden=24, intermediate=36),
}


CASES = [
    (family, tp)
    for family, options in FAMILIES.items()
    for tp in (1, 2, 3, 4)
    if options.heads % tp == 0
    and (options.family == "bert" or options.kv_heads % tp == 0 or tp % options.kv_heads == 0)
]


@pytest.fixture
def tensors(shared_cluster: Cluster) -> Iterator[LoadedTensors]:
    loaded = LoadedTensors(shared_cluster)
    yield loaded
    loaded.unload()


class LoadedTensors:
    """Loads checkpoints one after another and returns what the workers then hold."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._load_id = ""

    def load(self, folder: Path, tp: int) -> list[dict[str, types_pb2.TensorSlice]]:
        self.unload()
        load = self._cluster.load(folder, tp)
        assert load.state == types_pb2.LOAD_STATE_SUCCEEDED, load.failure
        self._load_id = load.load_id
        assert all(rank.done_bytes == rank.total_bytes and rank.verified for rank in load.ranks)
        listed = self._cluster.call(
            lambda client: client.list_tensors(load.load_id, include_sha256=True)
        )
        return [{tensor.name: tensor for tensor in listed[rank]} for rank in range(tp)]

    def unload(self) -> None:
        if self._load_id:
            self._cluster.unload(self._load_id)
            self._load_id = ""


def assert_equal(
    held: list[dict[str, types_pb2.TensorSlice]], expected: list[dict[str, ExpectedSlice]]
) -> None:
    for ours, theirs in zip(held, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            wanted = theirs[name]
            assert tensor.sha256 == wanted.sha256, name
            assert (tensor.dtype, tuple(tensor.shape)) == (wanted.dtype, wanted.shape), name
            assert tensor.bytes == len(wanted.data), name
            assert tensor.padding_rows == wanted.padding_rows, name
            assert tuple(tensor.aliases) == wanted.aliases, name


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_the_real_checkpoint_is_held_slice_by_slice(tensors: LoadedTensors, tp: int) -> None:
    folder = demo.model_folder()
    expected = expected_slices(folder, tp)
    assert_equal(tensors.load(folder, tp), expected)
    # The expected slices put together are the file, hence so are the equal ones that are held.
    assert reassemble(folder, expected) == original_bytes(folder)


@pytest.mark.parametrize(("family", "tp"), CASES)
def test_checkpoints_of_transformers_are_held_slice_by_slice(
    tensors: LoadedTensors, tmp_path: Path, family: str, tp: int
) -> None:
    folder = save_model(tmp_path / "model", FAMILIES[family])
    expected = expected_slices(folder, tp)
    assert_equal(tensors.load(folder, tp), expected)
    assert reassemble(folder, expected) == original_bytes(folder)


def test_every_dtype_arrives_with_its_bytes(tensors: LoadedTensors, tmp_path: Path) -> None:
    """Scalars, zero-sized and unaligned tensors and sub-byte dtypes among them (A12, A14)."""
    written = [*tensors_of_every_dtype(), random_tensor("empty.0", "F32", (0,))]
    write_file(tmp_path / "model.safetensors", written)
    (held,) = tensors.load(tmp_path, 1)
    assert held.keys() == {tensor.name for tensor in written}
    for tensor in written:
        assert held[tensor.name].sha256 == hashlib.sha256(tensor.data).hexdigest(), tensor.name
        assert tuple(held[tensor.name].shape) == tuple(tensor.shape)
        assert held[tensor.name].dtype == tensor.dtype
