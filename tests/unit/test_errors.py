"""The tree of errors: as drawn, complete, and the same after every journey."""

from __future__ import annotations

import pickle
import re

import grpc
import pytest

from loader_service import errors
from loader_service.errors import InternalError, LoaderError, PlanRefused, from_fields, to_fields

LINE = re.compile(r"^( *)(\w+)(?: +([A-Z_]+) +(.+))?$")


def leaves(kind: type[LoaderError]) -> list[type[LoaderError]]:
    return [each for child in kind.__subclasses__() for each in (child, *leaves(child))]


CLASSES = [kind for kind in leaves(LoaderError) if kind.__module__ == errors.__name__]


def drawn_tree() -> dict[str, tuple[str, str, str]]:
    """(parent, status, reasons) by class name, as the module's docstring draws them."""
    assert errors.__doc__ is not None
    tree = {}
    parents: list[str] = []
    for line in errors.__doc__.split("\n\n", 1)[1].splitlines():
        match = LINE.match(line)
        assert match is not None, line
        depth, name = len(match[1]) // 4, match[2]
        del parents[depth:]
        tree[name] = (parents[-1] if parents else "", match[3] or "", match[4] or "")
        parents.append(name)
    return tree


def test_the_tree_in_the_docstring_is_the_tree_of_classes() -> None:
    tree = drawn_tree()
    assert tree.pop("LoaderError") == ("", "", "")
    actual = {kind.__name__: (kind.__bases__[0].__name__, kind.status.name) for kind in CLASSES}
    assert {name: drawn[:2] for name, drawn in tree.items()} == actual


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_docstring_names_the_reason_where_a_class_has_one(kind: type[LoaderError]) -> None:
    reasons = drawn_tree()[kind.__name__][2]
    # Those that list several reasons or an ellipsis need not show the fallback.
    assert kind.default_reason in reasons or "..." in reasons


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_class_has_a_status_a_stable_reason_and_is_exported(
    kind: type[LoaderError],
) -> None:
    assert kind.status not in {grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN}
    assert re.fullmatch(r"[A-Z]+(_[A-Z]+)*", kind.default_reason)
    assert kind.default_reason != LoaderError.default_reason
    assert kind.__name__ in errors.__all__


def test_reasons_of_classes_are_different() -> None:
    assert len({kind.default_reason for kind in CLASSES}) == len(CLASSES)


@pytest.mark.parametrize("reason", [None, "ANOTHER_REASON"])
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling_and_its_fields(
    kind: type[LoaderError], reason: str | None
) -> None:
    error = kind("what happened", reason=reason, tensor="t", rank=3)
    for copy in (pickle.loads(pickle.dumps(error)), from_fields(*to_fields(error))):
        assert type(copy) is kind
        assert (copy.message, str(copy)) == ("what happened", "what happened")
        assert copy.reason == (reason or kind.default_reason)
        assert copy.metadata == {"tensor": "t", "rank": "3"}


@pytest.mark.parametrize("facts", [{}, {errors.CLASS_KEY: "Exception"}, {errors.CLASS_KEY: ""}])
def test_an_unknown_class_comes_back_as_internal_with_its_own_reason(
    facts: dict[str, str],
) -> None:
    error = from_fields("SOME_REASON", "words", {**facts, "key": "value"})
    assert type(error) is InternalError
    assert (error.reason, error.message) == ("SOME_REASON", "words")
    assert error.metadata == {"key": "value"}


@pytest.mark.parametrize("fact", ["message", "reason", "self"])
def test_facts_from_elsewhere_may_have_any_name(fact: str) -> None:
    error = from_fields("SOME_REASON", "words", {fact: "value"})
    assert error.metadata == {fact: "value"}


@pytest.mark.parametrize(("text", "sizes"), [("", ()), ("1", (1,)), ("1,2,14", (1, 2, 14))])
def test_a_refused_plan_lists_the_group_sizes_that_fit(text: str, sizes: tuple[int, ...]) -> None:
    assert PlanRefused("no", valid_tp=text).valid_tp == sizes


def test_a_refused_plan_without_sizes_lists_none() -> None:
    assert PlanRefused("no").valid_tp == ()
