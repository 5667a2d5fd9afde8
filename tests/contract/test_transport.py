"""The transport contract over memory here, and over UCXX in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from loader_service.stream.transport import Transport
from loader_service.testing.memory_transport import MemoryNetwork, MemoryTransport
from loader_service.testing.transport_contract import TransportContract

ROOT = Path(__file__).resolve().parents[2]
UCXX_CONTRACT = Path(__file__).with_name("ucxx_contract.py")
UCXX_CASES = (
    *sorted(name for name in vars(TransportContract) if name.startswith("test_")),
    *(f"test_a_killed_peer_ends_a_pending_call[{verb}]" for verb in ("send", "recv")),
    "test_a_server_that_says_nothing_is_left_in_time",
    *(f"test_a_stopped_peer_is_left_at_the_deadline[{verb}]" for verb in ("send", "recv")),
    "test_junk_on_the_listeners_port_is_survived",
    "test_lanes_name_transports_and_devices",
    "test_listeners_take_their_ports_from_the_range",
)


class TestMemoryTransport(TransportContract):
    @pytest.fixture
    def transport(self) -> Transport:
        return MemoryTransport(MemoryNetwork())


@pytest.fixture(scope="module")
def ucxx_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What failed in the other process, by test; empty texts for what passed."""
    report = tmp_path_factory.mktemp("ucxx") / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(UCXX_CONTRACT)]
    done = subprocess.run(
        [*command, f"--junitxml={report}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    assert report.exists(), done.stdout
    results = {
        case.attrib["name"]: "\n".join(part.text or part.tag for part in case)
        for case in ET.parse(report).iter("testcase")
    }
    assert results.keys() == set(UCXX_CASES)
    return results


@pytest.mark.timeout(120)  # the first one waits for the whole process
@pytest.mark.parametrize("name", UCXX_CASES)
def test_ucxx_transport(name: str, ucxx_results: dict[str, str]) -> None:
    assert ucxx_results[name] == ""
