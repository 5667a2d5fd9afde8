"""What verbs have in common: how they are declared, and the options that all of them take.

A verb is a function whose first argument is a `Session` (or, for verbs that call nobody, an
`Invocation`); `verb` and `local_verb` add the shared options to its command line.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from loader_service.cli.connection import SETTINGS, Kind, Setting
from loader_service.cli.durations import parse_seconds
from loader_service.cli.invocation import Invocation
from loader_service.cli.names import complete_context, complete_load
from loader_service.cli.output import Format

__all__ = [
    "AllowTrailingBytes",
    "Group",
    "LoadId",
    "Path",
    "RequestId",
    "local_verb",
    "new_app",
    "seconds",
    "seconds_above_0",
    "verb",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])

LoadId = Annotated[
    str, typer.Argument(metavar="LOAD", help="Name of the load.", autocompletion=complete_load)
]
Path = Annotated[
    str, typer.Argument(metavar="PATH", help="On the coordinator, inside its model root.")
]
RequestId = Annotated[
    str,
    typer.Option(
        metavar="ID", help="Repeating a request with the same id does it once.", show_default=False
    ),
]

AllowTrailingBytes = Annotated[
    bool, typer.Option("--allow-trailing-bytes", help="Accept bytes after a file's last tensor.")
]


def new_app(help_text: str, *, example: str = "", cls: type[Group] | None = None) -> typer.Typer:
    """Return a group of verbs that takes the connection options before the verb too.

    Its help is plain text, which also starts faster.

    Args:
        help_text: what the verbs do.
        example: shown at the end of the help.
        cls: class of the group; None is for `Group`.
    """

    def remember(ctx: typer.Context, **values: Any) -> None:
        ctx.obj = {**(ctx.obj or {}), **_taken(values)}

    _sign(remember, [_CONTEXT, *_CONNECTION])
    return typer.Typer(
        cls=cls or Group,
        help=help_text,
        epilog=example,
        callback=remember,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


def verb(
    app: typer.Typer, formats: Sequence[Format], *, example: str, name: str | None = None
) -> Callable[[_Function], _Function]:
    """Make a coroutine a verb that calls the coordinator.

    Args:
        app: where the verb belongs.
        formats: what `-o` accepts; the first one is the default.
        example: shown at the end of the help.
        name: of the verb; None takes the function's.
    """

    def register(function: _Function) -> _Function:
        def command(ctx: typer.Context, **values: Any) -> None:
            # Imported here: the session brings gRPC, and not every verb needs it.
            from loader_service.cli.session import run

            invocation = _invocation(ctx, values)
            run(invocation, lambda session: function(session, **values))

        shared = [_output(formats), *_VERBOSITY, *_CONNECTION]
        _register(app, command, function, shared, example, name)
        return function

    return register


def local_verb(
    app: typer.Typer,
    formats: Sequence[Format] = (),
    *,
    example: str,
    name: str | None = None,
    connection: bool = False,
) -> Callable[[_Function], _Function]:
    """Make a function a verb that calls nobody; see `verb`.

    Args:
        app: where the verb belongs.
        formats: what `-o` accepts; empty leaves the option out.
        example: shown at the end of the help.
        name: of the verb; None takes the function's.
        connection: whether it takes the connection options all the same.
    """

    def register(function: _Function) -> _Function:
        def command(ctx: typer.Context, **values: Any) -> None:
            function(_invocation(ctx, values), **values)

        shared = [_output(formats)] if formats else []
        shared += _CONNECTION if connection else []
        _register(app, command, function, shared, example, name)
        return function

    return register


def seconds(text: object) -> float:
    """Return the seconds of a time option; to be its `parser`, which also gets the default.

    Raises:
        typer.BadParameter: it is no such text.
    """
    try:
        return parse_seconds(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def seconds_above_0(text: object) -> float:
    """Return the seconds of a time option that must not be 0; see `seconds`.

    Raises:
        typer.BadParameter: it is no such text, or 0.
    """
    if not (parsed := seconds(text)):
        raise typer.BadParameter("it must be more than 0")
    return parsed


class Group(TyperGroup):
    """A group of verbs whose help lists the verbs first and ends with an example."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write verbs and options."""
        self.format_commands(ctx, formatter)
        _write_options(self.get_params(ctx), ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the example."""
        _write_example(self.epilog, formatter)


class _Command(TyperCommand):
    """A verb whose help keeps the connection options apart and ends with its example."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line; a refusal says what is wrong in its own words only."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            # Typer has values checked by pydantic, which puts this before what the check says.
            error.message = error.message.removeprefix("Value error, ")
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self.get_params(ctx), ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_example(self.epilog, formatter)


def _write_options(parameters: Sequence[Any], ctx: Any, formatter: Any) -> None:
    sections: dict[str, list[tuple[str, str]]] = {
        "Arguments": [],
        "Options": [],
        "Connection options": [],
    }
    for parameter in parameters:
        record = parameter.get_help_record(ctx)
        if record is None:
            continue
        if parameter.param_type_name == "argument":
            sections["Arguments"].append(record)
        elif parameter.name in _CONNECTION_NAMES:
            sections["Connection options"].append(record)
        else:
            sections["Options"].append(record)
    for title, records in sections.items():
        if records:
            with formatter.section(title):
                formatter.write_dl(records)


def _write_example(example: str | None, formatter: Any) -> None:
    formatter.write_paragraph()
    formatter.write(f"Example:\n  {example}\n")


def _register(
    app: typer.Typer,
    command: Callable[..., None],
    function: Callable[..., Any],
    shared: Sequence[inspect.Parameter],
    example: str,
    name: str | None,
) -> None:
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in [*own, *shared]
    ]
    _sign(command, [_CONTEXT, *parameters])
    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    app.command(name, cls=_Command, epilog=example)(command)


