"""``anygauge backends``: which backends there are, what each found, and what `auto` would do."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from anygauge.interface import API_VERSION, AnygaugeError, Probe
from anygauge.registry import (
    AUTO,
    BLOCK_VARIABLE,
    Hardware,
    Registry,
    questions,
    select_backend,
)


def backends(
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """List the installed backends, what each found on this machine, and what auto would choose."""
    report = collect(Registry.load())
    if json_:
        typer.echo(json.dumps(report, indent=2))
    else:
        show(report, Console(emoji=False, highlight=False))


def collect(registry: Registry) -> dict[str, Any]:
    """Everything that the command shows, as plain values."""
    probes = registry.probe_all()
    return {
        "api_version": API_VERSION,
        "backends": [
            {
                "name": provided.spec.name,
                "distribution": provided.distribution,
                "version": provided.version,
                "plugin": provided.entry_point,
                "priority": provided.spec.priority,
                **_probe(probes[provided.spec.name]),
            }
            for provided in sorted(registry.backends, key=lambda p: (-p.spec.priority, p.spec.name))
        ],
        "auto": _auto(registry),
        "duplicates": [
            {"kind": d.kind, "name": d.name, "reason": d.reason} for d in registry.duplicates
        ],
        "failed": [asdict(failure) for failure in registry.failures],
        "failed_hardware": [asdict(failure) for failure in Hardware.load(registry).failures],
        "blocked": [asdict(blocked) for blocked in registry.blocked],
        "unmatched_blocks": list(registry.unmatched_blocks),
    }


def _probe(probe: Probe) -> dict[str, Any]:
    return {
        "available": probe.available,
        "reason": probe.reason,
        "device_count": probe.device_count,
        "notes": list(probe.notes),
        "findings": {
            question: {
                "presence": finding.presence.value,
                "detail": finding.detail,
                "looked_at": list(finding.looked_at),
            }
            for question, finding in questions(probe)
        },
    }


def _auto(registry: Registry) -> dict[str, Any]:
    try:
        selection = select_backend(registry, AUTO)
    except AnygaugeError as error:
        return {"chosen": None, "reason": str(error), "rejected": []}
    return {
        "chosen": selection.spec.name,
        "reason": selection.reason,
        "rejected": [{"name": name, "reason": reason} for name, reason in selection.rejected],
    }


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print a report for people; every line fits the console's width."""
    _summary(report["backends"], console)
    for backend in report["backends"]:
        _details(backend, console)
    console.print()
    _choice(report["auto"], console)
    _plugins(report, console)


def _summary(rows: list[dict[str, Any]], console: Console) -> None:
    if not rows:
        console.print("No backend is installed.")
        return
    table = _table("Backend", "Available", "Priority", "From", "Why")
    for row in rows:
        table.add_row(
            Text(row["name"], style="bold"),
            _verdict(row["available"]),
            str(row["priority"]),
            Text(f"{row['distribution']} {row['version']}"),
            Text(row["reason"]),
        )
    console.print(table)


def _details(row: Mapping[str, Any], console: Console) -> None:
    console.print()
    console.print(Text(f"What {row['name']} looked at", style="bold"))
    table = _table("Question", "Found", "Seen", "Looked at")
    for question, finding in row["findings"].items():
        table.add_row(
            question,
            finding["presence"],
            Text(finding["detail"]),
            Text("\n".join(finding["looked_at"]) or "-"),
        )
    console.print(table)
    if row["device_count"] is not None:
        _item(f"devices: {row['device_count']}", console)
    for note in row["notes"]:
        _item(f"note: {note}", console)


def _choice(auto: Mapping[str, Any], console: Console) -> None:
    if auto["chosen"] is None:
        console.print(Text(f"--backend {AUTO} would be refused", style="bold"))
        _item(auto["reason"], console)
        return
    title = f"--backend {AUTO} would choose {auto['chosen']}: {auto['reason']}"
    console.print(Text(title, style="bold"))
    for other in auto["rejected"]:
        _item(f"not {other['name']}: {other['reason']}", console)


def _plugins(report: Mapping[str, Any], console: Console) -> None:
    """Plugins that are not in use; nothing is printed where all are well."""
    if report["duplicates"]:
        console.print()
        console.print(Text("Names claimed twice", style="bold red"))
        for duplicate in report["duplicates"]:
            _item(duplicate["reason"], console)
    for key, title in (
        ("failed", "Plugins that failed to load"),
        ("failed_hardware", "Descriptions of hardware that cannot be read"),
    ):
        if report[key]:
            console.print()
            console.print(Text(title, style="bold red"))
            for plugin in report[key]:
                _item(f"{_identity(plugin)}: {plugin['reason']}", console)
    if report["blocked"] or report["unmatched_blocks"]:
        console.print()
        console.print(Text(f"Plugins blocked by {BLOCK_VARIABLE}", style="bold"))
        for plugin in report["blocked"]:
            _item(_identity(plugin), console)
        for name in report["unmatched_blocks"]:
            _item(f"{name}: no plugin has this name", console)


def _identity(plugin: Mapping[str, Any]) -> str:
    return f"{plugin['entry_point'] or '-'} ({plugin['distribution']} {plugin['version']})"


def _verdict(available: bool) -> Text:
    return Text("yes", style="green") if available else Text("no", style="red")


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        # Folding breaks long paths rather than cutting them off.
        table.add_column(column, overflow="fold")
    return table


def _item(text: str, console: Console) -> None:
    """One entry of a list, wrapped under itself."""
    for number, line in enumerate(text.splitlines()):
        depth = len(line) - len(line.lstrip()) + (4 if number else 2)
        wrapped = textwrap.fill(
            line.strip(),
            width=max(console.width, depth + 20),
            initial_indent=" " * depth,
            subsequent_indent=" " * (depth + 2),
            break_on_hyphens=False,
        )
        console.print(Text(wrapped), soft_wrap=True)
