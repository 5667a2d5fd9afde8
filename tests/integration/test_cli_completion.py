"""What the shell is offered when Tab is pressed; where there is nothing to offer, nothing is said."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_coordinator import FakeCoordinator, fake_coordinator

BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeCoordinator]:
    with fake_coordinator() as fake:
        yield fake


def offered(line: str, folder: Path) -> list[str]:
    """Return what bash is offered for the last word of a line."""
    config = folder / "config.toml"
    config.write_text("[contexts.prod]\n[contexts.lab]\n")
    words = line.split(" ")
    environment = {name: text for name, text in os.environ.items() if "LOADER" not in name} | {
        "_LOADERCTL_COMPLETE": "complete_bash",
        "COMP_WORDS": line.replace(" ", "\n"),
        "COMP_CWORD": str(len(words) - 1),
        "LOADER_CONFIG": str(config),
    }
    done = subprocess.run(
        [BIN / "loaderctl"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("loaderctl watch load-f", ["load-ffffffff"]),
        ("loaderctl describe worker ", ["host-0", "host-1"]),
        ("loaderctl load m --workers host-1,", ["host-1,host-0"]),
        ("loaderctl --context ", ["prod", "lab"]),
        ("loaderctl config use-context l", ["lab"]),
    ],
)
def test_names_are_completed(
    fake: FakeCoordinator, tmp_path: Path, line: str, names: list[str]
) -> None:
    line = line.replace("loaderctl ", f"loaderctl --endpoint {fake.endpoint} ", 1)
    assert offered(line, tmp_path) == names


@pytest.mark.parametrize("options", ["--endpoint 127.0.0.1:1", "--tls-ca-cert /nope"])
def test_nothing_is_offered_soon_where_the_coordinator_cannot_be_asked(
    tmp_path: Path, options: str
) -> None:
    began = time.monotonic()
    assert offered(f"loaderctl {options} watch ", tmp_path) == []
    assert time.monotonic() - began < 5.0
