"""B11: the tied flag and the files may disagree in every direction."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader_service.checkpoint.files import read_checkpoint
from loader_service.errors import PlanRefused, TiedHeadDiffers
from loader_service.plan.planner import PlanOptions, plan_load
from loader_service.plan.slices import LoadPlan
from loader_service.plan.tied import TiedHeadPolicy
from tests.checkpoints import tensor_of_array, write_config, write_file

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
VALUES = np.arange(8, dtype=np.float32).reshape(4, 2)
NO_PLAN: dict[str, Any] = {}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
}
CONFIGS = pytest.mark.parametrize("config", [NO_PLAN, LLAMA], ids=["no-plan", "llama"])
HEADS = pytest.mark.parametrize("head", [VALUES, VALUES + 1], ids=["equal", "different"])


def plan_pair(
    folder: Path,
    config: dict[str, Any],
    head: np.ndarray | None,
    policy: TiedHeadPolicy = TiedHeadPolicy.VERIFY,
    tp: int = 1,
) -> LoadPlan:
    """Plan embed F32[4,2] = 0..7 and perhaps a head."""
    tensors = [tensor_of_array(EMBEDDING, VALUES)]
    if head is not None:
        tensors.append(tensor_of_array(HEAD, head))
    write_file(folder / "model.safetensors", tensors)
    write_config(folder, config)
    checkpoint = read_checkpoint(str(folder), str(folder))
    return plan_load(checkpoint, tp, PlanOptions(tied_head=policy))


@CONFIGS
@pytest.mark.parametrize("policy", TiedHeadPolicy)
def test_b11_tied_without_head_is_one_buffer_of_two_names(
    tmp_path: Path, config: dict[str, Any], policy: TiedHeadPolicy
) -> None:
    plan = plan_pair(tmp_path, config | {"tie_word_embeddings": True}, None, policy)
    (tensor,) = plan.tensors
    assert tensor.source.name == EMBEDDING
    assert tensor.slices[0].aliases == (HEAD,)
    assert tensor.twin is None
    assert plan.totals(0).resident_bytes == plan.source_bytes == 32
    assert not plan.tied_head_present
    assert plan.warnings == ()


@CONFIGS
@HEADS
def test_b11_tied_with_head_is_one_buffer_and_the_head_is_compared(
    tmp_path: Path, config: dict[str, Any], head: np.ndarray
) -> None:
    """A plan sees no bytes: whether they differ is found while reading, never passed over."""
    plan = plan_pair(tmp_path, config | {"tie_word_embeddings": True}, head)
    (tensor,) = plan.tensors
    assert tensor.slices[0].aliases == (HEAD,)
    assert tensor.twin is not None
    assert tensor.twin.name == HEAD
    assert plan.totals(0).resident_bytes == plan.totals(0).wire_bytes == 32
    assert plan.source_bytes == 64
    assert plan.tied_head_present
    (note,) = plan.warnings
    assert HEAD in note


@CONFIGS
@HEADS
def test_b11_obey_file_keeps_two_buffers(
    tmp_path: Path, config: dict[str, Any], head: np.ndarray
) -> None:
    tied = config | {"tie_word_embeddings": True}
    plan = plan_pair(tmp_path, tied, head, TiedHeadPolicy.OBEY_FILE)
    assert {tensor.source.name for tensor in plan.tensors} == {EMBEDDING, HEAD}
    assert all(tensor.twin is None for tensor in plan.tensors)
    assert all(tensor.slices[0].aliases == () for tensor in plan.tensors)
    assert plan.totals(0).resident_bytes == plan.source_bytes == 64
    assert plan.tied_head_present


@CONFIGS
def test_b11_trust_config_neither_keeps_nor_reads_the_head(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    tied = config | {"tie_word_embeddings": True}
    plan = plan_pair(tmp_path, tied, VALUES + 1, TiedHeadPolicy.TRUST_CONFIG)
    (tensor,) = plan.tensors
    assert tensor.slices[0].aliases == (HEAD,)
    assert tensor.twin is None
    assert plan.totals(0).resident_bytes == plan.source_bytes == 32
    assert plan.tied_head_present
    assert len(plan.warnings) == 1


@CONFIGS
@pytest.mark.parametrize("policy", TiedHeadPolicy)
def test_b11_untied_without_head_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], policy: TiedHeadPolicy
) -> None:
    with pytest.raises(PlanRefused, match=r"lm_head\.weight") as caught:
        plan_pair(tmp_path, config | {"tie_word_embeddings": False}, None, policy)
    assert caught.value.reason == "MISSING_TENSOR"
    assert caught.value.metadata["tensor"] == HEAD


@CONFIGS
def test_untied_with_head_is_two_tensors(tmp_path: Path, config: dict[str, Any]) -> None:
    plan = plan_pair(tmp_path, config | {"tie_word_embeddings": False}, VALUES)
    assert plan.totals(0).resident_bytes == 64
    assert not plan.tied_head_present
    assert plan.warnings == ()


@CONFIGS
@pytest.mark.parametrize(
    "head", [VALUES[:3], VALUES.astype(np.float16)], ids=["other-shape", "other-dtype"]
)
def test_head_that_cannot_be_the_embedding_is_refused_unless_a_policy_decides(
    tmp_path: Path, config: dict[str, Any], head: np.ndarray
) -> None:
    tied = config | {"tie_word_embeddings": True}
    with pytest.raises(TiedHeadDiffers, match=r"lm_head\.weight") as caught:
        plan_pair(tmp_path, tied, head)
    assert caught.value.reason == "TIED_HEAD_DIFFERS"
    obeyed = plan_pair(tmp_path, tied, head, TiedHeadPolicy.OBEY_FILE)
    assert obeyed.totals(0).resident_bytes == 32 + head.nbytes
    trusted = plan_pair(tmp_path, tied, head, TiedHeadPolicy.TRUST_CONFIG)
    assert trusted.totals(0).resident_bytes == 32


def test_absent_flag_means_untied_for_a_known_architecture(tmp_path: Path) -> None:
    with pytest.raises(PlanRefused, match=r"lm_head\.weight"):
        plan_pair(tmp_path, LLAMA, None)


@pytest.mark.parametrize("config", [NO_PLAN, {"architectures": ["GPT2Model"]}])
def test_absent_flag_says_nothing_without_a_plan(tmp_path: Path, config: dict[str, Any]) -> None:
    plan = plan_pair(tmp_path, config, None)
    assert plan.tensors[0].slices[0].aliases == ()


@pytest.mark.parametrize("tied", [True, False])
def test_bare_decoder_needs_no_head(tmp_path: Path, tied: bool) -> None:
    config = LLAMA | {"architectures": ["LlamaModel"], "tie_word_embeddings": tied}
    assert plan_pair(tmp_path, config, None).tensors[0].slices[0].aliases == ()


def test_twin_is_compared_whole_while_the_embedding_is_cut(tmp_path: Path) -> None:
    config = LLAMA | {"tie_word_embeddings": True}
    plan = plan_pair(tmp_path, config, VALUES, tp=3)
    (tensor,) = plan.tensors
    assert [piece.padding_rows for piece in tensor.slices] == [0, 0, 2]
    assert [piece.aliases for piece in tensor.slices] == [(HEAD,)] * 3
    assert tensor.twin is not None
    assert dataclasses.astuple(tensor.twin)[1:3] == ("F32", (4, 2))
    assert plan.source_bytes == 64
