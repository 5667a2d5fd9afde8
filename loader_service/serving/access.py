"""Who may call what: identities with one role each, and the roles that every method is open to."""

from __future__ import annotations

import contextvars
import dataclasses
import enum
import hashlib
import logging
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loader_service.errors import AccessDenied, InvalidRequest, Unauthenticated
from loader_service.file_stamp import file_stamp
from loader_service.serving.kubernetes import TokenReviewer

__all__ = [
    "CHANGING_METHODS",
    "LOCAL",
    "METHOD_ROLES",
    "NOBODY",
    "OPEN_METHODS",
    "Access",
    "Identity",
    "Role",
    "caller",
    "read_access_file",
    "require",
]

_log = logging.getLogger(__name__)


class Role(enum.StrEnum):
    """What an identity is there for."""

    VIEWER = "viewer"
    """Looks at loads, workers and checkpoints."""

    OPERATOR = "operator"
    """Also starts and ends loads."""

    ADMIN = "admin"
    """Also takes workers in and out of service."""

    WORKER = "worker"
    """Is a worker: registers with the coordinator."""

    COORDINATOR = "coordinator"
    """Is the coordinator: prepares, commits and ends loads on workers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """A caller.

    Attributes:
        name: for logs and quotas.
        roles: what the caller may be taken for.
    """

    name: str
    roles: frozenset[Role]


LOCAL = Identity("local", frozenset(Role))
"""Everybody, on a server without access control."""

NOBODY = Identity("anonymous", frozenset())
"""A caller that has not been told apart yet, and may do nothing."""

_VIEWERS = frozenset({Role.VIEWER, Role.OPERATOR, Role.ADMIN})
_OPERATORS = frozenset({Role.OPERATOR, Role.ADMIN})
_ADMINS = frozenset({Role.ADMIN})
_WORKERS = frozenset({Role.WORKER})
_COORDINATOR = frozenset({Role.COORDINATOR})
_C = "/loader_service.v1.CoordinatorService/"
_W = "/loader_service.v1.WorkerService/"

METHOD_ROLES: Mapping[str, frozenset[Role]] = {
    f"{_C}RegisterWorker": _WORKERS,
    f"{_C}Heartbeat": _WORKERS,
    f"{_C}DeregisterWorker": _WORKERS,
    f"{_C}InspectCheckpoint": _VIEWERS,
    f"{_C}PlanLoad": _VIEWERS,
    f"{_C}Load": _OPERATORS,
    f"{_C}GetLoad": _VIEWERS,
    f"{_C}ListLoads": _VIEWERS,
    f"{_C}WatchLoad": _VIEWERS,
    f"{_C}CancelLoad": _OPERATORS,
    f"{_C}Unload": _OPERATORS,
    f"{_C}ListWorkers": _VIEWERS,
    f"{_C}GetWorker": _VIEWERS,
    f"{_C}DrainWorker": _ADMINS,
    f"{_C}UndrainWorker": _ADMINS,
    f"{_W}GetStatus": _VIEWERS | _COORDINATOR,
    f"{_W}WatchStatus": _VIEWERS,
    f"{_W}ListTensors": _VIEWERS,
    f"{_W}PrepareLoad": _COORDINATOR,
    f"{_W}CommitLoad": _COORDINATOR,
    f"{_W}AbortLoad": _COORDINATOR,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _VIEWERS,
}
"""Roles of every method; one that is not listed is open to nobody."""

CHANGING_METHODS = frozenset(
    {
        f"{_C}RegisterWorker",
        f"{_C}DeregisterWorker",
        f"{_C}Load",
        f"{_C}CancelLoad",
        f"{_C}Unload",
        f"{_C}DrainWorker",
        f"{_C}UndrainWorker",
        f"{_W}PrepareLoad",
        f"{_W}CommitLoad",
        f"{_W}AbortLoad",
    }
)
"""Methods that the audit log records."""

OPEN_METHODS = frozenset(
    f"/grpc.health.v1.Health/{method}" for method in ("Check", "Watch", "List")
)
"""Methods that need no identity: probes have none, and the answers say only up or not."""

caller: contextvars.ContextVar[Identity] = contextvars.ContextVar("caller", default=NOBODY)
"""The identity on whose behalf the running call works."""


def require(identity: Identity, roles: frozenset[Role], what: str) -> None:
    """Refuse a caller that has none of `roles`.

    Raises:
        AccessDenied: saying which roles would do.
    """
    if not identity.roles & roles:
        wanted = ", ".join(sorted(roles)) or "nobody"
        raise AccessDenied(
            f"{identity.name!r} has the role {', '.join(sorted(identity.roles))}; {what} is for "
            f"{wanted}",
            identity=identity.name,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Identities:
    """An access file: identities by what proves them."""

    certificates: Mapping[str, Identity]
    token_hashes: Mapping[str, Identity]
    service_accounts: Mapping[str, Identity]
    reviewer: TokenReviewer | None


class Access:
    """Tells callers apart by an access file, which is read again when it changes.

    A changed file that cannot be used is reported in the log, and the last good one stays.
    """

    def __init__(self, path: str) -> None:
        """Read the file.

        Raises:
            InvalidRequest: ACCESS_FILE_INVALID.
        """
        self._path = path
        self._stamp = file_stamp(path)
        self._identities = read_access_file(path)

    async def identify(self, certificate_names: Sequence[str], token: str) -> Identity:
        """Return the caller's identity: that of its token where it sends one, else of its certificate.

        Args:
            certificate_names: subject alternative names and common name of a verified certificate.
            token: bearer token; empty without one.

        Raises:
            Unauthenticated: nobody is known by this.
            ServiceUnavailable: TOKEN_NOT_REVIEWED, the Kubernetes API could not be asked.
        """
        self._refresh()
        known = self._identities
        if token:
            identity = known.token_hashes.get(hashlib.sha256(token.encode()).hexdigest())
            if identity is None and known.reviewer is not None:
                account = await known.reviewer.review(token)
                identity = known.service_accounts.get(account) if account else None
            if identity is None:
                raise Unauthenticated("the bearer token is not known", reason="TOKEN_UNKNOWN")
            return identity
        for name in certificate_names:
            if name in known.certificates:
                return known.certificates[name]
        if certificate_names:
            raise Unauthenticated(
                f"no identity has the certificate of {', '.join(certificate_names)}",
                reason="CERTIFICATE_UNKNOWN",
            )
        raise Unauthenticated("the call carries neither a token nor a client certificate")

    def _refresh(self) -> None:
        stamp = file_stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._identities = read_access_file(self._path)
            _log.info("access file %s was read again", self._path)
        except InvalidRequest as error:
            _log.error("%s; the last good one stays", error)


def read_access_file(path: str) -> _Identities:
    """Read an access file; README.md describes it.

    Raises:
        InvalidRequest: ACCESS_FILE_INVALID, saying where.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # also numbers and lists without end
        raise _invalid(path, str(error)) from error
    unknown = document.keys() - {"identity", "kubernetes"}
    if unknown:
        raise _invalid(path, f"unknown key {min(unknown)!r}")
    proofs: dict[str, dict[str, Identity]] = {
        "certificate": {},
        "token_sha256": {},
        "service_account": {},
    }
    entries = document.get("identity", [])
    if not isinstance(entries, list) or not entries:
        raise _invalid(path, "it names no [[identity]]")
    roles: dict[str, Role] = {}
    for entry in entries:
        _take(path, entry, proofs, roles)
    reviewer = _reviewer(path, document.get("kubernetes"))
    if proofs["service_account"] and reviewer is None:
        raise _invalid(path, "service accounts need a [kubernetes] section")
    return _Identities(
        proofs["certificate"], proofs["token_sha256"], proofs["service_account"], reviewer
    )


