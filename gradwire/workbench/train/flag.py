"""The flag of an option: its help, its panel, and its names on the command line."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

TRAINING, COMPRESSION = "What to train", "Compression"
WORKERS, FOLDER = "Workers", "Run folder"
PANELS = (TRAINING, COMPRESSION, WORKERS, FOLDER)
"""The panels of the help, in their order."""


@dataclass(frozen=True)
class Flag:
    """The flag of a field: `seed: Annotated[int, Flag(TRAINING, "The seed.")] = 0`.

    The flag has the name of the field, and the help ends with the default of the field.

    panel: the panel of the help that shows the flag.
    help: the text of the help. For a field of Config it follows the text in Config's docstring.
    short: a second name of one letter, such as "-s".
    config: the field of Config that the option sets: empty for the field with the same name, None
        where that field is another thing.
    default: words for the default, where the default of the field does not say it.
    metavar: the name of the value in the help.
    path: True: the value is the name of a folder.
    minimum: the least number.
    former: earlier names of the option, on the command line and in config.json.
    """

    panel: str
    help: str = ""
    short: str = ""
    config: str | None = ""
    default: str = ""
    metavar: str | None = None
    path: bool = False
    minimum: int | None = None
    former: tuple[str, ...] = ()


@dataclass(frozen=True)
class FlagField:
    """A field of a dataclass that has a flag: its name, its type, its default and the flag."""

    name: str
    type: Any
    default: Any
    flag: Flag


@cache
def flag_fields(options: type) -> dict[str, FlagField]:
    """Return the fields of the dataclass `options` that have a flag, by name."""
    hints = get_type_hints(options, include_extras=True)
    out = {}
    for field in dataclasses.fields(options):
        hint = hints[field.name]
        for flag in getattr(hint, "__metadata__", ()):
            if isinstance(flag, Flag):
                out[field.name] = FlagField(field.name, hint.__origin__, field.default, flag)
    return out


def current_names(options: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with the present names of the fields in place of former ones."""
    present = {
        former: name for name, field in flag_fields(options).items() for former in field.flag.former
    }
    return {present.get(name, name): value for name, value in values.items()}


def item_type(kind: Any) -> Any:
    """Return the type of the items of a tuple field; None for any other field."""
    return get_args(kind)[0] if get_origin(kind) is tuple else None


def default_text(value: Any) -> str:
    """Return a default as the help shows it."""
    return f"{value:g}" if isinstance(value, float) else str(value)
