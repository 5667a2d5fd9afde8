"""Reading numbers out of a `config.json` with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loader_service.errors import InvalidCheckpoint

__all__ = ["flag", "positive_int"]


def positive_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return the positive integer at `key`; `default` stands in for an absent or null field.

    Raises:
        InvalidCheckpoint: INVALID_CONFIG, naming the field.
    """
    value = config.get(key)
    if value is None:
        value = default
    if type(value) is not int or value < 1:
        raise InvalidCheckpoint(
            f"config.json: {key} must be a positive integer, not {value!r}",
            reason="INVALID_CONFIG",
            field=key,
        )
    return value


def flag(config: Mapping[str, Any], key: str) -> bool | None:
    """Return the boolean at `key`, None for an absent or null field.

    Raises:
        InvalidCheckpoint: INVALID_CONFIG, naming the field.
    """
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise InvalidCheckpoint(
            f"config.json: {key} must be true or false, not {value!r}",
            reason="INVALID_CONFIG",
            field=key,
        )
    return value
