"""Gemma 2 and the text side of Gemma 3: like Llama, with four norms a layer and wider heads.

Source: `Gemma2Config`, `Gemma3TextConfig` and their models in transformers 5.24. The head size does not
follow from the hidden size; the head is tied unless the config says otherwise. Gemma 3 adds norms of
one head's width.
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

HEAD_SIZE, KEY_VALUE_HEADS = 256, 4
"""Values of the configurations' absent fields."""


def layout(config: Mapping[str, Any], catalog: TensorCatalog) -> Layout:
    """Return the rules of one checkpoint."""
    return decoder_layout(config, catalog, _layer(config), tied_by_default=True)


def _layer(config: Mapping[str, Any]) -> Iterator[tuple[str, Rule]]:
    yield from separate_attention(
        AttentionHeads(config, key_value_heads=KEY_VALUE_HEADS, head_size=HEAD_SIZE)
    )
    yield from gated_feed_forward()
    yield from norms(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    yield from head_norms()
    yield from rope_table()
