"""What every verb is given beside its own options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from loader_service.cli.output import Format

__all__ = ["Invocation"]


@dataclasses.dataclass(frozen=True, slots=True)
class Invocation:
    """One call of `loaderctl`.

    Attributes:
        flags: connection options as given, before or after the verb, by setting key.
        output: how to print data.
        quiet: print data and errors only.
        verbose: also print whom is called, and all facts of an error.
    """

    flags: Mapping[str, str | bool]
    output: Format
    quiet: bool
    verbose: bool
