"""Rules that the decoder families share: attention by heads, a gated feed-forward, embedding and head.

Embedding and head are both cut by vocabulary, so that a tied pair is one slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from loader_service.checkpoint.catalog import TensorCatalog
from loader_service.plan.architectures.layout import Layout, Rule
from loader_service.plan.config import architectures, layer_count, positive_int
from loader_service.plan.cuts import Even, Heads, Replicated, Vocab

__all__ = [
    "AttentionHeads",
    "attention_output",
    "decoder_layout",
    "feed_forward_down",
    "gated_feed_forward",
    "head_norms",
    "norms",
    "rope_table",
    "separate_attention",
]

HEAD = "lm_head.weight"
WHOLE = Replicated()
_ADDED_ONCE = Rule("row_bias", WHOLE, "row-parallel bias: whole on every rank, added once")


class AttentionHeads:
    """Heads of an attention layer and how query, key and value dims are cut.

    Attributes:
        query_heads: number of query heads.
        key_value_heads: number of key and value heads.
        head_size: width of one head.
        query: whole query heads.
        key_value: whole key and value heads; ranks share one where there are fewer than ranks.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        key_value_heads: int | None = None,
        head_size: int | None = None,
    ) -> None:
        """Read the config; the arguments are the family's defaults for fields that are absent.

        Args:
            config: `config.json`.
            key_value_heads: None is as many as query heads.
            head_size: None is hidden size by query heads.

        Raises:
            InvalidCheckpoint: INVALID_CONFIG, naming the field.
        """
        self.query_heads = positive_int(config, "num_attention_heads")
        self.key_value_heads = positive_int(
            config, "num_key_value_heads", default=key_value_heads or self.query_heads
        )
        if head_size is None:
            head_size = positive_int(config, "hidden_size") // self.query_heads
        self.head_size = positive_int(config, "head_dim", default=head_size)
        self.query = Heads("column", 0, self.query_heads, self.head_size, replicable=False)
        self.key_value = Heads("column", 0, self.key_value_heads, self.head_size, replicable=True)


def decoder_layout(
    config: Mapping[str, Any],
    catalog: TensorCatalog,
    layer_rules: Iterable[tuple[str, Rule]],
    *,
    tied_by_default: bool = False,
) -> Layout:
    """Return the rules of a decoder; names carry `model.` except in a checkpoint without a head.

    Args:
        config: `config.json`.
        catalog: the checkpoint's tensors.
        layer_rules: rules of one layer by name inside the layer.
        tied_by_default: what an absent `tie_word_embeddings` means in this family.
    """
    prefix = "model." if catalog.by_prefix("model.") else ""
    embedding = f"{prefix}embed_tokens.weight"
    rules = {
        embedding: Rule("embedding", Vocab(), "vocabulary rows, zero rows on the last ranks"),
        HEAD: Rule("output", Vocab(), "vocabulary rows, zero rows on the last ranks"),
        f"{prefix}norm.weight": Rule("final_norm", WHOLE, "every rank norms whole rows"),
    }
    of_a_layer = list(layer_rules)
    for layer in range(layer_count(config)):
        for name, rule in of_a_layer:
            rules[f"{prefix}layers.{layer}.{name}"] = rule
    headless = any(name.endswith("Model") for name in architectures(config))
    return Layout(rules, embedding, None if headless else HEAD, tied_by_default)


def separate_attention(heads: AttentionHeads) -> Iterator[tuple[str, Rule]]:
    """Yield the rules of q, k and v as tensors of their own, and of the output."""
    shared = "whole key/value heads; ranks share one where there are fewer heads than ranks"
    for part, role, cut, reason in (
        ("q_proj", "attention_query", heads.query, "whole query heads"),
        ("k_proj", "attention_key", heads.key_value, shared),
        ("v_proj", "attention_value", heads.key_value, shared),
    ):
        yield f"self_attn.{part}.weight", Rule(role, cut, reason)
        yield f"self_attn.{part}.bias", Rule(f"{role}_bias", cut, "follows its weight's rows")
    yield from attention_output(heads)


def attention_output(heads: AttentionHeads) -> Iterator[tuple[str, Rule]]:
    """Yield the rules of the output projection."""
    cut = Heads("row", 1, heads.query_heads, heads.head_size, replicable=False)
    yield (
        "self_attn.o_proj.weight",
        Rule("attention_output", cut, "input dim follows the query heads"),
    )
    yield "self_attn.o_proj.bias", _ADDED_ONCE


def gated_feed_forward() -> Iterator[tuple[str, Rule]]:
    """Yield the rules of gate and up as tensors of their own, and of down."""
    column = Even("column", 0)
    for part, role in (("gate_proj", "gate"), ("up_proj", "up")):
        yield f"mlp.{part}.weight", Rule(f"feed_forward_{role}", column, "output dim")
        yield (
            f"mlp.{part}.bias",
            Rule(f"feed_forward_{role}_bias", column, "follows its weight's rows"),
        )
    yield from feed_forward_down()


def feed_forward_down() -> Iterator[tuple[str, Rule]]:
    """Yield the rules of the projection back to the hidden size."""
    yield (
        "mlp.down_proj.weight",
        Rule("feed_forward_down", Even("row", 1), "input dim follows gate and up"),
    )
    yield "mlp.down_proj.bias", _ADDED_ONCE


def norms(*names: str) -> Iterator[tuple[str, Rule]]:
    """Yield the rules of norms over whole rows."""
    for name in names:
        yield f"{name}.weight", Rule("norm", WHOLE, "every rank norms whole rows")


def head_norms() -> Iterator[tuple[str, Rule]]:
    """Yield the rules of norms over single query and key heads."""
    for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
        yield name, Rule("head_norm", WHOLE, "one head's width, the same for all heads")


def rope_table() -> Iterator[tuple[str, Rule]]:
    """Yield the rule of a layer's rotary frequencies, which older checkpoints store."""
    yield (
        "self_attn.rotary_emb.inv_freq",
        Rule("rope_table", WHOLE, "derived from the config, the same for all ranks"),
    )
