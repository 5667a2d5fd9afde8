"""The file with named contexts: connection settings under a name, one of them the current one.

```toml
current-context = "prod"

[contexts.prod]
endpoint = "coordinator.example:50051"
tls-ca-cert = "ca.pem"      # relative to this file's folder; `~` is the home folder
token-file = "~/.loader-token"
```
"""

from __future__ import annotations

import os
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loader_service.cli.connection import SETTINGS, Contexts, Kind, SettingsError

__all__ = ["config_path", "read_contexts", "use_context"]

_CURRENT = "current-context"
_BY_KEY = {setting.key: setting for setting in SETTINGS}


def config_path(environ: Mapping[str, str]) -> Path:
    """Return where the contexts are: LOADER_CONFIG, or `loaderctl/config.toml` of the user."""
    if named := environ.get("LOADER_CONFIG"):
        return Path(named).expanduser()
    home = environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
    return Path(home) / "loaderctl" / "config.toml"


def read_contexts(environ: Mapping[str, str]) -> Contexts:
    """Read the contexts; without a file there are none.

    Raises:
        SettingsError: the file that LOADER_CONFIG names is missing, or a file is not as it should
            be; says where.
    """
    path = config_path(environ)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if environ.get("LOADER_CONFIG"):
            raise SettingsError(f"LOADER_CONFIG names {path}, which does not exist") from None
        return Contexts(str(path))
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from None
    try:
        return _checked(path, tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not TOML: {error}") from None


def use_context(environ: Mapping[str, str], name: str) -> Path:
    """Make a context the current one and return the file; the rest of the file stays as it is.

    Raises:
        SettingsError: no context has this name, or the file cannot be used.
    """
    # Imported here: no other verb edits the file.
    import tomlkit

    contexts = read_contexts(environ)
    contexts.settings_of(name)
    path = Path(contexts.path)
    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    if _CURRENT in document:
        document[_CURRENT] = name
        text = tomlkit.dumps(document)
    else:
        # Behind the tables it would become a key of the last one.
        text = f"{_CURRENT} = {tomlkit.item(name).as_string()}\n{tomlkit.dumps(document)}"
    _replace(path, text)
    return path


def _checked(path: Path, document: Mapping[str, Any]) -> Contexts:
    _refuse_unknown(path, document, {_CURRENT, "contexts"}, "")
    current, contexts = document.get(_CURRENT, ""), document.get("contexts", {})
    if not isinstance(current, str):
        raise SettingsError(f"{path}: {_CURRENT} is a text")
    if not isinstance(contexts, dict):
        raise SettingsError(f"{path}: contexts are tables such as [contexts.prod]")
    named = {name: _context(path, name, table) for name, table in contexts.items()}
    return Contexts(str(path), current, named)


def _context(path: Path, name: str, table: Any) -> dict[str, str | bool]:
    where = f" in [contexts.{name}]"
    if not isinstance(table, dict):
        raise SettingsError(f"{path}: [contexts.{name}] is a table")
    _refuse_unknown(path, table, _BY_KEY.keys(), where)
    values: dict[str, str | bool] = {}
    for key, value in table.items():
        kind = _BY_KEY[key].kind
        wanted = bool if kind is Kind.SWITCH else str
        if not isinstance(value, wanted):
            what = "true or false" if wanted is bool else "a text"
            raise SettingsError(f"{path}: {key}{where} is {what}, not {value!r}")
        if kind is Kind.FILE and value:
            values[key] = str(path.parent / Path(str(value)).expanduser())
        else:
            values[key] = value
    return values


def _refuse_unknown(path: Path, table: Mapping[str, Any], known: Any, where: str) -> None:
    unknown = sorted(table.keys() - known)
    if unknown:
        raise SettingsError(
            f"{path}: unknown {'key' if len(unknown) == 1 else 'keys'} {', '.join(unknown)}{where};"
            f" known are {', '.join(sorted(known))}"
        )


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all, through links and with its permissions kept."""
    target = path.resolve()
    mode = target.stat().st_mode
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(mode)
        Path(temporary).replace(target)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
