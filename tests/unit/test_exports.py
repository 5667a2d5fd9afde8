"""`__all__` of every module: all public functions and classes, and whatever other modules import.

Constants that only their own module uses may have a public name without being listed: tests and
readers may look at them, other modules may not. The same holds for the functions of programs.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "loader_kernels": ROOT / "kernels",
    "loader_service": ROOT,
    "loader_worker": ROOT / "worker",
}


def sources() -> Iterator[tuple[str, Path]]:
    """Modules that people wrote, by dotted name."""
    for package, root in PACKAGES.items():
        for path in sorted((root / package).rglob("*.py")):
            if "_pb2" not in path.name:
                parts = path.relative_to(root).with_suffix("").parts
                yield ".".join(parts).removesuffix(".__init__"), path


MODULES = dict(sources())
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def listed(module: str) -> list[str]:
    """The names in `__all__`, empty without one."""
    for node in TREES[module].body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        ):
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


def defined(module: str) -> set[str]:
    """Public functions and classes that a module defines."""
    return {
        node.name
        for node in TREES[module].body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
    }


def is_program(module: str) -> bool:
    """Whether a module can be run."""
    return any(
        isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        for node in TREES[module].body
    )


def test_all_three_packages_are_looked_at() -> None:
    assert {name.split(".")[0] for name in MODULES} == PACKAGES.keys()
    assert len(MODULES) > 40


@pytest.mark.parametrize("module", MODULES)
def test_every_listed_name_exists_and_is_listed_once(module: str) -> None:
    names = listed(module)
    assert [name for name in names if not hasattr(importlib.import_module(module), name)] == []
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("module", [name for name in MODULES if not is_program(name)])
def test_every_public_function_and_class_is_listed(module: str) -> None:
    assert defined(module) - set(listed(module)) == set()


@pytest.mark.parametrize("module", MODULES)
def test_only_listed_names_are_imported_from_other_modules(module: str) -> None:
    foreign = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.ImportFrom) and node.module in MODULES
        for alias in node.names
        if f"{node.module}.{alias.name}" not in MODULES
        and not (ROOT / node.module.replace(".", "/") / f"{alias.name}.py").exists()
        and alias.name not in listed(node.module)
    ]
    assert foreign == []
