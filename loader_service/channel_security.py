"""How a caller checks whom it calls, and shows who it is itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import grpc

from loader_service.errors import InvalidRequest
from loader_service.file_stamp import file_stamp

__all__ = ["ChannelSecurity"]


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
            InvalidRequest: FILE_UNREADABLE.
        """
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca_cert),
            private_key=_read(self.key),
            certificate_chain=_read(self.cert),
        )

    def for_other_servers(self) -> ChannelSecurity:
        """Return the same without `server_name`, which is that of one server."""
        return dataclasses.replace(self, server_name="")

    def stamp(self) -> object:
        """Return a value that changes with the certificate files."""
        return file_stamp(*filter(None, (self.ca_cert, self.cert, self.key)))

    def token(self) -> str:
        """Read the bearer token; empty without a file.

        Raises:
            InvalidRequest: FILE_UNREADABLE.
        """
        text = _read(self.token_file)
        return text.decode("ascii", "replace").strip() if text else ""


def _read(name: str) -> bytes | None:
    if not name:
        return None
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise InvalidRequest(
            f"{name} cannot be read: {error.strerror}", reason="FILE_UNREADABLE", file=name
        ) from error
