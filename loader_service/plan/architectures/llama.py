"""Llama, Mistral, Qwen2 and Qwen3: decoders with separate q, k, v and gated feed-forward.

Source: `base_model_tp_plan` of the four configurations in transformers 5.24. Embedding and head are
both cut by vocabulary here, so that a tied pair is one slice. Qwen2 adds biases to q, k and v; Llama
with `attention_bias` or `mlp_bias` adds them elsewhere; Qwen3 adds norms of one head's width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from loader_service.checkpoint.catalog import TensorCatalog
from loader_service.plan.architectures.layout import Layout, Rule
from loader_service.plan.config import architectures, layer_count, positive_int
from loader_service.plan.cuts import Even, Heads, Replicated, Vocab

__all__ = ["layout"]

HEAD = "lm_head.weight"


def layout(config: Mapping[str, Any], catalog: TensorCatalog) -> Layout:
    """Return the rules; names carry `model.` except in a checkpoint of the bare decoder."""
    prefix = "model." if catalog.by_prefix("model.") else ""
    embedding = f"{prefix}embed_tokens.weight"
    rules = {
        embedding: Rule("embedding", Vocab(), "vocabulary rows, zero rows on the last ranks"),
        HEAD: Rule("output", Vocab(), "vocabulary rows, zero rows on the last ranks"),
        f"{prefix}norm.weight": Rule("final_norm", Replicated(), "every rank norms whole rows"),
    }
    layer_rules = list(_layer(config))
    for layer in range(layer_count(config)):
        for name, rule in layer_rules:
            rules[f"{prefix}layers.{layer}.{name}"] = rule
    return Layout(rules, embedding, None if _headless(config) else HEAD)


def _headless(config: Mapping[str, Any]) -> bool:
    return any(name.endswith("Model") for name in architectures(config))


def _layer(config: Mapping[str, Any]) -> Iterator[tuple[str, Rule]]:
    query_heads = positive_int(config, "num_attention_heads")
    kv_heads = positive_int(config, "num_key_value_heads", default=query_heads)
    head_size = positive_int(
        config, "head_dim", default=positive_int(config, "hidden_size") // query_heads
    )
    query = Heads("column", 0, query_heads, head_size, replicable=False)
    key_value = Heads("column", 0, kv_heads, head_size, replicable=True)
    column, row, whole = Even("column", 0), Even("row", 1), Replicated()

    shared = "whole key/value heads; ranks share one where there are fewer heads than ranks"
    for part, role, cut, reason in (
        ("q_proj", "attention_query", query, "whole query heads"),
        ("k_proj", "attention_key", key_value, shared),
        ("v_proj", "attention_value", key_value, shared),
    ):
        yield f"self_attn.{part}.weight", Rule(role, cut, reason)
        yield f"self_attn.{part}.bias", Rule(f"{role}_bias", cut, "follows its weight's rows")
    yield (
        "self_attn.o_proj.weight",
        Rule(
            "attention_output",
            Heads("row", 1, query_heads, head_size, replicable=False),
            "input dim follows the query heads",
        ),
    )
    for part, role in (("gate_proj", "gate"), ("up_proj", "up")):
        yield f"mlp.{part}.weight", Rule(f"feed_forward_{role}", column, "output dim")
        yield (
            f"mlp.{part}.bias",
            Rule(f"feed_forward_{role}_bias", column, "follows its weight's rows"),
        )
    yield "mlp.down_proj.weight", Rule("feed_forward_down", row, "input dim follows gate and up")
    for name in ("self_attn.o_proj.bias", "mlp.down_proj.bias"):
        yield name, Rule("row_bias", whole, "row-parallel bias: whole on every rank, added once")
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        yield name, Rule("norm", whole, "every rank norms whole rows")
    for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
        yield name, Rule("head_norm", whole, "one head's width, the same for all heads")
    yield (
        "self_attn.rotary_emb.inv_freq",
        Rule("rope_table", whole, "derived from the config, the same for all ranks"),
    )
