"""Reading numbers out of a `config.json` with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loader_service.errors import InvalidCheckpoint

__all__ = ["architectures", "flag", "layer_count", "positive_int"]

_MAX_LAYERS = 10_000
"""Far beyond known models; every layer costs its rules, so a wild number must not be believed."""


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


def layer_count(config: Mapping[str, Any]) -> int:
    """Return `num_hidden_layers`.

    Raises:
        InvalidCheckpoint: INVALID_CONFIG.
    """
    layers = positive_int(config, "num_hidden_layers")
    if layers > _MAX_LAYERS:
        raise InvalidCheckpoint(
            f"config.json: num_hidden_layers is {layers}, more than {_MAX_LAYERS}",
            reason="INVALID_CONFIG",
            field="num_hidden_layers",
        )
    return layers


def architectures(config: Mapping[str, Any]) -> list[str]:
    """Return the class names in `architectures`; what is no list of strings counts as none."""
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


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
