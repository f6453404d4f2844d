"""``anygauge kernels``: which kernels there are, and which of them a run would have, and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from anygauge.cli.plan import BackendOption
from anygauge.registry import AUTO, REFERENCE, KernelChoice, Registry


def kernels(
    backend: BackendOption = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the kernels of each operation, and what a run on this machine would choose."""
    registry = Registry.load()
    selection = registry.select_backend(backend or AUTO, need_device=False)
    chosen = registry.create_backend(selection)
    rows = listing(registry, registry.resolve_kernels(chosen, {}))
    if json_:
        typer.echo(json.dumps({"backend": chosen.name, "kernels": rows}, indent=2))
        return
    console = Console(highlight=False)
    title = f"Kernels for backend {chosen.name}: {selection.reason}"
    console.print(Text(title, style="bold"))
    console.print(_table(rows))


def listing(registry: Registry, choices: dict[str, KernelChoice]) -> list[dict[str, Any]]:
    """Every kernel of every operation, those that would be chosen first, as plain values."""
    rows = []
    for operation, choice in choices.items():
        rejected = dict(choice.rejected)
        others = [
            p for p in registry.kernels if p.spec.operation == operation and p != choice.provided
        ]
        rows.append(
            {
                "operation": operation,
                "kernel": choice.name,
                "chosen": True,
                "why": choice.reason,
                "from": choice.provided.origin if choice.provided else "the model library",
            }
        )
        for provided in sorted(others, key=lambda p: p.spec.name):
            spec = provided.spec
            devices = ", ".join(sorted(spec.device_types))
            missing = spec.missing()
            reason = rejected.get(spec.name) or missing
            if not reason:
                reason = f"serves {devices}" if devices else "serves every device"
                reason += "; ask for it by name"
            rows.append(
                {
                    "operation": operation,
                    "kernel": spec.name,
                    "chosen": False,
                    "why": reason,
                    "from": provided.origin,
                }
            )
    return rows


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in ("Operation", "Kernel", "Chosen", "Why", "From"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(
            Text(row["operation"] if row["chosen"] else ""),
            Text(row["kernel"], style="bold" if row["kernel"] != REFERENCE else ""),
            Text("yes", style="green") if row["chosen"] else "",
            Text(row["why"]),
            Text(row["from"]),
        )
    return table
