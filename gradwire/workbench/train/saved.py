"""Options of a saved run: read them from config.json, and change some for a resumed run."""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args, get_origin, get_type_hints

from gradwire.errors import ConfigError
from gradwire.workbench.train.flag import current_names
from gradwire.workbench.train.options import Options

FREE = ("workers", "epochs", "data_dir")
"""The options that a resumed run may change; any other change would make another run."""


def options_from_dict(saved: Mapping[str, Any]) -> Options:
    """Return the options in a config.json, which may have former names."""
    saved = current_names(Options, saved)
    known = {f.name for f in dataclasses.fields(Options)}
    if extra := sorted(set(saved) - known):
        raise ConfigError(f"this run was made by another version: it has the option {extra[0]!r}.")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}
    hints = get_type_hints(Options)
    for field in dataclasses.fields(Options):
        if field.name not in values:
            if field.default is dataclasses.MISSING:
                raise ConfigError(f"the option {field.name!r} is missing.")
        elif not _fits(values[field.name], hints[field.name]):
            raise ConfigError(f"the option {field.name!r} cannot be {saved[field.name]!r:.60}.")
    return Options(**values)


def _fits(value: Any, hint: Any) -> bool:
    """Return True if `value` has the type of a field of Options."""
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(v, get_args(hint)[0]) for v in value)
    if get_args(hint):
        return any(_fits(value, part) for part in get_args(hint))
    if hint in (int, float):
        kind = int if hint is int else (int, float)
        return isinstance(value, kind) and not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, hint)


def resume_options(saved: Options, choices: Mapping[str, Any]) -> tuple[Options, list[str]]:
    """Return the saved options with the changed `choices`, and a sentence about each change.

    Raise ConfigError for an option that may not change.
    """
    changes: dict[str, Any] = {}
    for name, value in choices.items():
        value = tuple(value) if isinstance(value, list) else value
        if value is None or value == getattr(saved, name) or (name, value) == ("device", "auto"):
            continue
        if name == "method" and value == f"{saved.method}/{saved.exchange}":
            continue
        if name not in FREE:
            raise ConfigError(
                f"the run to resume has {name} = {getattr(saved, name)!r}, now {value!r} is asked "
                f"for. Leave --{name.replace('_', '-')} out, or start a new run."
            )
        changes[name] = value
    notes = [f"{name} was {getattr(saved, name)}, is now {v}" for name, v in changes.items()]
    return dataclasses.replace(saved, **changes), notes
