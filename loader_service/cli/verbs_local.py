"""Verbs that call nobody: this program's version, its settings, completion."""

from __future__ import annotations

import enum
import os
from typing import Annotated

import typer
from typer import completion as typer_completion

from loader_service.cli import connection, documents
from loader_service.cli.connection import EXIT_USAGE, SETTINGS, SettingsError
from loader_service.cli.contexts import read_contexts, use_context
from loader_service.cli.invocation import Invocation
from loader_service.cli.names import complete_context
from loader_service.cli.options import local_verb, new_app
from loader_service.cli.output import (
    CONTEXTS,
    SETTINGS_VIEW,
    SETTINGS_WITH_ORIGIN,
    VERSION,
    Format,
    complain,
    show,
)
from loader_service.version import __version__

__all__ = [
    "Shell",
    "app",
    "completion",
    "get_contexts",
    "use",
    "version",
    "view",
]

app = new_app("This program.")
_config = new_app(
    "Show the connection settings, and change the context.", example="loaderctl config view"
)
app.add_typer(_config, name="config")


class Shell(enum.StrEnum):
    """Shells that completion knows."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@local_verb(app, (Format.TABLE, Format.JSON, Format.YAML), example="loaderctl version -o json")
def version(invocation: Invocation) -> None:
    """Print this program's version."""
    show(VERSION, documents.version_document(__version__), invocation.output)


@local_verb(
    _config,
    (Format.TABLE, Format.JSON, Format.YAML),
    example="loaderctl config view --show-origin",
    connection=True,
)
def view(
    invocation: Invocation,
    show_origin: Annotated[
        bool, typer.Option("--show-origin", help="Also where each value came from.")
    ] = False,
) -> None:
    """Show the connection settings as other verbs would use them."""
    try:
        settings = connection.resolve(invocation.flags, os.environ, read_contexts(os.environ))
    except SettingsError as error:
        raise _refused(error) from None
    keys = ["context", *(setting.key for setting in SETTINGS)]
    how = SETTINGS_WITH_ORIGIN if show_origin else SETTINGS_VIEW
    show(how, documents.settings_document(settings, keys), invocation.output)


@local_verb(
    _config,
    (Format.TABLE, Format.JSON, Format.YAML, Format.NAME),
    example="loaderctl config get-contexts",
)
def get_contexts(invocation: Invocation) -> None:
    """List the contexts of the config file."""
    try:
        contexts = read_contexts(os.environ)
    except SettingsError as error:
        raise _refused(error) from None
    show(CONTEXTS, documents.contexts_document(contexts), invocation.output)


@local_verb(_config, example="loaderctl config use-context prod", name="use-context")
def use(
    _: Invocation,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Name of the context.", autocompletion=complete_context
        ),
    ],
) -> None:
    """Make a context the current one."""
    try:
        path = use_context(os.environ, name)
    except (SettingsError, OSError) as error:
        raise _refused(error) from None
    print(f"current-context is {name} in {path}")


@local_verb(
    app, example="loaderctl completion bash > ~/.local/share/bash-completion/completions/loaderctl"
)
def completion(_: Invocation, shell: Annotated[Shell, typer.Argument(help="Which shell.")]) -> None:
    """Print the script that completes verbs and options."""
    script = typer_completion.get_completion_script(  # type: ignore[attr-defined]
        prog_name="loaderctl", complete_var="_LOADERCTL_COMPLETE", shell=shell.value
    )
    print(script)


def _refused(error: Exception) -> typer.Exit:
    complain(str(error))
    return typer.Exit(EXIT_USAGE)
