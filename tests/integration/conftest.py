"""Clusters that several tests share; a test gives back what it loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster, cluster


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A coordinator and four idle workers for loads that succeed or are refused."""
    with cluster(Path("/"), tmp_path_factory.mktemp("logs"), workers=4) as running:
        yield running
