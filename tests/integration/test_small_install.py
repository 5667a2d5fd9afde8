"""Another service calls this one with grpcio and protobuf alone, out of the wheel."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import grpc
import pytest
import typing_extensions
from google import protobuf
from hatchling.build import build_wheel

from tests.control_plane import control_plane

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import asyncio, sys
from loader_service.client import AsyncLoaderClient, LoaderClient
from loader_service.errors import LoadNotFound

endpoint = sys.argv[1]
with LoaderClient(endpoint) as client:
    print([worker.worker_id for worker in client.list_workers()])
    try:
        client.get_load("load-none")
    except LoadNotFound as error:
        print(error.reason, error.metadata["load_id"])

async def main():
    async with AsyncLoaderClient(endpoint) as client:
        print([worker.worker_id for worker in await client.list_workers()])

asyncio.run(main())
top = {name.partition(".")[0] for name in sys.modules}
print(sorted(top & {"numpy", "cupy", "ucxx", "xxhash", "loader_kernels", "loader_worker", "rich"}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # the build backend builds the project of the current folder
        return target / build_wheel(str(target))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of `pip install loader-service`, and no others."""
    site = tmp_path_factory.mktemp("light") / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for module in (grpc, typing_extensions):
        assert module.__file__ is not None
        source = Path(module.__file__)
        source = source.parent if source.name == "__init__.py" else source
        (site / source.name).symlink_to(source)
    # Not the whole namespace: google.rpc and others of other packages stay out.
    (site / "google").mkdir()
    google = Path(protobuf.__path__[0]).parent
    for name in ("protobuf", "_upb"):
        (site / "google" / name).symlink_to(google / name)
    return site


@pytest.mark.parametrize(
    ("command", "extra"),
    [("loaderctl", "cli"), ("loader-coordinator", "server"), ("loader-worker", "worker")],
)
def test_a_command_says_which_extra_it_lacks(site: Path, command: str, extra: str) -> None:
    (installed,) = distributions(name="loader-service", path=[str(site)])
    (entry,) = installed.entry_points.select(group="console_scripts", name=command)
    run = f"import {entry.module}; {entry.module}.{entry.attr}()"
    code = f"import sys; sys.path.insert(0, {str(site)!r}); {run}"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{command}: the module ")
    assert f"pip install 'loader-service[{extra}" in line


async def test_the_client_needs_grpcio_and_protobuf_only(site: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(site)!r})\n{SCRIPT}")
    async with control_plane(tmp_path, workers=["w0", "w1"]) as plane:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(script), plane.address,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        printed, complaint = await child.communicate()
    assert child.returncode == 0, complaint.decode()
    assert printed.decode().splitlines() == [
        "['w0', 'w1']",
        "LOAD_NOT_FOUND load-none",
        "['w0', 'w1']",
        "[]",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("pins", [(), ("grpcio==1.76.0", "protobuf==6.31.1")], ids=["new", "old"])
async def test_the_wheel_installs_into_an_empty_environment(
    wheel: Path, tmp_path: Path, pins: tuple[str, ...]
) -> None:
    """With the newest and with the lowest allowed versions (F17)."""
    python = tmp_path / "venv" / "bin" / "python"
    for command in (
        [sys.executable, "-m", "venv", str(tmp_path / "venv")],
        [str(python), "-m", "pip", "install", "-q", str(wheel), *pins],
    ):
        child = await asyncio.create_subprocess_exec(*command)
        assert await child.wait() == 0
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    async with control_plane(tmp_path, workers=["w0"]) as plane:
        child = await asyncio.create_subprocess_exec(
            str(python), "-I", str(script), plane.address, stdout=subprocess.PIPE
        )
        printed, _ = await child.communicate()
    assert child.returncode == 0
    assert printed.decode().count("['w0']") == 2
