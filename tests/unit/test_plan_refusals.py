"""What cannot be planned, and what the refusal says."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import grpc
import pytest

from loader_service.checkpoint.catalog import Checkpoint, TensorCatalog, TensorInfo
from loader_service.errors import InvalidCheckpoint, InvalidRequest, PlanRefused
from loader_service.plan.planner import MAX_TP, PlanOptions, UnknownTensorPolicy, plan_load
from tests.checkpoints import payload_bytes

REPLICATE = PlanOptions(unknown_tensors=UnknownTensorPolicy.REPLICATE)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
}
LAYER = "model.layers.0."
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (10, 8),
    "lm_head.weight": (10, 8),
    "model.norm.weight": (8,),
    f"{LAYER}self_attn.q_proj.weight": (8, 8),
    f"{LAYER}self_attn.k_proj.weight": (4, 8),
    f"{LAYER}self_attn.v_proj.weight": (4, 8),
    f"{LAYER}self_attn.o_proj.weight": (8, 8),
    f"{LAYER}mlp.gate_proj.weight": (12, 8),
    f"{LAYER}mlp.up_proj.weight": (12, 8),
    f"{LAYER}mlp.down_proj.weight": (8, 12),
}


def checkpoint(
    config: Mapping[str, Any] | None = CONFIG,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    dtypes: Mapping[str, str] | None = None,
) -> Checkpoint:
    """A checkpoint that exists as metadata only; tensors are BF16 where `dtypes` names no other."""
    tensors = {}
    offset = 100
    for name, shape in shapes.items():
        dtype = (dtypes or {}).get(name, "BF16")
        nbytes = payload_bytes(dtype, shape)
        tensors[name] = TensorInfo(name, dtype, shape, "model.safetensors", offset, nbytes)
        offset += nbytes
    return Checkpoint("/models/x", TensorCatalog(tensors, {}), config, ())


def refuse(made: Checkpoint, tp: int, options: PlanOptions | None = None) -> PlanRefused:
    with pytest.raises(PlanRefused) as caught:
        plan_load(made, tp, options)
    assert caught.value.status is grpc.StatusCode.FAILED_PRECONDITION
    return caught.value


def test_the_checkpoint_of_these_tests_can_be_planned() -> None:
    assert plan_load(checkpoint(), 4).architecture == "LlamaForCausalLM"


# ---------------------------------------------------------------- group sizes


@pytest.mark.parametrize("tp", [0, -1, MAX_TP + 1])
def test_group_size_out_of_range_is_an_invalid_request(tp: int) -> None:
    with pytest.raises(InvalidRequest, match=str(tp)) as caught:
        plan_load(checkpoint(), tp)
    assert caught.value.metadata["field"] == "tp"


@pytest.mark.parametrize(
    ("change", "tp", "tensor", "valid"),
    [
        ({}, 3, "k_proj", (1, 2, 4)),
        ({}, 6, "o_proj", (1, 2, 4)),
        ({"num_attention_heads": 8, "head_dim": 1, "num_key_value_heads": 4}, 8, "down", (1, 2, 4)),
    ],
    ids=["key-value-heads", "query-heads", "feed-forward"],
)
def test_group_size_that_does_not_divide_is_refused(
    change: dict[str, Any], tp: int, tensor: str, valid: tuple[int, ...]
) -> None:
    refusal = refuse(checkpoint(CONFIG | change), tp)
    assert refusal.reason == "TP_NOT_DIVISIBLE"
    assert tensor in refusal.metadata["tensor"]
    assert tensor in refusal.message
    assert refusal.valid_tp == valid
    assert ", ".join(map(str, valid)) in refusal.message


# ---------------------------------------------------------------- architectures and names


def test_missing_config_allows_only_the_whole_checkpoint() -> None:
    plan = plan_load(checkpoint(None), 1)
    assert plan.architecture == "unknown"
    assert plan.totals(0).resident_bytes == plan.source_bytes
    refusal = refuse(checkpoint(None), 2)
    assert refusal.reason == "CONFIG_MISSING"
    assert refusal.valid_tp == (1,)


@pytest.mark.parametrize("config", [{}, {"architectures": []}, {"architectures": "Llama"}])
def test_config_that_names_no_architecture_counts_as_missing(config: dict[str, Any]) -> None:
    assert refuse(checkpoint(config), 2).reason == "CONFIG_MISSING"


def test_architecture_without_a_plan_is_refused_by_name() -> None:
    refusal = refuse(checkpoint({"architectures": ["FalconForCausalLM"]}), 2)
    assert refusal.reason == "UNSUPPORTED_ARCHITECTURE"
    assert refusal.metadata["architecture"] == "FalconForCausalLM"
    assert "'FalconForCausalLM'" in refusal.message
    assert "--unknown replicate" in refusal.message
    assert refusal.valid_tp == (1,)


@pytest.mark.parametrize("config", [None, {"architectures": ["FalconForCausalLM"]}])
def test_replicate_puts_every_tensor_on_every_rank(config: dict[str, Any] | None) -> None:
    plan = plan_load(checkpoint(config), 3, REPLICATE)
    assert {tensor.cut for tensor in plan.tensors} == {"replicated"}
    assert {tensor.role for tensor in plan.tensors} == {"unknown"}
    for rank in range(3):
        totals = plan.totals(rank)
        assert totals.resident_bytes == totals.replicated_bytes == plan.source_bytes


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.00.mlp.up_proj.weight",
        f"{LAYER}mlp.up_proj.weight_scale",
        "xmodel.norm.weight",
        "layers.0.mlp.up_proj.weight",
    ],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_tensor_that_the_plan_does_not_know_is_refused_by_name(name: str, tp: int) -> None:
    made = checkpoint(shapes=SHAPES | {name: (12, 8)})
    refusal = refuse(made, tp)
    assert refusal.reason == "UNKNOWN_TENSOR"
    assert refusal.metadata["tensors"] == name
    assert name in refusal.message

    plan = plan_load(made, tp, REPLICATE)
    unknown = next(tensor for tensor in plan.tensors if tensor.source.name == name)
    assert (unknown.cut, unknown.role) == ("replicated", "unknown")
    assert unknown.slices[tp - 1].shape == (12, 8)
    known = next(tensor for tensor in plan.tensors if "gate_proj" in tensor.source.name)
    assert known.slices[0].shape == (12 // tp, 8)


def test_many_unknown_tensors_are_counted() -> None:
    refusal = refuse(checkpoint(shapes=SHAPES | {f"x{i}": (1,) for i in range(9)}), 2)
    assert "x0, x1, x2, x3, x4 and 4 more" in refusal.message


def test_quantised_checkpoint_is_loaded_whole_only() -> None:
    made = checkpoint(CONFIG | {"quantization_config": {"quant_method": "gptq"}})
    refusal = refuse(made, 2)
    assert refusal.reason == "UNSUPPORTED_QUANTIZATION"
    assert refusal.valid_tp == (1,)
    assert refuse(made, 2, REPLICATE).reason == "UNSUPPORTED_QUANTIZATION"
    assert plan_load(made, 1).architecture == "LlamaForCausalLM"


def test_stored_rope_table_is_replicated() -> None:
    name = f"{LAYER}self_attn.rotary_emb.inv_freq"
    plan = plan_load(checkpoint(shapes=SHAPES | {name: (1,)}), 2)
    assert next(t for t in plan.tensors if t.source.name == name).cut == "replicated"


def test_empty_checkpoint_is_refused() -> None:
    with pytest.raises(InvalidCheckpoint, match="no tensor") as caught:
        plan_load(checkpoint(shapes={}), 1)
    assert caught.value.reason == "EMPTY_CHECKPOINT"


# ---------------------------------------------------------------- shapes and configs that lie


@pytest.mark.parametrize("shape", [(), (8,)], ids=["scalar", "vector"])
@pytest.mark.parametrize("tp", [1, 2])
def test_weight_without_the_dim_to_cut_is_refused(shape: tuple[int, ...], tp: int) -> None:
    name = f"{LAYER}mlp.down_proj.weight"
    refusal = refuse(checkpoint(shapes=SHAPES | {name: shape}), tp)
    assert refusal.reason == "SHAPE_MISMATCH"
    assert refusal.metadata["tensor"] == name
    assert refusal.valid_tp == ()


@pytest.mark.parametrize("tp", [1, 2])
def test_weight_with_another_head_count_than_the_config_says_is_refused(tp: int) -> None:
    refusal = refuse(checkpoint(CONFIG | {"num_key_value_heads": 1, "head_dim": 2}), tp)
    assert refusal.reason == "SHAPE_MISMATCH"
    assert "k_proj" in refusal.metadata["tensor"]
    assert "dim 0 is 4, not 1 heads of 2" in refusal.message
    assert "group sizes that fit: none" in refusal.message
    assert refusal.valid_tp == ()


def test_scalar_that_is_replicated_is_planned() -> None:
    plan = plan_load(checkpoint(shapes=SHAPES | {"scale": ()}), 2, REPLICATE)
    scale = next(t for t in plan.tensors if t.source.name == "scale").slices[1]
    assert (scale.shape, scale.nbytes, scale.wire_bytes) == ((), 2, 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 0),
        ("num_hidden_layers", "1"),
        ("num_hidden_layers", True),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", None),
        ("num_attention_heads", -4),
        ("num_attention_heads", 4.0),
        ("num_key_value_heads", 0),
        ("head_dim", 0),
        ("hidden_size", [8]),
        ("tie_word_embeddings", "true"),
    ],
)
def test_config_with_a_senseless_number_is_refused_by_field(field: str, value: object) -> None:
    start = time.perf_counter()
    with pytest.raises(InvalidCheckpoint, match=field) as caught:
        plan_load(checkpoint(CONFIG | {field: value}), 2)
    assert caught.value.reason == "INVALID_CONFIG"
    assert caught.value.metadata["field"] == field
    assert time.perf_counter() - start < 1


def test_null_head_dim_and_missing_key_value_heads_mean_the_defaults() -> None:
    config = CONFIG | {"head_dim": None}
    del config["num_key_value_heads"]
    shapes = SHAPES | {f"{LAYER}self_attn.{part}_proj.weight": (8, 8) for part in "kv"}
    plan = plan_load(checkpoint(config, shapes), 4)
    key = next(t for t in plan.tensors if t.role == "attention_key")
    assert key.slices[0].shape == (2, 8)


# ---------------------------------------------------------------- A14: packed dtypes


def test_a14_cut_inside_a_byte_is_refused_with_the_sizes_that_fit() -> None:
    """Twelve rows of 3 four-bit elements: 4 ranks would get 36 bits each, 2 ranks get 72."""
    name = f"{LAYER}mlp.up_proj.weight"
    made = checkpoint(shapes=SHAPES | {name: (12, 3)}, dtypes={name: "F4"})
    refusal = refuse(made, 4)
    assert refusal.reason == "SUB_BYTE_CUT"
    assert refusal.metadata["dtype"] == "F4"
    assert name in refusal.message
    assert refusal.valid_tp == (1, 2)
    up = next(t for t in plan_load(made, 2).tensors if t.source.name == name)
    assert [piece.nbytes for piece in up.slices] == [9, 9]


def test_a14_sizes_that_fit_are_found_quickly_for_packed_dtypes() -> None:
    """Boundaries are looked at where the dims allow the size, not for every size up to the bound."""
    made = checkpoint(dtypes=dict.fromkeys(SHAPES, "F4"))
    start = time.perf_counter()
    refusal = refuse(made, 4)
    assert refusal.reason == "SUB_BYTE_CUT"
    assert refusal.valid_tp == (1, 2)
    assert time.perf_counter() - start < 1
