"""Where `loaderctl` connects to, and as whom: flags, environment, context and defaults in one value.

A flag wins over its environment variable, that over the context, and that over the default. An
empty variable counts as one that is not set. Pure: reads neither files nor the environment.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loader_service.cli.durations import parse_seconds

__all__ = [
    "EXIT_USAGE",
    "SETTINGS",
    "ConnectionSettings",
    "Contexts",
    "Kind",
    "Setting",
    "SettingsError",
    "resolve",
]


EXIT_USAGE = 2
"""Exit code where options, environment or config file make no sense."""


class SettingsError(Exception):
    """Options, environment or config file make no sense; the message says which and why."""


class Kind(enum.Enum):
    """What the value of a setting is."""

    TEXT = enum.auto()
    FILE = enum.auto()
    SWITCH = enum.auto()
    TIME = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One connection setting.

    Attributes:
        key: its name in a context; with `--` before it, its flag.
        kind: what its value is.
        env: its environment variable; empty without one.
        default: its value where nobody gives one.
        metavar: placeholder for its value in the help.
        help: what it is.
    """

    key: str
    kind: Kind
    env: str
    default: str
    metavar: str
    help: str

    @property
    def field(self) -> str:
        """Name of the attribute of `ConnectionSettings`."""
        return self.key.replace("-", "_")


SETTINGS = (
    Setting(
        "endpoint", Kind.TEXT, "LOADER_ENDPOINT", "127.0.0.1:50051", "HOST:PORT", "The coordinator."
    ),
    Setting("tls", Kind.SWITCH, "", "", "", "Encrypt; certificates given below imply it."),
    Setting(
        "tls-ca-cert",
        Kind.FILE,
        "LOADER_TLS_CA_CERT",
        "",
        "FILE",
        "Who signs the servers' certificates.",
    ),
    Setting("tls-cert", Kind.FILE, "LOADER_TLS_CERT", "", "FILE", "Certificate to show (mTLS)."),
    Setting("tls-key", Kind.FILE, "LOADER_TLS_KEY", "", "FILE", "Key of that certificate."),
    Setting(
        "tls-server-name",
        Kind.TEXT,
        "LOADER_TLS_SERVER_NAME",
        "",
        "NAME",
        "Name expected in the servers' certificates.",
    ),
    Setting("token-file", Kind.FILE, "LOADER_TOKEN_FILE", "", "FILE", "File with a bearer token."),
    Setting("timeout", Kind.TIME, "LOADER_TIMEOUT", "per call", "TIME", "Deadline of each call."),
)
"""All settings that a context can hold."""

_CERTIFICATES = ("tls-ca-cert", "tls-cert")
_TLS_KEYS = (*_CERTIFICATES, "tls-key", "tls-server-name")


@dataclasses.dataclass(frozen=True, slots=True)
class Contexts:
    """What the config file says.

    Attributes:
        path: the file.
        current: name of the current context; empty without one.
        named: settings by key, by context.
    """

    path: str
    current: str = ""
    named: Mapping[str, Mapping[str, str | bool]] = dataclasses.field(default_factory=dict)

    def settings_of(self, name: str) -> Mapping[str, str | bool]:
        """Return the settings of a context.

        Raises:
            SettingsError: there is none of this name.
        """
        if name not in self.named:
            known = ", ".join(sorted(self.named)) or "none"
            advice = (
                ""
                if self.named
                else f'; the lines [contexts.{name}] and endpoint = "HOST:PORT" in that file make one'
            )
            raise SettingsError(f"no context {name!r} in {self.path}; there are: {known}{advice}")
        return self.named[name]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """How to reach the servers, and where each value came from.

    Attributes:
        endpoint: `HOST:PORT` of the coordinator.
        tls: whether calls are encrypted.
        tls_ca_cert: authorities that sign servers' certificates.
        tls_cert: certificate chain to show.
        tls_key: key of `tls_cert`.
        tls_server_name: name expected in servers' certificates.
        token_file: file with a bearer token.
        timeout: deadline of a call as it was written.
        timeout_seconds: that in seconds; None leaves each kind of call its own.
        context: the context in use; empty without one.
        config_file: where contexts are kept.
        origins: where each setting came from, by its key, and `context`.
    """

    endpoint: str
    tls: bool
    tls_ca_cert: str
    tls_cert: str
    tls_key: str
    tls_server_name: str
    token_file: str
    timeout: str
    timeout_seconds: float | None
    context: str
    config_file: str
    origins: Mapping[str, str]


