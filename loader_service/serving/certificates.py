"""A server's TLS credentials, read again when their files change."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Any

import grpc

from loader_service.errors import InvalidRequest
from loader_service.file_stamp import file_stamp

__all__ = ["server_credentials"]

_log = logging.getLogger(__name__)


def server_credentials(cert: str, key: str, client_ca: str) -> grpc.ServerCredentials:
    """Return credentials that follow their files.

    A file that changes counts from the next handshake on. While certificate and key do not fit (one
    of them has been replaced already), the last pair that did is used.

    Args:
        cert: PEM file with the server's certificate chain.
        key: PEM file with its private key.
        client_ca: PEM file with the authorities of clients; clients must then show a certificate.
            Empty asks for none.

    Raises:
        InvalidRequest: TLS_FILES_INVALID.
    """
    files = _Files(cert, key, client_ca)
    try:
        first = files.load()
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(
            f"{cert}, {key}: {error}", reason="TLS_FILES_INVALID", field="tls_cert"
        ) from error
    # The callback may return None; the type stubs do not know.
    fetch: Any = files.load_if_changed
    return grpc.dynamic_ssl_server_credentials(
        first, fetch, require_client_authentication=bool(client_ca)
    )


class _Files:
    def __init__(self, cert: str, key: str, client_ca: str) -> None:
        self._cert = cert
        self._key = key
        self._client_ca = client_ca
        self._stamp: object = None

    def load(self) -> grpc.ServerCertificateConfiguration:
        """Read the files and check that they fit."""
        stamp = self._current()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # An encrypted key is refused by the empty password; without one OpenSSL would ask for it.
        context.load_cert_chain(self._cert, self._key, password="")
        authorities = None
        if self._client_ca:
            context.load_verify_locations(self._client_ca)
            authorities = Path(self._client_ca).read_bytes()
        pair = (Path(self._key).read_bytes(), Path(self._cert).read_bytes())
        self._stamp = stamp
        return grpc.ssl_server_certificate_configuration([pair], authorities)

    def load_if_changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the new configuration, None to stay with the present one. Called by gRPC."""
        try:
            if self._current() == self._stamp:
                return None
            configuration = self.load()
        except (OSError, ssl.SSLError) as error:
            _log.error("the TLS files cannot be used: %s; the last good ones stay", error)
            return None
        _log.info("certificate %s was read again", self._cert)
        return configuration

    def _current(self) -> object:
        return file_stamp(*filter(None, (self._cert, self._key, self._client_ca)))