def _sign(function: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> None:
    """Let typer see `parameters`; the function itself takes any."""
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {each.name: each.annotation for each in parameters}


def _invocation(ctx: typer.Context, values: dict[str, Any]) -> Invocation:
    """Take the shared options out of a verb's values."""
    return Invocation(
        flags={**(ctx.obj or {}), **_taken(values)},
        output=Format(values.pop("output", Format.TABLE)),
        quiet=values.pop("quiet", False),
        verbose=values.pop("verbose", False),
    )


def _taken(values: dict[str, Any]) -> dict[str, str | bool]:
    """Take the connection options that were given out of a command's values."""
    taken = {key: values.pop(name, None) for key, name in _CONNECTION_KEYS.items()}
    return {key: value for key, value in taken.items() if value is not None}


def _parameter(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, option],
    )


def _output(formats: Sequence[Format]) -> inspect.Parameter:
    # A type of its own for each verb: help, completion and refusal list what the verb can do.
    kind = enum.StrEnum("Output", [(each.name, each.value) for each in Format if each in formats])  # type: ignore[misc]
    option = typer.Option("--output", "-o", help="How to print.")
    return _parameter("output", kind, kind(formats[0].value), option)


def _connection_parameter(setting: Setting) -> inspect.Parameter:
    notes = ", ".join(filter(None, (setting.env, setting.default)))
    text = f"{setting.help} [{notes}]" if notes else setting.help
    if setting.kind is Kind.SWITCH:
        option = typer.Option(f"--{setting.key}/--no-{setting.key}", help=text, show_default=False)
        return _parameter(setting.field, bool | None, None, option)
    option = typer.Option(f"--{setting.key}", metavar=setting.metavar, help=text)
    return _parameter(setting.field, str | None, None, option)


_CONTEXT = inspect.Parameter(
    "ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
)
_VERBOSITY = [
    _parameter("quiet", bool, False, typer.Option("--quiet", "-q", help="Only data and errors.")),
    _parameter(
        "verbose",
        bool,
        False,
        typer.Option("--verbose", "-v", help="Also whom is called, and all facts."),
    ),
]
_CONNECTION = [
    *map(_connection_parameter, SETTINGS),
    _parameter(
        "context",
        str | None,
        None,
        typer.Option(
            "--context",
            metavar="NAME",
            help="Named settings. [LOADER_CONTEXT]",
            autocompletion=complete_context,
        ),
    ),
]
_CONNECTION_KEYS = {**{setting.key: setting.field for setting in SETTINGS}, "context": "context"}
_CONNECTION_NAMES = frozenset(_CONNECTION_KEYS.values())
