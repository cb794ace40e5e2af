"""Flags of the commands, made from the documented fields of Options, RunLimits and Config."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from gradwire.config import Config
from gradwire.errors import ConfigError
from gradwire.workbench.cli.say import warn
from gradwire.workbench.train import Options
from gradwire.workbench.train.flag import PANELS, FlagField, default_text, flag_fields, item_type


def with_flags(*groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for each field of the dataclasses `groups`; None stands for no value.

    The command takes the flags as keywords. Flags of its own are parameters as usual.
    """
    fields = [field for group in groups for field in flag_fields(group).values()]

    def build(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        parameters = sorted([*parameters, *map(_parameter, fields)], key=_panel)
        # typer reads the signature.
        vars(command)["__signature__"] = signature.replace(parameters=parameters)
        return command

    return build


def chosen_fields(group: type, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `group` that `flags` gives a value, each with the field's type."""
    values = {}
    for name, field in flag_fields(group).items():
        value = flags[name]
        if value is not None and value != []:
            values[name] = _as_field(field, value)
    return values


def config_flag(name: str, more: str = "", **settings: Any) -> Any:
    """Return the flag of a field of Config; `more` follows the text of Config."""
    if name == "options":
        settings.setdefault("metavar", flag_fields(Options)["options"].flag.metavar)
    return typer.Option(long_name(name), help=f"{config_help(name)} {more}".strip(), **settings)


def config_help(name: str) -> str:
    """Return the text on a field in Config's docstring; names of fields become flags."""
    text = _config_docs()[name].replace('"', "")
    for config, option in config_options().items():
        text = text.replace(f"`{config}`", long_name(option))
    return text[:1].upper() + text[1:]


@cache
def _config_docs() -> dict[str, str]:
    """Return the part of Config's docstring about each of the fields."""
    # Without docstrings (python -OO) the help is empty.
    docs = dict.fromkeys((field.name for field in dataclasses.fields(Config)), "")
    name = ""
    for line in inspect.cleandoc(Config.__doc__ or "").splitlines():
        if start := re.match(r"(\w+): ", line):
            name, line = start[1], line[start.end() :]
        if name:
            docs[name] = f"{docs[name]} {line.strip()}".strip()
    return docs


def config_options() -> dict[str, str]:
    """Return, for each field of Config that `gradwire train` sets, the name of the option."""
    known = {field.name for field in dataclasses.fields(Config)}
    fields = flag_fields(Options).items()
    names = {name if f.flag.config == "" else f.flag.config: name for name, f in fields}
    return {config: name for config, name in names.items() if config in known}


def long_name(name: str) -> str:
    """Return the flag of an option."""
    return f"--{name.replace('_', '-')}"


def _parameter(field: FlagField) -> inspect.Parameter:
    """Return the parameter of a command for a field."""
    flag, kind = field.flag, _parsed_type(field)
    names = [long_name(field.name), *filter(None, [flag.short])]
    if field.default is True:
        names[0] = f"{long_name(field.name)}/{long_name('no_' + field.name)}"
    option = typer.Option(
        *names,
        help=_help(field),
        rich_help_panel=flag.panel,
        show_default=False,
        metavar=flag.metavar,
        min=flag.minimum,
    )
    annotation = Annotated[kind | None, option]  # type: ignore[valid-type]  # known when it runs
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _parsed_type(field: FlagField) -> Any:
    """Return the type that the command line parses for a field."""
    if field.flag.path:
        return Path
    if item := item_type(field.type):
        # Strings are repeated flags, numbers are one text with commas between.
        return list[str] if item is str else str
    return next((part for part in get_args(field.type) if part is not type(None)), field.type)


def _help(field: FlagField) -> str:
    """Return the help of a field: the text of Config, the text of the flag, the default."""
    flag = field.flag
    texts = [config_help(config) for config, name in config_options().items() if name == field.name]
    texts.append(flag.help)
    default = flag.default
    if field.default is True:
        default = field.name
    elif not default and not _is_nothing(field.default):
        default = default_text(field.default)
    if default:
        texts.append(f"Default: {default}.")
    return " ".join(filter(None, texts))


def _is_nothing(default: Any) -> bool:
    """Return True for a default that the help does not show."""
    return default in ("", None, (), dataclasses.MISSING) or default is False


def _panel(parameter: inspect.Parameter) -> int:
    (option,) = parameter.annotation.__metadata__
    return PANELS.index(option.rich_help_panel)


def _as_field(field: FlagField, value: Any) -> Any:
    """Return the typed value with the type of the field."""
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, Path):
        # Absolute: config.json keeps the folder, and the run may go on from elsewhere.
        return str(value.expanduser().absolute())
    item = item_type(field.type)
    if item is None:
        return value
    try:
        return tuple(item(part) for part in value.split(","))
    except ValueError:
        raise ConfigError(
            f"{long_name(field.name)} takes numbers with commas between, got {value!r}."
        ) from None


class _FlagCommand(TyperCommand):
    """A command that knows former names of flags. Its help shows no value for bare flags."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _hide_values(super().get_params(ctx))

    def make_context(self, *args: Any, **extra: Any) -> Any:
        known = {name for parameter in self.params for name in parameter.opts}
        extra.setdefault("token_normalize_func", _translation(known))
        return super().make_context(*args, **extra)


class _FlagGroup(TyperGroup):
    """A group of commands. Its help shows no value for bare flags."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _hide_values(super().get_params(ctx))


def set_classes(app: typer.Typer) -> None:
    """Make every command of `app` a _FlagCommand, because its --help flag is reached only there."""
    app.info.cls = _FlagGroup
    for command in app.registered_commands:
        command.cls = _FlagCommand
    for part in app.registered_groups:
        if part.typer_instance is not None:
            set_classes(part.typer_instance)


def _translation(known: set[str]) -> Callable[[str], str]:
    """Return a function from a former name of a flag in `known` to the present name, and warn."""
    present = {
        long_name(former): long_name(name)
        for name, field in flag_fields(Options).items()
        for former in field.flag.former
    }
    warned: set[str] = set()

    def translate(token: str) -> str:
        former = f"--{token}"
        name = present.get(former, former)
        if name == former or name not in known:
            return token
        if former not in warned:
            warn(f"{former} is now called {name}.")
            warned.add(former)
        return name.removeprefix("--")

    return translate


def _hide_values(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params
