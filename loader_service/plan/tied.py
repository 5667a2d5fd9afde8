"""Deciding what a tied output head means: from the flag and the files; the bytes are compared later.

| flag  | head in file | plan                                                              |
|-------|--------------|-------------------------------------------------------------------|
| true  | no           | one tensor, the head is an alias of the embedding                 |
| true  | yes          | the same, and the file's head is compared while reading (`VERIFY`) |
| false | yes          | two tensors                                                       |
| false | no           | refused: MISSING_TENSOR                                           |

An absent flag is what the family's config class in transformers makes of it; without a family it says
nothing, and both tensors are loaded as they are.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from loader_service.checkpoint.catalog import TensorCatalog, TensorInfo
from loader_service.errors import PlanRefused, TiedHeadDiffers
from loader_service.plan.config import architectures, flag

__all__ = ["TiedHead", "TiedHeadPolicy", "decide", "well_known_pair"]

_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")


class TiedHeadPolicy(enum.Enum):
    """What to do when the flag is set and the file holds a head all the same."""

    VERIFY = "verify"
    OBEY_FILE = "obey-file"
    TRUST_CONFIG = "trust-config"


@dataclasses.dataclass(frozen=True, slots=True)
class TiedHead:
    """The decision.

    Attributes:
        aliases: other names of the embedding's buffer.
        skipped: the file's head, which is not loaded as a tensor of its own.
        compare: whether the skipped head must hold the embedding's bytes.
        present: the flag is set and the file holds a head.
    """

    aliases: tuple[str, ...] = ()
    skipped: TensorInfo | None = None
    compare: bool = False
    present: bool = False


def well_known_pair(
    config: Mapping[str, Any], catalog: TensorCatalog, tied_by_default: bool
) -> tuple[str, str | None] | None:
    """Return (embedding, head) of a checkpoint without rules, None where nothing can be said.

    The head is None for a model that needs none. It is needed where the config sets the flag
    either way, or leaves it to a family that ties by default, and does not name a bare encoder or
    decoder.
    """
    embedding = next((name for name in _EMBEDDINGS if name in catalog), None)
    said = tied_by_default or flag(config, "tie_word_embeddings") is not None
    if embedding is None or not said:
        return None
    names = architectures(config)
    causal = not names or any(name.endswith("ForCausalLM") for name in names)
    head = next((name for name in _HEADS if name in catalog), _HEADS[0] if causal else None)
    return embedding, head


def decide(
    config: Mapping[str, Any],
    catalog: TensorCatalog,
    embedding_name: str,
    head_name: str | None,
    policy: TiedHeadPolicy,
    tied_by_default: bool = False,
) -> TiedHead:
    """Decide for one checkpoint, see the table above.

    Args:
        config: `config.json`.
        catalog: the checkpoint's tensors.
        embedding_name: name of the embedding.
        head_name: name of the head; None where the model has none.
        policy: what to do with a head that is tied and present.
        tied_by_default: what an absent flag means.

    Raises:
        PlanRefused: MISSING_TENSOR, untied and no head in the file.
        TiedHeadDiffers: tied, but the file's head has another shape or dtype.
    """
    embedding = catalog.get(embedding_name)
    if head_name is None or embedding is None:
        return TiedHead()
    head = catalog.get(head_name)
    tied = flag(config, "tie_word_embeddings")
    if not (tied_by_default if tied is None else tied):
        if head is None:
            raise PlanRefused(
                f"the config does not tie the head to the embedding, but the checkpoint holds no "
                f"{head_name!r}",
                reason="MISSING_TENSOR",
                tensor=head_name,
            )
        return TiedHead()
    if head is None:
        return TiedHead(aliases=(head_name,))
    if policy is TiedHeadPolicy.OBEY_FILE:
        return TiedHead(present=True)
    compare = policy is TiedHeadPolicy.VERIFY
    if compare and (head.shape, head.dtype) != (embedding.shape, embedding.dtype):
        raise TiedHeadDiffers(
            f"the config ties {head_name!r} to {embedding_name!r}, but they are {head.dtype} "
            f"{list(head.shape)} and {embedding.dtype} {list(embedding.shape)}",
            tensor=head_name,
        )
    return TiedHead(aliases=(head_name,), skipped=head, compare=compare, present=True)
