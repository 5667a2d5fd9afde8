"""From a checkpoint to a `LoadPlan`."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from loader_service.background import until_cancelled
from loader_service.checkpoint.catalog import Checkpoint, TensorInfo
from loader_service.errors import InvalidCheckpoint, InvalidRequest, PlanRefused
from loader_service.plan import tied
from loader_service.plan.architectures import family_of
from loader_service.plan.architectures.layout import Rule
from loader_service.plan.cuts import Replicated, cut_tensor, cuts_whole_bytes, divides
from loader_service.plan.slices import LoadPlan, TensorPlan
from loader_service.plan.tied import TiedHeadPolicy

__all__ = ["MAX_TP", "UNKNOWN_ARCHITECTURE", "PlanOptions", "UnknownTensorPolicy", "plan_load"]

UNKNOWN_ARCHITECTURE = "unknown"
MAX_TP = 1024
"""Largest group; far beyond the head counts of known models, and a bound for the search below."""

_UNKNOWN_RULE = Rule("unknown", Replicated(), "no plan knows the name; whole on every rank")
_NAMES_IN_ERROR = 5


class UnknownTensorPolicy(enum.Enum):
    """What to do with tensors and architectures that no plan knows."""

    REFUSE = "refuse"
    REPLICATE = "replicate"


@dataclasses.dataclass(frozen=True, slots=True)
class PlanOptions:
    """How to plan.

    Attributes:
        tied_head: what to do with a head that the config says is tied.
        unknown_tensors: what to do with tensors that no plan knows.
    """

    tied_head: TiedHeadPolicy = TiedHeadPolicy.VERIFY
    unknown_tensors: UnknownTensorPolicy = UnknownTensorPolicy.REFUSE


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """The rules that apply to one checkpoint, and what they were chosen for."""

    architecture: str
    rules: Mapping[str, Rule]
    embedding: str | None
    head: str | None
    tied_by_default: bool


def plan_load(checkpoint: Checkpoint, tp: int, options: PlanOptions | None = None) -> LoadPlan:
    """Plan `checkpoint` for a group of `tp` ranks.

    Raises:
        InvalidRequest: `tp` is no group size.
        PlanRefused: the checkpoint cannot be cut so; `valid_tp` says which sizes it allows.
        InvalidCheckpoint: the config is malformed, or the checkpoint holds no tensor.
        TiedHeadDiffers: head and embedding cannot be the same tensor.
    """
    options = options or PlanOptions()
    if not 1 <= tp <= MAX_TP:
        raise InvalidRequest(f"tp must be between 1 and {MAX_TP}, not {tp}", field="tp")
    if not len(checkpoint.catalog):
        raise InvalidCheckpoint(
            f"{checkpoint.path} holds no tensor", reason="EMPTY_CHECKPOINT", path=checkpoint.path
        )
    layout = _layout(checkpoint, tp, options)
    config = checkpoint.config or {}
    head = tied.TiedHead()
    if layout.embedding is not None:
        head = tied.decide(
            config,
            checkpoint.catalog,
            layout.embedding,
            layout.head,
            options.tied_head,
            layout.tied_by_default,
        )
    sources = [tensor for tensor in checkpoint.catalog if tensor is not head.skipped]
    rules = _rules(sources, layout, options)
    try:
        tensors = [
            _plan_tensor(source, rules, layout, head, tp) for source in until_cancelled(sources)
        ]
    except PlanRefused as refused:
        valid = _valid_tp(sources, rules)
        raise PlanRefused(
            f"{refused.message}; group sizes that fit: {', '.join(map(str, valid)) or 'none'}",
            reason=refused.reason,
            **{**refused.metadata, "valid_tp": ",".join(map(str, valid))},
        ) from None
    tensors.sort(key=lambda plan: (plan.source.file, plan.source.offset, plan.source.name))
    notes = (f"{head.skipped.name!r} is tied and stands in the file",) if head.skipped else ()
    return LoadPlan(
        path=checkpoint.path,
        architecture=layout.architecture,
        tp=tp,
        tensors=tuple(tensors),
        files=checkpoint.catalog.files,
        tied_head_present=head.present,
        warnings=checkpoint.warnings + notes,
    )


def _layout(checkpoint: Checkpoint, tp: int, options: PlanOptions) -> _Layout:
    config, architecture = checkpoint.config, checkpoint.architecture
    quantised = bool(config and config.get("quantization_config"))
    if quantised and tp > 1:
        raise PlanRefused(
            "quantised checkpoints can be loaded whole only; their cuts are not planned yet",
            reason="UNSUPPORTED_QUANTIZATION",
            valid_tp="1",
        )
    family = family_of(architecture)
    known = family(config, checkpoint.catalog) if family and config is not None else None
    tied_by_default = known is not None and known.tied_by_default
    if known and not quantised:
        return _Layout(architecture, known.rules, known.embedding, known.head, tied_by_default)
    if tp > 1 and options.unknown_tensors is UnknownTensorPolicy.REFUSE:
        raise _no_plan(checkpoint)
    name = architecture if known else UNKNOWN_ARCHITECTURE
    pair = tied.well_known_pair(config, checkpoint.catalog, tied_by_default) if config else None
    embedding, head = pair or (None, None)
    return _Layout(name, {}, embedding, head, tied_by_default)


def _no_plan(checkpoint: Checkpoint) -> PlanRefused:
    way_out = "tp=1 loads it whole, `--unknown replicate` puts every tensor on every rank"
    if not checkpoint.architecture:
        return PlanRefused(
            f"{checkpoint.path} has no config.json that names an architecture; {way_out}",
            reason="CONFIG_MISSING",
            valid_tp="1",
        )
    return PlanRefused(
        f"no plan for architecture {checkpoint.architecture!r}; {way_out}",
        reason="UNSUPPORTED_ARCHITECTURE",
        architecture=checkpoint.architecture,
        valid_tp="1",
    )


def _rules(sources: list[TensorInfo], layout: _Layout, options: PlanOptions) -> dict[str, Rule]:
    """Return the rule of every tensor; names that no rule knows are refused or replicated."""
    unknown = [source.name for source in sources if source.name not in layout.rules]
    if unknown and layout.rules and options.unknown_tensors is UnknownTensorPolicy.REFUSE:
        more = f" and {len(unknown) - _NAMES_IN_ERROR} more" if unknown[_NAMES_IN_ERROR:] else ""
        raise PlanRefused(
            f"the plan of {layout.architecture} does not know "
            f"{', '.join(unknown[:_NAMES_IN_ERROR])}{more}; `--unknown replicate` puts them on "
            "every rank",
            reason="UNKNOWN_TENSOR",
            tensors=",".join(unknown[:_NAMES_IN_ERROR]),
        )
    return {source.name: layout.rules.get(source.name, _UNKNOWN_RULE) for source in sources}


def _plan_tensor(
    source: TensorInfo, rules: Mapping[str, Rule], layout: _Layout, head: tied.TiedHead, tp: int
) -> TensorPlan:
    rule = rules[source.name]
    is_embedding = source.name == layout.embedding
    return TensorPlan(
        source=source,
        role=rule.role,
        storage="dense",
        cut=rule.cut.name,
        reason=rule.reason,
        slices=cut_tensor(source, rule.cut, tp, head.aliases if is_embedding else ()),
        twin=head.skipped if is_embedding and head.compare else None,
    )


def _valid_tp(sources: list[TensorInfo], rules: Mapping[str, Rule]) -> list[int]:
    """Return the group sizes that every tensor allows, by asking each distinct case once."""
    cases = {(source.dtype, source.shape, rules[source.name].cut): source for source in sources}
    questions = [(source, cut) for (_, _, cut), source in cases.items()]
    return [
        tp
        for tp in until_cancelled(range(1, MAX_TP + 1))
        if all(divides(source, cut, tp) for source, cut in questions)
        and all(cuts_whole_bytes(source, cut, tp) for source, cut in questions)
    ]
