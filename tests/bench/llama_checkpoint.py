"""Writes Llama-shaped BF16 checkpoints, random payload, four shards."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCAB, SHARDS = 16, 2048, 8192, 32, 8, 32000, 4
"""Llama-3.2-1B with an untied head and a smaller vocabulary: about 2 GiB."""


def write_checkpoint(folder: Path, layers: int = LAYERS) -> None:
    """Write a checkpoint of about 116 MiB a layer and 250 MiB more, unless it is there already."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(layers)
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        part = tensors[shard * len(tensors) // SHARDS : (shard + 1) * len(tensors) // SHARDS]
        _write_shard(folder / name, part, seed=shard)
        weight_map |= dict.fromkeys((tensor for tensor, _ in part), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": KV_HEADS,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
    }
    # Written last: it says that the rest is whole.
    (folder / "config.json").write_text(json.dumps(config))


def _tensors(layers: int) -> list[tuple[str, tuple[int, ...]]]:
    head_size = HIDDEN // HEADS
    tensors: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (VOCAB, HIDDEN))]
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors += [
            (f"{prefix}.input_layernorm.weight", (HIDDEN,)),
            (f"{prefix}.self_attn.q_proj.weight", (HIDDEN, HIDDEN)),
            (f"{prefix}.self_attn.k_proj.weight", (KV_HEADS * head_size, HIDDEN)),
            (f"{prefix}.self_attn.v_proj.weight", (KV_HEADS * head_size, HIDDEN)),
            (f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HIDDEN)),
            (f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)),
            (f"{prefix}.mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)),
            (f"{prefix}.mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)),
            (f"{prefix}.mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)),
        ]
    return [*tensors, ("model.norm.weight", (HIDDEN,)), ("lm_head.weight", (VOCAB, HIDDEN))]


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
