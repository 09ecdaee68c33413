"""Typer parameters made from the flag table, and argument lines in any known spelling. Imports nothing heavy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from headrace.cli.errors import CliError
from headrace.engine.config.flag import GROUPS, Flag, Given
from headrace.engine.config.flags import FLAGS
from headrace.engine.config.names import (
    all_spellings,
    nearest,
    negative_name,
    normalise,
    setting_default,
    unknown_name,
)

_TYPED = "headrace.typed"  # key in ctx.meta: main name -> the name the user wrote


def flags_of(groups: Iterable[str] = GROUPS) -> list[Flag]:
    """Rows of these groups, except the model, which is an argument of every command."""
    chosen = set(groups)
    return [flag for flag in FLAGS if flag.group in chosen and flag.key != "model"]


def with_flags(
    groups: Iterable[str] = GROUPS,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command `f(ctx, ..., *, given)`: typer sees one option for each row of `groups`; f receives
    `given`, the list of Given that was typed."""
    rows = flags_of(groups)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(function, eval_str=True)
        kept = [param for name, param in own.parameters.items() if name != "given"]

        def command(**values: Any) -> Any:
            given = _given(rows, values, values["ctx"].meta.get(_TYPED, {}))
            for row in rows:
                values.pop(row.key)
            return function(**values, given=given)

        signature = own.replace(
            parameters=[
                param.replace(kind=inspect.Parameter.KEYWORD_ONLY)
                for param in (*kept, *map(_parameter, rows))
            ]
        )
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {
            name: param.annotation for name, param in signature.parameters.items()
        }
        return command

    return decorate


def _given(
    rows: Iterable[Flag], values: Mapping[str, Any], typed: Mapping[str, str]
) -> list[Given]:
    return [
        Given(row, values[row.key], f"flag {typed.get(row.name, row.name)}")
        for row in rows
        if values[row.key] not in (None, [])
    ]


def _parameter(flag: Flag) -> inspect.Parameter:
    """A row as a keyword parameter. Values stay text: the table's parsers give the errors, as they do for YAML."""
    names = [flag.name]
    annotation: Any = str
    if flag.kind == "switch":
        names = [f"{flag.name}/{negative_name(flag)}"]
        annotation = bool
    elif flag.kind == "many":
        annotation = list[str]
    option = typer.Option(
        None,
        *names,
        help=_help(flag),
        metavar=None if flag.kind == "switch" else _metavar(flag),
        show_default=False,
        rich_help_panel=flag.group,
        autocompletion=_completer(flag),
    )
    return inspect.Parameter(
        flag.key,
        inspect.Parameter.KEYWORD_ONLY,
        default=option,
        annotation=annotation | None,
    )


def _help(flag: Flag) -> str:
    """Help with the other names and the default in dim text, one compact paragraph."""
    also = ", ".join((*flag.aliases, *flag.negatives))
    default = flag.default or _default_text(flag)
    return " ".join(
        (
            flag.help,
            *([f"One of {', '.join(flag.choices)}."] if flag.choices else []),
            *([f"[dim]Also {also}.[/dim]"] if also else []),
            *([f"[dim]\\[{default}][/dim]"] if default else []),
        )
    )


def _metavar(flag: Flag) -> str:
    return flag.metavar or "NAME"


def _default_text(flag: Flag) -> str:
    value = setting_default(flag.path)
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value in ("", (), {}) else str(value)


def _completer(flag: Flag) -> Callable[[str], list[str]] | None:
    if not flag.choices:
        return None

    def complete(incomplete: str) -> list[str]:
        return [choice for choice in flag.choices if choice.startswith(incomplete)]

    return complete


def _quick(params: list[Any]) -> list[Any]:
    """Typer's own switches (--help, completion) default to None, and it loads pydantic to say that None is no bool:
    a third of the time that help takes. False costs nothing."""
    for param in params:
        if getattr(param, "is_flag", False) and not param.expose_value and param.default is None:
            param.default = False
    return params


class Group(TyperGroup):
    """A group of commands that answers --help quickly and a wrong name with the nearest."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _quick(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not ctx.resilient_parsing and args[0] not in self.commands:
            known = self.list_commands(ctx)
            guess = nearest(args[0], known)
            hint = f"did you mean {guess}?" if guess else f"there are {', '.join(known)}"
            raise CliError(f"unknown command {args[0]}; {hint}")
        return super().resolve_command(ctx, args)


class Command(TyperCommand):
    """Accepts every known spelling of an option; a wrong one is answered with the nearest that exists."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _quick(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        typed: dict[str, str] = {}
        if not ctx.resilient_parsing:
            args = self._main_names(args, typed, ctx.command_path)
        ctx.meta[_TYPED] = typed
        return super().parse_args(ctx, args)

    def _main_names(self, args: list[str], typed: dict[str, str], path: str) -> list[str]:
        """`args` with each option under its main name; `typed` receives what the user wrote. `path`: what was typed
        to get to this command."""
        takes_value = {
            name: not getattr(param, "is_flag", False)
            for param in self.params
            for name in (*param.opts, *param.secondary_opts)
            if name.startswith("-")
        } | {"--help": False}
        spellings = {
            name: spelling
            for name, spelling in all_spellings().items()
            if spelling.flag.name in takes_value
        }
        result: list[str] = []
        rest = iter(args)
        for arg in rest:
            if arg == "--":
                result += [arg, *rest]
                break
            if not _is_option(arg):
                result.append(arg)
                continue
            name, equals, value = arg.partition("=")
            spelling = spellings.get(normalise(name))
            if spelling is not None:
                main = negative_name(spelling.flag) if spelling.negative else spelling.flag.name
                typed[spelling.flag.name] = name
            elif normalise(name) in takes_value:
                main = normalise(name)
            elif name[:2] in takes_value and name[1] != "-":  # -n16, or -jq for -j -q
                result.append(arg)
                continue
            else:
                raise CliError(
                    f"{unknown_name(name, (*spellings, *takes_value))} ({path} --help lists them)"
                )
            result.append(f"{main}{equals}{value}")
            if takes_value[main] and not equals:
                result += [following for following in (next(rest, None),) if following is not None]
        return result


def _is_option(arg: str) -> bool:
    return len(arg) > 1 and arg[0] == "-" and not arg[1].isdigit() and arg[1] != "."
