"""Host and port texts, and which local address reaches a host."""

from __future__ import annotations

import ipaddress
import socket

from loader_service.errors import InvalidRequest

__all__ = ["is_loopback", "is_wildcard", "join", "local_address_towards", "parse_ports", "split"]


def split(address: str) -> tuple[str, int]:
    """Return (host, port) of `HOST:PORT`; brackets around an IPv6 host are dropped.

    Raises:
        InvalidRequest: it is no such text.
    """
    host, _, port = address.rpartition(":")
    # Five digits: longer texts are no port, and turning them into numbers could take long.
    valid = 0 < len(host) <= 255 and host.isprintable() and port.isdecimal() and len(port) <= 5
    if not valid or int(port) > 65535:
        raise InvalidRequest(f"{address!r} is not HOST:PORT", field="address")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join(host: str, port: int) -> str:
    """Return `HOST:PORT`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_ports(text: str) -> range | None:
    """Return the ports of `A-B`, both included; None for an empty text.

    Raises:
        InvalidRequest: it is no such text.
    """
    if not text:
        return None
    first, dash, last = text.partition("-")
    if (
        not dash
        or not first.isdigit()
        or not last.isdigit()
        or not 0 < int(first) <= int(last) < 65536
    ):
        raise InvalidRequest(f"{text!r} is not a range of ports A-B", field="data_ports")
    return range(int(first), int(last) + 1)


def is_wildcard(host: str) -> bool:
    """Say whether a host means every local address, which nobody else can connect to."""
    return host in ("", "0.0.0.0", "::", "*")


def is_loopback(host: str) -> bool:
    """Say whether a host can only be reached from the same machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def local_address_towards(host: str, port: int) -> str:
    """Return the local address from which packets to `host` leave.

    No packet is sent: connecting a datagram socket only asks the routing table.

    Raises:
        OSError: the host has no address or no route.
    """
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
