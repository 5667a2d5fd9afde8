"""The command-line options that both servers share: TLS, access, records."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from typing import TypeVar

from loader_service import addresses
from loader_service.channel_security import ChannelSecurity
from loader_service.errors import InvalidRequest
from loader_service.sizes import parse_size

__all__ = [
    "ServingOptions",
    "add_serving_arguments",
    "channel_security",
    "positive",
    "serving_options",
    "size",
]

DEFAULT_MAX_STREAMS = 256

_Number = TypeVar("_Number", int, float)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """Whom a server lets in, and what it records. All TLS files are PEM.

    Attributes:
        tls_cert: the server's certificate chain; empty serves plaintext.
        tls_key: private key of `tls_cert`.
        tls_client_ca: authorities of clients, which must then show a certificate (mTLS).
        access_file: identities and their roles; empty lets every caller do everything.
        insecure: listen beyond this machine without TLS and access file all the same.
        audit_log: file for calls that change something; empty is the process's log.
        metrics_listen: `HOST:PORT` of the Prometheus numbers; empty serves none.
        max_streams: most streams that one identity may have open.
    """

    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    access_file: str = ""
    insecure: bool = False
    audit_log: str = ""
    metrics_listen: str = ""
    max_streams: int = DEFAULT_MAX_STREAMS

    def __post_init__(self) -> None:
        """Refuse halves: a key without its certificate, client certificates that mean nothing."""
        if bool(self.tls_cert) != bool(self.tls_key):
            missing = "--tls-key" if self.tls_cert else "--tls-cert"
            raise InvalidRequest(
                f"--tls-cert and --tls-key go together; {missing} is missing",
                field=missing.strip("-").replace("-", "_"),
            )
        if self.tls_client_ca and not (self.tls_cert and self.access_file):
            raise InvalidRequest(
                "--tls-client-ca needs --tls-cert, --tls-key and --access: a client's certificate "
                "says who it is, the access file what it may do",
                field="tls_client_ca",
            )

    @property
    def is_secure(self) -> bool:
        """Whether callers are told apart and cannot be overheard."""
        return bool(self.tls_cert and self.access_file)

    @property
    def default_host(self) -> str:
        """Every address where that is allowed, else this machine only."""
        return "0.0.0.0" if self.is_secure or self.insecure else "127.0.0.1"

    def check_listen(self, listen: str) -> None:
        """Refuse to serve others without TLS and access control.

        Raises:
            InvalidRequest: INSECURE_LISTEN.
        """
        host, _ = addresses.split(listen)
        if self.is_secure or self.insecure or addresses.is_loopback(host):
            return
        raise InvalidRequest(
            f"{listen} can be reached from other machines: give --tls-cert, --tls-key and --access, "
            "or say --insecure to serve everybody who can connect",
            reason="INSECURE_LISTEN",
            field="listen",
        )


def positive(kind: type[_Number]) -> Callable[[str], _Number]:
    """Return an argparse type for finite numbers above zero."""

    def parse(text: str) -> _Number:
        try:
            number = kind(text)
        except ValueError:
            number = kind(0)
        if not 0 < number < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero")
        return number

    return parse


def size(text: str) -> int:
    """Return the bytes of an option such as 512MiB; an argparse type.

    Raises:
        ArgumentTypeError: it is no such text.
    """
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_serving_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a server's command line."""
    secure = parser.add_argument_group(
        "security", "without --tls-cert and --access a server listens on this machine only"
    )
    secure.add_argument("--tls-cert", default="", metavar="FILE", help="own certificate chain")
    secure.add_argument("--tls-key", default="", metavar="FILE", help="private key of --tls-cert")
    secure.add_argument(
        "--tls-client-ca",
        default="",
        metavar="FILE",
        help="authorities of clients, which must then show a certificate (mTLS)",
    )
    secure.add_argument(
        "--tls-ca-cert",
        default="",
        metavar="FILE",
        help="authorities of the servers that this process calls; its calls use TLS and show "
        "--tls-cert, and without this trust the machine's authorities",
    )
    secure.add_argument(
        "--token-file", default="", metavar="FILE", help="bearer token of this process's own calls"
    )
    secure.add_argument(
        "--access", default="", metavar="FILE", help="identities and their roles (TOML)"
    )
    secure.add_argument(
        "--insecure",
        action="store_true",
        help="serve everybody who can connect, without TLS or identities",
    )
    secure.add_argument(
        "--max-streams",
        type=positive(int),
        default=DEFAULT_MAX_STREAMS,
        metavar="N",
        help=f"streams that one identity may have open (default {DEFAULT_MAX_STREAMS})",
    )
    records = parser.add_argument_group("records")
    records.add_argument(
        "--audit-log", default="", metavar="FILE", help="JSON lines of calls that change something"
    )
    records.add_argument(
        "--metrics-listen", default="", metavar="HOST:PORT", help="numbers for Prometheus"
    )


def serving_options(options: argparse.Namespace) -> ServingOptions:
    """Return how to serve.

    Raises:
        InvalidRequest: options that do not fit together.
    """
    return ServingOptions(
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        tls_client_ca=options.tls_client_ca,
        access_file=options.access,
        insecure=options.insecure,
        audit_log=options.audit_log,
        metrics_listen=options.metrics_listen,
        max_streams=options.max_streams,
    )


def channel_security(options: argparse.Namespace) -> ChannelSecurity:
    """Return how this process calls others: over TLS if it serves so."""
    return ChannelSecurity(
        ca_cert=options.tls_ca_cert,
        cert=options.tls_cert,
        key=options.tls_key,
        token_file=options.token_file,
    )
