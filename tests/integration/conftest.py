"""What several tests share: a cluster, to which a test gives back what it loads, and who may call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from loader_service.client import AsyncLoaderClient
from tests.certificates import ROLES, Authority, identity, token_identity, write_access
from tests.checkpoints import random_tensor, write_file
from tests.cluster import Cluster, cluster
from tests.control_plane import MODEL_BYTES, ControlPlane, control_plane


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A coordinator and four idle workers for loads that succeed or are refused."""
    with cluster(Path("/"), tmp_path_factory.mktemp("logs"), workers=4) as running:
        yield running


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority of servers and clients."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that no server trusts."""
    return Authority(tmp_path_factory.mktemp("foreign"))


@pytest.fixture
def access(tmp_path: Path) -> str:
    """An access file: `ops` and `looker` by certificate, one identity a role by token."""
    return write_access(
        tmp_path,
        identity("ops", "operator", certificate="ops.example"),
        identity("looker", "viewer", certificate="looker.example"),
        *(token_identity(role, f"token-of-{role}") for role in ROLES),
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint of one tensor."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_file(folder / "model.safetensors", [random_tensor("t", "U8", (MODEL_BYTES,))])
    return folder


@pytest.fixture
async def plane(model: Path) -> AsyncIterator[ControlPlane]:
    """A coordinator in this process, with four played workers."""
    async with control_plane(
        model.parent, workers=["w0", "w1", "w2", "w3"], stall_seconds=0.3
    ) as running:
        yield running


@pytest.fixture
async def client(plane: ControlPlane) -> AsyncIterator[AsyncLoaderClient]:
    """A client of `plane`."""
    async with AsyncLoaderClient(plane.address) as connected:
        yield connected
