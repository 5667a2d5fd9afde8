"""How a caller checks whom it calls, and shows who it is itself."""

from __future__ import annotations

import dataclasses
import re
import ssl
from pathlib import Path

import grpc

from loader_service.errors import InvalidRequest
from loader_service.file_stamp import file_stamp

__all__ = ["ChannelSecurity"]

_MOST_TOKEN_CHARACTERS = 8192
"""Servers take 16 KiB of metadata, and no longer token for a service account's."""

_TOKEN = re.compile(rf"[\x21-\x7e]{{1,{_MOST_TOKEN_CHARACTERS}}}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSecurity:
    """How a caller checks whom it calls and shows who it is itself. All files are PEM.

    Changed files count from the next call on.

    Attributes:
        tls: use TLS even without a file below, trusting the machine's authorities.
        ca_cert: authorities that sign servers' certificates.
        cert: certificate chain that the caller shows (mTLS).
        key: private key of `cert`.
        server_name: name expected in the server's certificate instead of the dialled host; for tests
            and tunnels.
        token_file: file with a bearer token.
    """

    tls: bool = False
    ca_cert: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""
    token_file: str = ""

    def __post_init__(self) -> None:
        """Refuse a certificate without its key and the other way round."""
        if bool(self.cert) != bool(self.key):
            raise InvalidRequest("a certificate and its key go together", field="tls_key")

    @property
    def uses_tls(self) -> bool:
        """Whether the channel is encrypted."""
        return self.tls or bool(self.ca_cert or self.cert)

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files.

        Raises:
            InvalidRequest: FILE_UNREADABLE, or TLS_FILES_INVALID.
        """
        for name in (self.ca_cert, self.cert, self.key):
            _read(name)
        self._check()
        return grpc.ssl_channel_credentials(
            # Without any gRPC would trust a list of its own, not the machine's.
            root_certificates=_read(self.ca_cert or ssl.get_default_verify_paths().cafile or ""),
            private_key=_read(self.key),
            certificate_chain=_read(self.cert),
        )

    def _check(self) -> None:
        """Refuse files that are no certificates or do not fit; gRPC would only be unavailable."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        names = self.ca_cert
        try:
            if self.ca_cert:
                context.load_verify_locations(self.ca_cert)
            names = f"{self.cert}, {self.key}"
            if self.cert:
                # The empty password refuses an encrypted key; without one OpenSSL would ask for it.
                context.load_cert_chain(self.cert, self.key, password="")
        except ssl.SSLError as error:
            raise InvalidRequest(
                f"{names}: {error.reason or error}", reason="TLS_FILES_INVALID", field="tls_cert"
            ) from error

    def for_other_servers(self) -> ChannelSecurity:
        """Return the same without `server_name`, which is that of one server."""
        return dataclasses.replace(self, server_name="")

    def stamp(self) -> object:
        """Return a value that changes with the certificate files."""
        return file_stamp(*filter(None, (self.ca_cert, self.cert, self.key)))

    def token(self) -> str:
        """Read the bearer token; empty without a file.

        Raises:
            InvalidRequest: FILE_UNREADABLE, or TOKEN_INVALID.
        """
        text = _read(self.token_file)
        if text is None:
            return ""
        token = text.decode("ascii", "replace").strip()
        if not _TOKEN.fullmatch(token):
            raise InvalidRequest(
                f"{self.token_file} does not hold a token: up to {_MOST_TOKEN_CHARACTERS} printable "
                "ASCII characters without a space",
                reason="TOKEN_INVALID",
                file=self.token_file,
            )
        return token


def _read(name: str) -> bytes | None:
    if not name:
        return None
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise InvalidRequest(
            f"{name} cannot be read: {error.strerror}", reason="FILE_UNREADABLE", file=name
        ) from error