def resolve(
    flags: Mapping[str, str | bool], environ: Mapping[str, str], contexts: Contexts
) -> ConnectionSettings:
    """Return the settings to connect with.

    Args:
        flags: options as given, by setting key, and `context`.
        environ: environment variables.
        contexts: the config file.

    Raises:
        SettingsError: a value makes no sense, two contradict each other, or there is no such context.
    """
    context, context_origin = _context(flags, environ, contexts)
    named = contexts.settings_of(context) if context else {}
    given = {setting.key: _given(setting, flags, environ, named, context) for setting in SETTINGS}
    timeout_seconds = _seconds(given["timeout"]) if given["timeout"].closeness else None
    _settle_tls(given)
    if given["tls"].value is None:
        implied = [key for key in _CERTIFICATES if given[key].value]
        origin = f"follows from {implied[0]}" if implied else given["tls"].origin
        given["tls"] = _Given(bool(implied), origin, 0)
    values: dict[str, Any] = {setting.field: given[setting.key].value for setting in SETTINGS}
    return ConnectionSettings(
        **values,
        timeout_seconds=timeout_seconds,
        context=context,
        config_file=contexts.path,
        origins={
            "context": context_origin,
            **{key: choice.origin for key, choice in given.items()},
        },
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Given:
    """A value, where it came from, and how close to the call that is; 0 is a default."""

    value: str | bool | None
    origin: str
    closeness: int


def _context(
    flags: Mapping[str, str | bool], environ: Mapping[str, str], contexts: Contexts
) -> tuple[str, str]:
    if "context" in flags:
        return str(flags["context"]), "flag --context"
    if name := environ.get("LOADER_CONTEXT"):
        return name, "env LOADER_CONTEXT"
    return contexts.current, "current-context" if contexts.current else "default"


def _given(
    setting: Setting,
    flags: Mapping[str, str | bool],
    environ: Mapping[str, str],
    named: Mapping[str, str | bool],
    context: str,
) -> _Given:
    key = setting.key
    if key in flags:
        flag = "--no-tls" if key == "tls" and not flags[key] else f"--{key}"
        given = _Given(flags[key], f"flag {flag}", 3)
    elif setting.env and environ.get(setting.env):
        given = _Given(environ[setting.env], f"env {setting.env}", 2)
    elif key in named:
        given = _Given(named[key], f"context {context}", 1)
    else:
        given = _Given(None if setting.kind is Kind.SWITCH else setting.default, "default", 0)
    if setting.kind is Kind.FILE and given.value:
        # Not every shell has done it: `--token-file=~/token` arrives as it is.
        given = dataclasses.replace(given, value=str(Path(str(given.value)).expanduser()))
    return given


def _seconds(given: _Given) -> float:
    try:
        seconds = parse_seconds(str(given.value))
    except ValueError as error:
        raise SettingsError(f"timeout ({given.origin}): {error}") from None
    if not seconds:
        raise SettingsError(f"timeout ({given.origin}): it must be more than 0")
    return seconds


def _settle_tls(given: dict[str, _Given]) -> None:
    """Let the certificates and a wish for no TLS agree: what stands closer to the call wins."""
    tls = given["tls"]
    if tls.value is not False:
        return
    files = {key: given[key] for key in _TLS_KEYS if given[key].value}
    for key, file in files.items():
        if file.closeness == tls.closeness:
            raise SettingsError(f"no TLS ({tls.origin}) contradicts {key} ({file.origin})")
    if any(file.closeness > tls.closeness for file in files.values()):
        given["tls"] = _Given(None, "default", 0)
        return
    for key in files:
        given[key] = _Given("", tls.origin, tls.closeness)
