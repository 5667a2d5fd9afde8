"""Why a TLS connection fails, in words: gRPC itself only says that the server is unavailable."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
from typing import Any

from loader_service import addresses, pem
from loader_service.channel_security import ChannelSecurity
from loader_service.errors import LoaderError, Unauthenticated

__all__ = ["explain"]

STEP_SECONDS = 1.0
"""Most time for each of: to connect, to shake hands, to wait for the server's first word."""


def explain(address: str, security: ChannelSecurity, seconds: float) -> LoaderError | None:
    """Try the handshake that gRPC has failed at, and return what is wrong with it.

    Args:
        address: `HOST:PORT` of the server.
        security: how it was called.
        seconds: how long this may block; three steps are enough in any case.

    Returns:
        None where TLS is not what fails.
    """
    step = min(STEP_SECONDS, seconds / 3)
    if step <= 0:
        return None
    try:
        host, port = addresses.split(address)
        with socket.create_connection((host, port), step) as connection:
            connection.settimeout(step)
            if not security.uses_tls:
                return _explain_plaintext(connection, address)
            return _explain_tls(connection, host, security)
    except OSError:
        return None


def _explain_plaintext(connection: socket.socket, address: str) -> LoaderError | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with context.wrap_socket(connection):
            pass
    except (ssl.SSLError, OSError):
        return None
    return Unauthenticated(
        f"the server at {address} speaks TLS; give its authority with --tls-ca-cert",
        reason="TLS_REQUIRED",
    )


def _explain_tls(
    connection: socket.socket, host: str, security: ChannelSecurity
) -> LoaderError | None:
    context = ssl.create_default_context(cafile=security.ca_cert or None)
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    try:
        if security.cert:
            context.load_cert_chain(security.cert, security.key, password="")
        with context.wrap_socket(connection) as secured:
            expected = security.server_name or host
            names = _names(secured.getpeercert() or {})
            if not any(_matches(name, expected) for name in names):
                return Unauthenticated(
                    f"the server's certificate is for {', '.join(names) or 'no name'}, not for "
                    f"{expected!r}; dial one of its names, or have {expected!r} added to it",
                    reason="TLS_NAME_MISMATCH",
                    dialled=expected,
                    names=",".join(names),
                )
            return _explain_silence(secured, security)
    except ssl.SSLCertVerificationError as error:
        return Unauthenticated(
            f"the server's certificate is not accepted: {error.verify_message}",
            reason="TLS_CERTIFICATE_REFUSED",
        )
    except ssl.SSLError as error:
        return _explain_refusal(error, security)


def _explain_silence(secured: ssl.SSLSocket, security: ChannelSecurity) -> LoaderError | None:
    """Look whether the server hangs up: with TLS 1.3 it refuses a client after the handshake.

    One that has accepted the client speaks first, as HTTP/2 demands.
    """
    try:
        if secured.recv(1):
            return None
    except TimeoutError:
        return None
    except ConnectionError:
        pass
    return _client_refused("the connection was closed after the handshake", security)


def _explain_refusal(error: ssl.SSLError, security: ChannelSecurity) -> LoaderError:
    what = (error.reason or str(error)).replace("_", " ").lower()
    if "wrong version number" in what or "record layer" in what:
        return Unauthenticated(
            "the server does not speak TLS; leave the TLS options out", reason="TLS_NOT_SPOKEN"
        )
    return _client_refused(what, security)


def _client_refused(how: str, security: ChannelSecurity) -> LoaderError:
    fault = ""
    if security.cert:
        with contextlib.suppress(OSError):  # Files that are just being exchanged.
            fault = pem.date_fault(security.cert, security.key)
    if fault:
        why = f"the certificate {security.cert} {fault}"
    elif security.cert:
        why = f"it may not know the authority that signed {security.cert} (--tls-cert)"
    else:
        why = (
            "it may want a client certificate (--tls-cert, --tls-key) of an authority that it knows"
        )
    return Unauthenticated(
        f"the server refuses this client's TLS: {how}; {why}",
        reason="TLS_CLIENT_REFUSED",
    )


def _names(certificate: Any) -> list[str]:
    """Return the certificate's names as gRPC looks at them: the common name only without others."""
    names = [f"{kind}:{value}" for kind, value in certificate.get("subjectAltName", ())]
    subject = [pair for part in certificate.get("subject", ()) for pair in part]
    return names or [f"CN:{value}" for key, value in subject if key == "commonName"]


def _matches(name: str, expected: str) -> bool:
    kind, _, value = name.partition(":")
    if kind == "IP Address":
        try:
            return ipaddress.ip_address(value) == ipaddress.ip_address(expected)
        except ValueError:
            return False
    if kind not in ("DNS", "CN"):
        return False
    value, expected = value.lower(), expected.lower()
    if value.startswith("*."):
        return expected.partition(".")[2] == value[2:]
    return value == expected
