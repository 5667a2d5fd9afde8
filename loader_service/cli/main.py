"""`loaderctl`. Data goes to stdout, progress and errors to stderr.

Exit codes: 0 done, 1 the operation failed, 2 usage, 3 not found, 4 precondition or conflict,
5 not allowed, 6 deadline, 7 unavailable, 130 interrupted.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

import typer.main
from typer import completion

from loader_service.cli.options import Group, new_app

__all__ = ["app", "main"]

_VERBS = {
    "load": "verbs_loads",
    "watch": "verbs_loads",
    "cancel": "verbs_loads",
    "unload": "verbs_loads",
    "plan": "verbs_loads",
    "inspect": "verbs_look",
    "tensors": "verbs_look",
    "get": "verbs_look",
    "describe": "verbs_look",
    "top": "verbs_look",
    "drain": "verbs_look",
    "undrain": "verbs_look",
    "health": "verbs_look",
    "config": "verbs_local",
    "completion": "verbs_local",
    "version": "verbs_local",
}
"""Where each verb is, in the order of the help."""


class _Verbs(Group):
    """Imports a verb when it is called: `version` needs no gRPC, and Tab must not wait."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line; `--version` is what other programs call the verb."""
        return super().parse_args(ctx, ["version"] if args == ["--version"] else args)

    def list_commands(self, ctx: Any) -> list[str]:
        for module in dict.fromkeys(_VERBS.values()):
            self._load(module)
        return list(_VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _VERBS:
            self._load(_VERBS[cmd_name])
        else:
            # The complaint about an unknown verb names similar ones.
            self.list_commands(ctx)
        return self.commands.get(cmd_name)

    def _load(self, module: str) -> None:
        verbs = typer.main.get_command(importlib.import_module(f"loader_service.cli.{module}").app)
        assert isinstance(verbs, Group)
        self.commands.update(verbs.commands)


app = new_app(
    "Loads checkpoints onto groups of workers, and shows what they hold.",
    example="loaderctl --endpoint coordinator:50051 load llama-8b --tp 4",
    cls=_Verbs,
)


def main() -> None:
    """Run the command."""
    if "_LOADERCTL_COMPLETE" in os.environ:
        # The shell shows all that is printed, also to stderr, between the words that are being typed.
        logging.disable()
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        # Registers the shells; `completion` prints scripts that set the variable.
        completion.completion_init()  # type: ignore[attr-defined]
    app()


if __name__ == "__main__":
    main()
