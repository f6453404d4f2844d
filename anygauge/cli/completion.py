"""Completion in a shell, by typer; `typed_so_far` has what words may become."""

from __future__ import annotations

from typing import Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from anygauge.cli import COMMANDS, typer_command


class _Commands(TyperGroup):
    """All commands, of which only the one that is typed is imported."""

    def list_commands(self, ctx: Any) -> list[str]:
        """See click."""
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """See click; it has no options."""
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name], rich_markup_mode=None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """See click."""
        return args[0], typer_command(args[0]) if args[0] in COMMANDS else None, args[1:]


def complete(arguments: list[str]) -> None:
    """Answer a shell, or write what has it ask; ends the process."""
    app = typer.Typer(cls=_Commands, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    typer.main.get_command(app).main(args=arguments, prog_name="anygauge")
