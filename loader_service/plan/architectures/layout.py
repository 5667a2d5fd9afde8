"""What a family says about a checkpoint: the rule of every tensor name it knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from loader_service.plan.cuts import Cut

__all__ = ["Layout", "Rule"]


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """How one tensor is cut.

    Attributes:
        role: what the tensor is in the model.
        cut: how it is divided.
        reason: why, for `plan --explain`.
    """

    role: str
    cut: Cut
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The rules of one checkpoint.

    Attributes:
        rules: rule of every tensor name that the family knows; the file need not hold all.
        embedding: name of the token embedding.
        head: name of the output head, or None where the model has none.
        tied_by_default: what a config without `tie_word_embeddings` means.
    """

    rules: Mapping[str, Rule]
    embedding: str
    head: str | None
    tied_by_default: bool = False
