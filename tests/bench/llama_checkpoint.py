"""Writes Llama-shaped BF16 checkpoints, random payload, four shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

SHARDS = 4


class Shapes(NamedTuple):
    """What the tensors' shapes follow from."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int


LLAMA_1B = Shapes(16, 2048, 8192, 32, 8, 32000)
"""Llama-3.2-1B with an untied head and a smaller vocabulary: about 2 GiB, of it 116 MiB a layer."""

LLAMA_8B = Shapes(32, 4096, 14336, 32, 8, 128256)
"""Llama-3-8B: 16.06 GB."""


def write_checkpoint(folder: Path, shapes: Shapes = LLAMA_1B) -> None:
    """Write a checkpoint, unless it is there already."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(shapes)
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        part = tensors[shard * len(tensors) // SHARDS : (shard + 1) * len(tensors) // SHARDS]
        _write_shard(folder / name, part, seed=shard)
        weight_map |= dict.fromkeys((tensor for tensor, _ in part), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shapes.hidden,
        "intermediate_size": shapes.intermediate,
        "num_attention_heads": shapes.heads,
        "num_hidden_layers": shapes.layers,
        "num_key_value_heads": shapes.kv_heads,
        "tie_word_embeddings": False,
        "vocab_size": shapes.vocab,
    }
    # Written last: it says that the rest is whole.
    (folder / "config.json").write_text(json.dumps(config))


def _tensors(shapes: Shapes) -> list[tuple[str, tuple[int, ...]]]:
    _, hidden, intermediate, heads, kv_heads, vocab = shapes
    head_size = hidden // heads
    tensors: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (vocab, hidden))]
    for layer in range(shapes.layers):
        prefix = f"model.layers.{layer}"
        tensors += [
            (f"{prefix}.input_layernorm.weight", (hidden,)),
            (f"{prefix}.self_attn.q_proj.weight", (hidden, hidden)),
            (f"{prefix}.self_attn.k_proj.weight", (kv_heads * head_size, hidden)),
            (f"{prefix}.self_attn.v_proj.weight", (kv_heads * head_size, hidden)),
            (f"{prefix}.self_attn.o_proj.weight", (hidden, hidden)),
            (f"{prefix}.post_attention_layernorm.weight", (hidden,)),
            (f"{prefix}.mlp.gate_proj.weight", (intermediate, hidden)),
            (f"{prefix}.mlp.up_proj.weight", (intermediate, hidden)),
            (f"{prefix}.mlp.down_proj.weight", (hidden, intermediate)),
        ]
    return [*tensors, ("model.norm.weight", (hidden,)), ("lm_head.weight", (vocab, hidden))]


def _write_shard(path: Path, tensors: list[tuple[str, tuple[int, ...]]], seed: int) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors:
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while offset:
            part = min(offset, 64 << 20)
            file.write(random.bytes(part))
            offset -= part
