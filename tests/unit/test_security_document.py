"""SECURITY.md: what it prints works together as it stands."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from loader_service.serving.access import Access, Role, read_access_file

TEXT = (Path(__file__).parents[2] / "SECURITY.md").read_text(encoding="utf-8")
SAMPLES = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
ISSUED = re.findall(r"^issue \w+ +DNS:([\w.]+)", TEXT, re.MULTILINE)


def access_file(folder: Path, sample: str) -> str:
    path = folder / "access.toml"
    path.write_text(sample.replace("…", "0" * 64), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("sample", SAMPLES)
def test_every_access_file_can_be_used(sample: str, tmp_path: Path) -> None:
    read_access_file(access_file(tmp_path, sample))


def test_the_first_access_file_knows_the_certificates_of_the_commands(tmp_path: Path) -> None:
    access = Access(access_file(tmp_path, SAMPLES[0]))
    assert {name: set(asyncio.run(access.identify([name], "")).roles) for name in ISSUED} == {
        "coordinator.example": {Role.COORDINATOR},
        "worker.example": {Role.WORKER},
        "ops.example": {Role.ADMIN},
    }
