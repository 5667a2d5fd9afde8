"""A server's TLS credentials, read again when their files change."""

from __future__ import annotations

import logging
from typing import Any

import grpc

from loader_service import pem
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
        InvalidRequest: FILE_UNREADABLE, or TLS_FILES_INVALID.
    """
    files = _Files(cert, key, client_ca)
    first = files.load()
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
        self._complained: object = None

    def load(self) -> grpc.ServerCertificateConfiguration:
        """Read the files and check that they fit."""
        stamp = self._current()
        chain, key = pem.read_pair(self._cert, self._key)
        authorities = pem.read_authorities(self._client_ca) if self._client_ca else None
        self._stamp = stamp
        return grpc.ssl_server_certificate_configuration([(key, chain)], authorities)

    def load_if_changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the new configuration, None to stay with the present one. Called by gRPC."""
        stamp = self._current()
        if stamp == self._stamp:
            return None
        try:
            configuration = self.load()
        except InvalidRequest as error:
            # Tried again at every handshake, as rights may change without a new stamp.
            if (stamp, error.message) != self._complained:
                _log.error("the TLS files cannot be used: %s; the last good ones stay", error)
            self._complained = (stamp, error.message)
            return None
        _log.info("certificate %s was read again", self._cert)
        return configuration

    def _current(self) -> object:
        return file_stamp(*filter(None, (self._cert, self._key, self._client_ca)))
