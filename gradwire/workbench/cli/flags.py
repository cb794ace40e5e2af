"""Help that shows what an option takes, and nothing for one that takes nothing."""

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class Command(TyperCommand):
    """A command with such help."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _bare(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands with such help."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _bare(super().get_params(ctx))


def hide_types_of_flags(app: typer.Typer) -> None:
    """For every command of `app`; its own --help, which cannot be reached otherwise, included."""
    app.info.cls = Group
    for command in app.registered_commands:
        command.cls = Command
    for part in app.registered_groups:
        if part.typer_instance is not None:
            hide_types_of_flags(part.typer_instance)


def _bare(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params
