"""Host and port texts, and which local address reaches a host."""

from __future__ import annotations

import ipaddress
import re
import socket

from loader_service.errors import InvalidRequest

__all__ = ["is_loopback", "is_wildcard", "join", "local_address_towards", "parse_ports", "split"]

_NAME = re.compile(r"[\w.-]{1,253}|\*")


def split(address: str) -> tuple[str, int]:
    """Return (host, port) of `HOST:PORT`; brackets around an IPv6 host are dropped.

    Raises:
        InvalidRequest: it is no such text.
    """
    host, _, port = address.rpartition(":")
    # Five digits: longer texts are no port, and turning them into numbers could take long.
    host = host.removeprefix("[").removesuffix("]")
    valid = _is_host(host) and port.isdecimal() and len(port) <= 5
    if not valid or int(port) > 65535:
        raise InvalidRequest(f"{address[:300]!r} is not HOST:PORT", field="address")
    return host, int(port)


def _is_host(host: str) -> bool:
    """Whether this is a name or an address, and none of gRPC's `unix:`, `dns:` and the like.

    Workers say where the coordinator is to call them; that must not be a socket file on its machine
    or a name server of their choice.
    """
    return bool(_NAME.fullmatch(host)) or _ip(host) is not None


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host) if host.isprintable() and len(host) <= 64 else None
    except ValueError:
        return None


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
    # Five digits, as in `split`.
    ports = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text)
    first, last = map(int, ports.groups()) if ports else (0, 0)
    if not 0 < first <= last < 65536:
        raise InvalidRequest(
            f"--data-ports {text[:300]!r} is not a range of ports A-B such as 50100-50199",
            field="data_ports",
        )
    return range(first, last + 1)


def is_wildcard(host: str) -> bool:
    """Say whether a host means every local address, which nobody else can connect to."""
    ip = _ip(host)
    return host == "*" if ip is None else ip.is_unspecified


def is_loopback(host: str) -> bool:
    """Say whether a host can only be reached from the same machine."""
    ip = _ip(host)
    return host == "localhost" if ip is None else ip.is_loopback


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
