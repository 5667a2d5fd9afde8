"""What several tests share: a cluster, to which a test gives back what it loads, and who may call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import ROLES, Authority, identity, token_identity, write_access
from tests.cluster import Cluster, cluster


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
