"""Reading and checking PEM files: certificates, keys, authorities.

gRPC takes whatever it is given and is only unavailable later.
"""

from __future__ import annotations

import contextlib
import re
import ssl
from pathlib import Path

from loader_service.errors import InvalidRequest

__all__ = ["date_fault", "read_authorities", "read_file", "read_pair"]

_FLIGHTS = 3
"""How often each side of a handshake has its turn; TLS 1.3 needs two."""

_DATE_FAULTS = {9: "is not valid yet", 10: "has expired"}
"""By OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""


def read_file(name: str) -> bytes:
    """Return what a file holds.

    Raises:
        InvalidRequest: FILE_UNREADABLE.
    """
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise InvalidRequest(
            f"{name} cannot be read: {error.strerror}", reason="FILE_UNREADABLE", file=name
        ) from error


def read_authorities(name: str) -> bytes:
    """Return the certificates of authorities.

    Raises:
        InvalidRequest: FILE_UNREADABLE, or TLS_FILES_INVALID.
    """
    return _certificates(name)


def read_pair(cert: str, key: str) -> tuple[bytes, bytes]:
    """Return a certificate chain and its private key.

    Raises:
        InvalidRequest: FILE_UNREADABLE, or TLS_FILES_INVALID; it names the file that is at fault.
    """
    pair = _certificates(cert), read_file(key)
    # OpenSSL has no words for these two.
    if b"PRIVATE KEY-----" not in pair[1]:
        raise _invalid(key, f"it holds no private key; are it and {cert} exchanged?")
    if re.search(rb"BEGIN ENCRYPTED|^Proc-Type: 4,ENCRYPTED", pair[1], re.MULTILINE):
        raise _invalid(
            key, f"it has a passphrase; `openssl pkey -in {key} -out NEW` writes it without"
        )
    try:
        # An encrypted key is refused by the empty password; without one OpenSSL would ask for it.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        why = error.reason or str(error)
        if why == "KEY_VALUES_MISMATCH":
            raise _invalid(key, f"it is not the key of {cert}") from error
        # Besides these, OpenSSL refuses certificates (EE, CA) that are too weak.
        raise _invalid(cert if why.startswith(("EE_", "CA_")) else key, why) from error
    except OSError as error:
        raise _invalid(key, f"{error.strerror}, while it was checked") from error
    # OpenSSL checks a pair by its files only.
    if (read_file(cert), read_file(key)) != pair:
        raise _invalid(cert, f"it or {key} has changed while it was checked")
    return pair


def date_fault(cert: str, key: str) -> str:
    """Return what is wrong with the dates of a certificate, such as "has expired"; empty if nothing.

    Shows the certificate to a server in this process that trusts nothing but it: the standard
    library reads no dates otherwise.

    Raises:
        OSError: the files cannot be used (ssl.SSLError is one).
    """
    accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    accepting.load_verify_locations(cert)
    accepting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    accepting.verify_mode = ssl.CERT_REQUIRED
    showing = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    showing.check_hostname, showing.verify_mode = False, ssl.CERT_NONE
    for context in (accepting, showing):
        context.load_cert_chain(cert, key, password="")
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        showing.wrap_bio(incoming=back, outgoing=there),
        accepting.wrap_bio(incoming=there, outgoing=back, server_side=True),
    )
    try:
        for _ in range(_FLIGHTS):
            for side in sides:
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return _DATE_FAULTS.get(error.verify_code, "")
    return ""


def _certificates(name: str) -> bytes:
    content = read_file(name)
    try:
        # The text between certificates may be in any language.
        text = content.decode("ascii", "ignore")
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError) as error:
        what = "a private key and " if b"PRIVATE KEY-----" in content else ""
        raise _invalid(name, f"it holds {what}no certificate") from error
    return content


def _invalid(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: {why}", reason="TLS_FILES_INVALID", file=name)