def _take(
    path: str, entry: Any, proofs: Mapping[str, dict[str, Identity]], roles: dict[str, Role]
) -> None:
    if not isinstance(entry, dict) or not all(isinstance(text, str) for text in entry.values()):
        raise _invalid(path, "an [[identity]] holds texts only")
    name = entry.get("name", "")
    given = [proof for proof in proofs if entry.get(proof)]
    unknown = entry.keys() - {"name", "role", *proofs}
    if not name or unknown or len(given) != 1:
        raise _invalid(
            path,
            f"identity {name!r}: name, role and one of {', '.join(proofs)} are needed, and nothing "
            "else",
        )
    try:
        role = Role(entry.get("role", ""))
    except ValueError:
        raise _invalid(path, f"identity {name!r}: role is one of {', '.join(Role)}") from None
    # Several entries may prove one identity, for example while its token is replaced.
    if roles.setdefault(name, role) is not role:
        raise _invalid(path, f"identity {name!r} has two roles, {roles[name]} and {role}")
    (proof,) = given
    value = entry[proof].lower() if proof == "token_sha256" else entry[proof]
    if proof == "token_sha256" and (len(value) != 64 or set(value) - set("0123456789abcdef")):
        raise _invalid(path, f"identity {name!r}: token_sha256 is 64 hexadecimal digits")
    if value in proofs[proof]:
        raise _invalid(path, f"identity {name!r}: another one has the same {proof}")
    proofs[proof][value] = Identity(name, frozenset({role}))


def _reviewer(path: str, section: Any) -> TokenReviewer | None:
    if section is None:
        return None
    keys = {"audience", "api_server", "ca_cert", "token_file"}
    if (
        not isinstance(section, dict)
        or section.keys() - keys
        or not all(isinstance(text, str) for text in section.values())
        or not section.get("audience")
    ):
        raise _invalid(
            path, f"[kubernetes] holds audience and, if need be, {', '.join(sorted(keys))}"
        )
    try:
        return TokenReviewer(**section)
    except ValueError as error:
        raise _invalid(path, f"[kubernetes]: {error}") from None


def _invalid(path: str, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"access file {path}: {what}", reason="ACCESS_FILE_INVALID", field="access"
    )
