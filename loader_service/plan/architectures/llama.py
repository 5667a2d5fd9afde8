"""Llama, Mistral, Qwen2 and Qwen3: decoders with separate q, k, v and gated feed-forward.

Source: `base_model_tp_plan` of the four configurations in transformers 5.24. Qwen2 adds biases to q, k
and v; Llama with `attention_bias` or `mlp_bias` adds them elsewhere; Qwen3 adds norms of one head's
width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from loader_service.checkpoint.catalog import TensorCatalog
from loader_service.plan.architectures.decoder import (
    AttentionHeads,
    decoder_layout,
    gated_feed_forward,
    head_norms,
    norms,
    rope_table,
    separate_attention,
)
from loader_service.plan.architectures.layout import Layout, Rule

__all__ = ["layout"]


def layout(config: Mapping[str, Any], catalog: TensorCatalog) -> Layout:
    """Return the rules of one checkpoint."""
    return decoder_layout(config, catalog, _layer(config))


def _layer(config: Mapping[str, Any]) -> Iterator[tuple[str, Rule]]:
    yield from separate_attention(AttentionHeads(config))
    yield from gated_feed_forward()
    yield from norms("input_layernorm", "post_attention_layernorm")
    yield from head_norms()
    yield from rope_table()
