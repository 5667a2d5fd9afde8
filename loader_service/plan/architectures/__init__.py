"""Tensor-parallel plans of known architectures, one file a family.

A family is a function from (config, catalog) to a `Layout`. A new family is a new file and a line in
`_FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loader_service.checkpoint.catalog import TensorCatalog
from loader_service.plan.architectures import bert, gemma, llama, phi3
from loader_service.plan.architectures.layout import Layout

__all__ = ["Family", "family_of"]

Family = Callable[[Mapping[str, Any], TensorCatalog], Layout]

_FAMILIES: dict[str, Family] = {
    "BertModel": bert.layout,
    "Gemma2ForCausalLM": gemma.layout,
    "Gemma2Model": gemma.layout,
    "Gemma3ForCausalLM": gemma.layout,
    "Gemma3TextModel": gemma.layout,
    "LlamaForCausalLM": llama.layout,
    "LlamaModel": llama.layout,
    "MistralForCausalLM": llama.layout,
    "MistralModel": llama.layout,
    "Phi3ForCausalLM": phi3.layout,
    "Phi3Model": phi3.layout,
    "Qwen2ForCausalLM": llama.layout,
    "Qwen2Model": llama.layout,
    "Qwen3ForCausalLM": llama.layout,
    "Qwen3Model": llama.layout,
}


def family_of(architecture: str) -> Family | None:
    """Return the family that plans `architecture` (a transformers class name), or None."""
    return _FAMILIES.get(architecture)
