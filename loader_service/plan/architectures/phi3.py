"""Phi-3: q, k and v are one tensor, gate and up another; each part is cut for itself.

Source: `Phi3Attention` and `Phi3MLP` of transformers 5.24, which cut what the fused projections return in
the order query, key, value and gate, up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from loader_service.checkpoint.catalog import TensorCatalog
from loader_service.plan.architectures.decoder import (
    AttentionHeads,
    attention_output,
    decoder_layout,
    feed_forward_down,
    norms,
    rope_table,
)
from loader_service.plan.architectures.layout import Layout, Rule
from loader_service.plan.config import positive_int
from loader_service.plan.cuts import Even, Fused

__all__ = ["layout"]


def layout(config: Mapping[str, Any], catalog: TensorCatalog) -> Layout:
    """Return the rules of one checkpoint."""
    return decoder_layout(config, catalog, _layer(config))


def _layer(config: Mapping[str, Any]) -> Iterator[tuple[str, Rule]]:
    heads = AttentionHeads(config)
    queries = heads.query_heads * heads.head_size
    keys = heads.key_value_heads * heads.head_size
    attention = Fused(
        "fused", 0, ((queries, heads.query), (keys, heads.key_value), (keys, heads.key_value))
    )
    yield (
        "self_attn.qkv_proj.weight",
        Rule("attention_query_key_value", attention, "whole heads of query, key and value each"),
    )
    yield from attention_output(heads)
    width = positive_int(config, "intermediate_size")
    column = Even("column", 0)
    yield (
        "mlp.gate_up_proj.weight",
        Rule(
            "feed_forward_gate_up",
            Fused("fused", 0, ((width, column), (width, column))),
            "output dim of gate and of up",
        ),
    )
    yield from feed_forward_down()
    yield from norms("input_layernorm", "post_attention_layernorm")
    yield from rope_table()
