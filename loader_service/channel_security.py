"""How a caller checks whom it calls, and shows who it is itself."""

from __future__ import annotations

import dataclasses
import re
import ssl

import grpc

from loader_service import pem
from loader_service.errors import InvalidRequest
from loader_service.file_stamp import file_stamp

__all__ = ["MOST_TOKEN_CHARACTERS", "ChannelSecurity"]

MOST_TOKEN_CHARACTERS = 8192
"""Servers take 16 KiB of metadata, and no longer token for a service account's."""

_TOKEN = re.compile(rf"[\x21-\x7e]{{1,{MOST_TOKEN_CHARACTERS}}}")


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
            missing = "tls_key" if self.cert else "tls_cert"
            raise InvalidRequest(
                f"a certificate and its key go together; --{missing.replace('_', '-')} is missing",
                field=missing,
            )

    @property
    def uses_tls(self) -> bool:
        """Whether the channel is encrypted."""
        return self.tls or bool(self.ca_cert or self.cert)

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files.

        Raises:
            InvalidRequest: FILE_UNREADABLE, or TLS_FILES_INVALID.
        """
        roots = None
        if self.ca_cert:
            roots = pem.read_authorities(self.ca_cert)
        elif usual := ssl.get_default_verify_paths().cafile:
            # Without any gRPC would trust a list of its own, not the machine's.
            roots = pem.read_file(usual)
        chain, key = pem.read_pair(self.cert, self.key) if self.cert else (None, None)
        return grpc.ssl_channel_credentials(roots, private_key=key, certificate_chain=chain)

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
        if not self.token_file:
            return ""
        token = pem.read_file(self.token_file).decode("ascii", "replace").strip()
        if not _TOKEN.fullmatch(token):
            raise InvalidRequest(
                f"{self.token_file} does not hold a token: up to {MOST_TOKEN_CHARACTERS} printable "
                "ASCII characters without a space",
                reason="TOKEN_INVALID",
                file=self.token_file,
            )
        return token
