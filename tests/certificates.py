"""Throw-away authorities, certificates and access files."""

from __future__ import annotations

import datetime as dt
import hashlib
from pathlib import Path

import trustme

from loader_service.channel_security import ChannelSecurity
from loader_service.serving.options import ServingOptions

ROLES = ("viewer", "operator", "admin", "worker", "coordinator")


class Authority:
    """A certificate authority whose files lie in a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._ca = trustme.CA()
        self.cert = str(folder / f"{name}.pem")
        self._ca.cert_pem.write_to_path(self.cert)

    def issue(self, name: str, *identities: str, days: float = 1) -> tuple[str, str]:
        """Write a certificate and its key; `days` below 0 make one that has expired.

        A file that was there is replaced, as a rotation does it.
        """
        expires = dt.datetime.now(dt.UTC) + dt.timedelta(days=days)
        issued = self._ca.issue_cert(*identities, not_after=expires)
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
        for path, content in ((key, issued.private_key_pem.bytes()), (cert, chain)):
            fresh = path.with_suffix(".new")
            fresh.write_bytes(content)
            fresh.replace(path)
        return str(cert), str(key)

    def client(self, name: str, *identities: str, days: float = 1) -> ChannelSecurity:
        """Issue a client certificate, and return how it is used."""
        cert, key = self.issue(name, *identities, days=days)
        return ChannelSecurity(ca_cert=self.cert, cert=cert, key=key)

    def server(self, access_file: str, *identities: str, mtls: bool = True) -> ServingOptions:
        """Issue the server's certificate, and return how it serves."""
        cert, key = self.issue("server", *(identities or ("127.0.0.1", "localhost")))
        return ServingOptions(
            tls_cert=cert,
            tls_key=key,
            tls_client_ca=self.cert if mtls else "",
            access_file=access_file,
        )


def identity(name: str, role: str, **proof: str) -> str:
    """Return an entry of an access file."""
    lines = {"name": name, "role": role, **proof}
    return "[[identity]]\n" + "".join(f'{key} = "{value}"\n' for key, value in lines.items())


def token_identity(role: str, token: str) -> str:
    """Return the entry of somebody with a token."""
    return identity(f"the-{role}", role, token_sha256=hashlib.sha256(token.encode()).hexdigest())


def write_access(folder: Path, *entries: str) -> str:
    """Write an access file; a file that was there is replaced."""
    path, fresh = folder / "access.toml", folder / "access.new"
    fresh.write_text("\n".join(entries))
    fresh.replace(path)
    return str(path)


def write_token(folder: Path, token: str, name: str = "token") -> str:
    """Write a token file."""
    path = folder / name
    path.write_text(f"{token}\n")
    return str(path)
