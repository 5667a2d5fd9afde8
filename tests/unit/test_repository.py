"""The repository keeps its own rules: generated files, style, types, import contracts, packaging."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.build import build_wheel

from loader_service.client import AsyncLoaderClient, LoaderClient
from loader_service.client.make_sync import SOURCE, TARGET, make_sync

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
STUBS = "loader_service/v1"
SOURCES = {
    "loader_kernels": ROOT / "kernels" / "loader_kernels",
    "loader_service": ROOT / "loader_service",
    "loader_worker": ROOT / "worker" / "loader_worker",
}


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a tool of the environment; its output is the message of a failure."""
    environment = os.environ | {
        "NO_COLOR": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONSAFEPATH": "1",
    }
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        line = " ".join(map(str, command))
        pytest.fail(f"{line}\nended with {done.returncode}\n{done.stdout}", pytrace=False)
    return done.stdout


def generated_files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.glob("*_pb2*"))}


def test_stubs_are_what_the_protos_generate(tmp_path: Path) -> None:
    protos = sorted((ROOT / "protos").rglob("*.proto"))
    outputs = [
        f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")
    ]
    run(sys.executable, "-m", "grpc_tools.protoc", "-I", ROOT / "protos", *outputs, *protos)
    fresh, kept = generated_files(tmp_path / STUBS), generated_files(ROOT / STUBS)
    assert fresh
    stale = sorted(name for name in fresh.keys() | kept.keys() if fresh.get(name) != kept.get(name))
    assert stale == [], "run `make generate`"


def test_the_sync_client_is_what_the_async_one_makes(tmp_path: Path) -> None:
    fresh = tmp_path / "_sync.py"
    fresh.write_text(make_sync(SOURCE.read_text()))
    config = ROOT / "pyproject.toml"
    run(BIN / "ruff", "check", "-q", "--select", "I", "--fix", "--config", config, fresh)
    run(BIN / "ruff", "format", "-q", "--config", config, fresh)
    assert fresh.read_text() == TARGET.read_text(), "run `make generate`"


def test_both_clients_have_the_same_surface() -> None:
    def surface(client: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(method).parameters)
            for name, method in vars(client).items()
            if callable(method) and not name.startswith("_")
        }

    assert surface(LoaderClient) == surface(AsyncLoaderClient)
    assert len(surface(LoaderClient)) > 10


def test_protos_pass_buf_lint() -> None:
    run(BIN / "buf", "lint", "protos")


def test_ruff_finds_nothing() -> None:
    run(BIN / "ruff", "check", "--output-format=concise")


def test_code_is_formatted() -> None:
    run(BIN / "ruff", "format", "--check")


@pytest.mark.timeout(240)  # without a cache it reads every dependency
def test_mypy_finds_nothing() -> None:
    run(BIN / "mypy")


def test_import_contracts_hold() -> None:
    run(BIN / "lint-imports", "--no-logo", "--no-cache")


@pytest.mark.parametrize(
    "module",
    [
        "loader_service.cli.main",
        "loader_service.client",
        "loader_service.errors",
        "loader_service.v1.coordinator_pb2_grpc",
    ],
)
def test_import_stays_light(module: str, tmp_path: Path) -> None:
    heavy = {"cupy", "loader_kernels", "loader_worker", "numpy", "ucxx"}
    code = f"import sys, {module}; print(*sorted({heavy!r} & sys.modules.keys()))"
    assert run(sys.executable, "-c", code, cwd=tmp_path).split() == []


@pytest.mark.parametrize("folder", ["kernels", "worker", "tests", "deploy", "protos"])
def test_folders_of_the_repository_are_not_importable(folder: str, tmp_path: Path) -> None:
    code = f"import importlib.util; print(importlib.util.find_spec({folder!r}))"
    assert run(sys.executable, "-c", code, cwd=tmp_path).strip() == "None"


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    target = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # the build backend builds the project of the current folder
        name = build_wheel(str(target))
    with zipfile.ZipFile(target / name) as wheel:
        return set(wheel.namelist())


def test_wheel_has_three_top_level_names(wheel_files: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_files}
    assert {top for top in tops if not top.endswith(".dist-info")} == SOURCES.keys()


@pytest.mark.parametrize("package", SOURCES)
def test_wheel_holds_every_source_file(package: str, wheel_files: set[str]) -> None:
    source = SOURCES[package]
    wanted = {
        f"{package}/{path.relative_to(source)}"
        for path in source.rglob("*")
        if path.suffix in {".py", ".pyi", ".cu", ".cuh"} or path.name == "py.typed"
    }
    assert f"{package}/py.typed" in wanted
    assert wanted - wheel_files == set()


def test_constraints_are_plain_versions() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [
        line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line)
    ] == []
