"""``anygauge kernels``: which kernels there are, and which of them a run would have, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from anygauge.cli.intent import BackendOption
from anygauge.interface import Backend
from anygauge.kernels.choose import KernelChoice, choose_kernels, unfit, users
from anygauge.registry import AUTO, Registry, select_backend


def kernels(
    backend: BackendOption = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the kernels of each operation, and what a run on this machine would choose."""
    registry = Registry.load()
    selection = select_backend(registry, backend or AUTO, need_device=False)
    chosen = registry.create_backend(selection.spec.name)
    packed = choose_kernels(registry, chosen, {}, packing=True)
    rows = listing(registry, chosen, choose_kernels(registry, chosen, {}), packed)
    if json_:
        typer.echo(json.dumps({"backend": chosen.name, "kernels": rows}, indent=2))
        return
    console = Console(emoji=False, highlight=False)
    title = f"backend {chosen.name} ({selection.reason}); a run would use those marked *"
    console.print(Text(title))
    console.print(_table(rows))


def listing(
    registry: Registry,
    backend: Backend,
    choices: Mapping[str, KernelChoice],
    packed: Mapping[str, KernelChoice],
) -> list[dict[str, Any]]:
    """Every kernel of every operation, the one that would be chosen first, as plain values.

    Args:
        choices: of a run that asks for none.
        packed: of one whose rows are packed.
    """
    rows = []
    inner = {name for p in registry.kernels for name in p.spec.uses}
    called = {name for c in choices.values() if c.provided for name in c.provided.spec.uses}
    for operation, choice in choices.items():
        rows.append(
            {
                "operation": operation,
                "kernel": choice.name,
                "chosen": operation not in inner - called,
                "why": choice.reason
                if operation not in inner - called
                else f"only for kernels that use one ({users(registry, operation)})",
                "from": "the model's own" if choice.provided is None else choice.provided.origin,
            }
        )
        others = (p for p in registry.kernels if p.spec.operation == operation)
        for provided in sorted(others, key=lambda p: p.spec.name):
            if provided == choice.provided:
                continue
            name = provided.spec.name
            problem = dict(choice.rejected).get(name) or unfit(provided.spec, backend)
            if packed[operation].name == name:
                problem = f"for packed rows: {packed[operation].reason}"
            rows.append(
                {
                    "operation": operation,
                    "kernel": name,
                    "chosen": False,
                    "why": problem or f"can run here; to select it: kernels.{operation}: {name}",
                    "from": provided.origin,
                }
            )
    return rows


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True, style="dim")
    before = None
    for row in rows:
        if row["operation"] != before:
            table.add_row(Text(row["operation"], style="bold"))
        before = row["operation"]
        mark = "* " if row["chosen"] else "  "
        style = "green" if row["chosen"] else ""
        table.add_row(Text(f"{mark}{row['kernel']}", style=style), row["why"], row["from"])
    return table
