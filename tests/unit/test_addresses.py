"""Texts that name a host and a port."""

from __future__ import annotations

import pytest

from loader_service import addresses
from loader_service.errors import InvalidRequest
from loader_worker.main import _advertised_host
from loader_worker.settings import Settings


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:1", "127.0.0.1", 1),
        ("w-1.example.com:65535", "w-1.example.com", 65535),
        ("[::1]:0", "::1", 0),
        ("[fe80::1%eth0]:5", "fe80::1%eth0", 5),
        ("localhost:80", "localhost", 80),
    ],
)
def test_host_and_port_are_told_apart(text: str, host: str, port: int) -> None:
    assert addresses.split(text) == (host, port)
    assert addresses.split(addresses.join(host, port)) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        ":1",
        "host:",
        "host:65536",
        "host:٣x",
        "h h:1",
        "h\n:1",
        f"{'h' * 254}:1",
        # gRPC would dial a socket file, a virtual machine, or ask a name server of the sender's choice.
        "unix:/run/other.sock:1",
        "unix:relative:1",
        "unix-abstract:x:1",
        "vsock:3:1",
        "dns://192.0.2.1/host:1",
        "xds:///host:1",
        "ipv4:127.0.0.1:1",
        "a/b:1",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not HOST:PORT"):
        addresses.split(text)


def test_every_spelling_of_a_wildcard_or_of_loopback_is_known() -> None:
    for host in ("0.0.0.0", "::", "::0", "0:0::0", "*"):
        assert addresses.is_wildcard(host)
        assert not addresses.is_loopback(host)
    for host in ("127.0.0.1", "127.9.8.7", "::1", "0::1", "localhost"):
        assert addresses.is_loopback(host)
        assert not addresses.is_wildcard(host)
    assert not addresses.is_loopback("localhost.example.com")


def test_a_worker_never_advertises_a_wildcard() -> None:
    def advertised(listen: str, advertise: str = "") -> str:
        return _advertised_host(
            Settings(coordinator="127.0.0.1:1", worker_id="w", listen=listen, advertise=advertise)
        )

    for host in ("0.0.0.0", "[::]", "[::0]"):
        with pytest.raises(InvalidRequest) as caught:
            advertised("127.0.0.1:0", f"{host}:5")
        assert caught.value.metadata["field"] == "advertise"
        assert advertised(f"{host}:0") == "127.0.0.1"


def test_ranges_of_ports() -> None:
    assert addresses.parse_ports("") is None
    assert addresses.parse_ports("7-7") == range(7, 8)
    assert addresses.parse_ports("1-65535") == range(1, 65536)


@pytest.mark.parametrize("text", ["5", "-", "0-5", "5-4", "1-65536", "²-5", "1-٣", "1-2-3", "a-b"])
def test_what_is_no_range_of_ports_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"--data-ports .* is not a range of ports A-B"):
        addresses.parse_ports(text)
