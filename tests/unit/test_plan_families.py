"""Families against transformers: defaults of absent fields, and whether the slices compute the model.

A rank's slices are the weights of a smaller model of the same family, with a share of the heads, of the
feed-forward and of the vocabulary. Its modules must accept them under their names and shapes, and what
the ranks' modules return must add up to what the whole model's return.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from loader_service.checkpoint.catalog import Checkpoint, TensorCatalog, TensorInfo
from loader_service.errors import PlanRefused, TiedHeadDiffers
from loader_service.plan.architectures import family_of
from loader_service.plan.planner import plan_load
from tests.checkpoints import ModelOptions, payload_bytes, save_model
from tests.oracle import ExpectedSlice
from tests.plans import plan_folder, slices_of

MODELS = {
    "llama": ModelOptions("llama", "F32", attention_bias=True, mlp_bias=True, layers=1),
    "qwen3": ModelOptions("qwen3", "F32", head_size=8, tied=True, layers=1),
    "gemma2": ModelOptions("gemma2", "F32", head_size=8, attention_bias=True, tied=True, layers=1),
    "gemma3": ModelOptions("gemma3", "F32", head_size=6, kv_heads=1, layers=1),
    "phi3": ModelOptions("phi3", "F32", kv_heads=2, layers=1),
    "phi3-one-kv-head": ModelOptions("phi3", "F32", kv_heads=1, layers=1),
}
CONFIGS = {
    "BertModel": "BertConfig",
    "Gemma2ForCausalLM": "Gemma2Config",
    "Gemma2Model": "Gemma2Config",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "Gemma3TextModel": "Gemma3TextConfig",
    "LlamaForCausalLM": "LlamaConfig",
    "LlamaModel": "LlamaConfig",
    "MistralForCausalLM": "MistralConfig",
    "MistralModel": "MistralConfig",
    "Phi3ForCausalLM": "Phi3Config",
    "Phi3Model": "Phi3Config",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen2Model": "Qwen2Config",
    "Qwen3ForCausalLM": "Qwen3Config",
    "Qwen3Model": "Qwen3Config",
}
"""Every planned architecture and its config class in transformers."""

NUMBERS = {"num_hidden_layers": 1, "num_attention_heads": 8, "hidden_size": 16}
GEMMA: dict[str, Any] = NUMBERS | {"architectures": ["Gemma2ForCausalLM"]}
PHI: dict[str, Any] = NUMBERS | {"architectures": ["Phi3ForCausalLM"], "intermediate_size": 12}
LAYER = "model.layers.0."
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def checkpoint(config: Mapping[str, Any], **shapes: tuple[int, ...]) -> Checkpoint:
    """A checkpoint that exists as metadata only, in BF16."""
    tensors, offset = {}, 64
    for name, shape in shapes.items():
        nbytes = payload_bytes("BF16", shape)
        tensors[name] = TensorInfo(name, "BF16", shape, "model.safetensors", offset, nbytes)
        offset += nbytes
    return Checkpoint("/models/x", TensorCatalog(tensors, {}), config, ())


# ---------------------------------------------------------------- what the slices compute


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: save_model(root / name, options) for name, options in MODELS.items()}


def whole_model(folder: Path) -> Any:
    with warnings.catch_warnings():  # another project's deprecations are not what is tested
        warnings.simplefilter("ignore")
        import transformers

        transformers.utils.logging.disable_progress_bar()
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager"
        )


def rank_model(whole: Any, held: Mapping[str, ExpectedSlice], tp: int) -> Any:
    """The smaller model whose weights are what one rank holds; names and shapes must fit."""
    import torch

    config = copy.deepcopy(whole.config)
    if "head_dim" not in config.to_dict():
        config.head_dim = config.hidden_size // config.num_attention_heads
    config.num_attention_heads //= tp
    config.num_key_value_heads = max(1, config.num_key_value_heads // tp)
    config.intermediate_size //= tp
    config.vocab_size = math.ceil(config.vocab_size / tp)
    model = type(whole)(config)
    weights = {
        name: torch.frombuffer(bytearray(piece.data), dtype=torch.float32).reshape(piece.shape)
        for owner, piece in held.items()
        for name in (owner, *piece.aliases)
    }
    model.load_state_dict(weights, strict=True)
    return model


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_compute_together_what_the_whole_model_computes(
    folders: Mapping[str, Path], name: str, tp: int
) -> None:
    import torch

    whole = whole_model(folders[name])
    held = slices_of(plan_folder(folders[name], tp))
    ranks = [rank_model(whole, slices, tp) for slices in held]
    for model in ranks[1:]:  # biases of row-parallel weights are whole on every rank, added once
        for part in (model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj):
            if part.bias is not None:
                part.bias.data.zero_()

    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 3, whole.config.hidden_size, generator=generator)
    # Any numbers will do for the rotation's cosines and sines: they are the same for all ranks.
    width = whole.model.layers[0].self_attn.head_dim
    positions = tuple(torch.randn(2, 3, width, generator=generator) for _ in range(2))

    def attention(model: Any) -> Any:
        return model.model.layers[0].self_attn(x, positions, attention_mask=None)[0]

    def feed_forward(model: Any) -> Any:
        return model.model.layers[0].mlp(x)

    with torch.no_grad():
        for compute in (attention, feed_forward):
            together = torch.stack([compute(model) for model in ranks]).sum(0)
            torch.testing.assert_close(together, compute(whole), rtol=1e-4, atol=1e-4)
        # Rows of the vocabulary follow one another; the last are zero.
        logits = torch.cat([model.lm_head(x) for model in ranks], -1)
        vocabulary = whole.config.vocab_size
        torch.testing.assert_close(logits[..., :vocabulary], whole.lm_head(x), rtol=1e-4, atol=1e-4)
        assert not logits[..., vocabulary:].any()


# ---------------------------------------------------------------- fields that a config leaves out


@pytest.mark.parametrize("architecture", CONFIGS)
def test_absent_tied_flag_means_what_it_means_to_transformers(architecture: str) -> None:
    import transformers

    family = family_of(architecture)
    assert family is not None
    config = PHI | {"architectures": [architecture]}
    layout = family(config, TensorCatalog({}, {}))
    default = getattr(transformers, CONFIGS[architecture])().tie_word_embeddings
    assert layout.tied_by_default is (default and architecture != "BertModel")
    assert (layout.head is None) is not architecture.endswith("ForCausalLM")


def test_absent_head_size_and_key_value_heads_of_gemma_are_those_of_transformers() -> None:
    import transformers

    for name in ("Gemma2Config", "Gemma3TextConfig"):
        config = getattr(transformers, name)()
        assert (config.head_dim, config.num_key_value_heads) == (256, 4)
    shapes = {
        EMBEDDING: (9, 16),
        f"{LAYER}self_attn.q_proj.weight": (8 * 256, 16),
        f"{LAYER}self_attn.k_proj.weight": (4 * 256, 16),
    }
    plan = plan_load(checkpoint(GEMMA, **shapes), 8)
    assert [tensor.slices[7].shape for tensor in plan.tensors] == [(2, 16), (256, 16), (256, 16)]


def test_absent_key_value_heads_of_phi_are_the_query_heads() -> None:
    name = f"{LAYER}self_attn.qkv_proj.weight"
    plan = plan_load(checkpoint(PHI, **{name: (3 * 16, 16)}), 8)
    assert [(run.source_offset, run.length) for run in plan.tensors[0].slices[1].runs] == [
        (32 * (base + 2), 64) for base in (0, 16, 32)
    ]


# ---------------------------------------------------------------- Gemma's head


@pytest.mark.parametrize("quantised", [False, True])
def test_gemma_that_does_not_say_is_tied(quantised: bool) -> None:
    config = GEMMA | ({"quantization_config": {"quant_method": "gptq"}} if quantised else {})
    (tensor,) = plan_load(checkpoint(config, **{EMBEDDING: (9, 16)}), 1).tensors
    assert tensor.slices[0].aliases == (HEAD,)

    both = plan_load(checkpoint(config, **{EMBEDDING: (9, 16), HEAD: (9, 16)}), 1)
    (tensor,) = both.tensors
    assert both.tied_head_present
    assert tensor.twin is not None
    with pytest.raises(TiedHeadDiffers):
        plan_load(checkpoint(config, **{EMBEDDING: (9, 16), HEAD: (8, 16)}), 1)


def test_gemma_that_says_no_is_not_tied() -> None:
    config = GEMMA | {"tie_word_embeddings": False}
    plan = plan_load(checkpoint(config, **{EMBEDDING: (9, 16), HEAD: (9, 16)}), 2)
    assert [tensor.slices[0].aliases for tensor in plan.tensors] == [(), ()]
    with pytest.raises(PlanRefused, match="lm_head"):
        plan_load(checkpoint(config, **{EMBEDDING: (9, 16)}), 2)


def test_quantised_llama_that_does_not_say_is_loaded_as_it_is() -> None:
    """Its head may be stored under a quantised name, so a missing one proves nothing."""
    config = NUMBERS | {"architectures": ["LlamaForCausalLM"], "quantization_config": {"bits": 4}}
    (tensor,) = plan_load(checkpoint(config, **{EMBEDDING: (9, 16)}), 1).tensors
    assert tensor.slices[0].aliases == ()


# ---------------------------------------------------------------- names and shapes


@pytest.mark.parametrize("config", [GEMMA, PHI], ids=["gemma", "phi"])
def test_stored_rope_tables_are_replicated(config: dict[str, Any]) -> None:
    name = f"{LAYER}self_attn.rotary_emb.inv_freq"
    (tensor,) = plan_load(checkpoint(config, **{name: (2,)}), 2).tensors
    assert (tensor.role, tensor.cut) == ("rope_table", "replicated")


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        ("self_attn.qkv_proj.weight", 40, r"40, not 16 \+ 16 \+ 16"),
        ("mlp.gate_up_proj.weight", 12, r"12, not 12 \+ 12"),
    ],
)
def test_fused_tensor_of_other_parts_than_the_config_says_is_refused(
    name: str, rows: int, words: str
) -> None:
    with pytest.raises(PlanRefused, match=words) as caught:
        plan_load(checkpoint(PHI, **{LAYER + name: (rows, 16)}), 1)
    assert caught.value.reason == "SHAPE_MISMATCH"


@pytest.mark.parametrize(
    "name", ["self_attn.qkv_proj.bias", "self_attn.q_proj.weight", "mlp.gate_proj.weight"]
)
def test_phi_does_not_guess_at_tensors_that_its_model_has_not(name: str) -> None:
    with pytest.raises(PlanRefused) as caught:
        plan_load(checkpoint(PHI, **{LAYER + name: (16, 16)}), 2)
    assert caught.value.reason == "UNKNOWN_TENSOR"


def test_gemma_with_images_has_no_plan() -> None:
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": GEMMA}
    with pytest.raises(PlanRefused) as caught:
        plan_load(checkpoint(config, **{EMBEDDING: (9, 16)}), 2)
    assert caught.value.reason == "UNSUPPORTED_ARCHITECTURE"
