"""BERT, the plain encoder: separate query, key and value with biases, feed-forward without a gate.

Source: `BertModel` of transformers 5.24 and the names in all-MiniLM-L6-v2. Heads of task models
(`cls.*`, `classifier.*`) are not planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from loader_service.checkpoint.catalog import TensorCatalog
from loader_service.plan.architectures.layout import Layout, Rule
from loader_service.plan.config import layer_count, positive_int
from loader_service.plan.cuts import Even, Heads, Replicated, Vocab

__all__ = ["layout"]


def layout(config: Mapping[str, Any], catalog: TensorCatalog) -> Layout:
    """Return the rules; names carry `bert.` where the encoder is part of a task model."""
    prefix = "bert." if catalog.by_prefix("bert.") else ""
    embedding = f"{prefix}embeddings.word_embeddings.weight"
    rules = {embedding: Rule("embedding", Vocab(), "vocabulary rows, zero rows on the last ranks")}
    for name, role in (
        ("embeddings.position_embeddings.weight", "position_embedding"),
        ("embeddings.token_type_embeddings.weight", "token_type_embedding"),
        ("embeddings.position_ids", "position_ids"),
        ("embeddings.LayerNorm.weight", "norm"),
        ("embeddings.LayerNorm.bias", "norm"),
        ("pooler.dense.weight", "pooler"),
        ("pooler.dense.bias", "pooler_bias"),
    ):
        rules[prefix + name] = Rule(role, Replicated(), "small, every rank needs all of it")
    layer_rules = list(_layer(config))
    for layer in range(layer_count(config)):
        for name, rule in layer_rules:
            rules[f"{prefix}encoder.layer.{layer}.{name}"] = rule
    return Layout(rules, embedding, head=None)


def _layer(config: Mapping[str, Any]) -> Iterator[tuple[str, Rule]]:
    heads = positive_int(config, "num_attention_heads")
    head_size = positive_int(config, "hidden_size") // heads
    column = Heads("column", 0, heads, head_size, replicable=False)
    for part in ("query", "key", "value"):
        role = f"attention_{part}"
        yield f"attention.self.{part}.weight", Rule(role, column, "whole heads")
        yield (
            f"attention.self.{part}.bias",
            Rule(f"{role}_bias", column, "follows its weight's rows"),
        )
    yield (
        "attention.output.dense.weight",
        Rule(
            "attention_output",
            Heads("row", 1, heads, head_size, replicable=False),
            "input dim follows the heads",
        ),
    )
    yield "intermediate.dense.weight", Rule("feed_forward_up", Even("column", 0), "output dim")
    yield (
        "intermediate.dense.bias",
        Rule("feed_forward_up_bias", Even("column", 0), "follows its weight's rows"),
    )
    yield "output.dense.weight", Rule("feed_forward_down", Even("row", 1), "input dim")
    for part in ("attention.output", "output"):
        yield (
            f"{part}.dense.bias",
            Rule("row_bias", Replicated(), "row-parallel bias: whole on every rank, added once"),
        )
        for name in ("weight", "bias"):
            yield (
                f"{part}.LayerNorm.{name}",
                Rule("norm", Replicated(), "every rank norms whole rows"),
            )
