"""What is installed: ``anygauge backends``, ``launchers``, ``strategies`` and ``kernels``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from anygauge.cli.shared_options import BackendOption, JsonOption, choose_backend
from anygauge.interface import (
    ABILITIES,
    API_VERSION,
    AnygaugeError,
    Backend,
    LauncherSpec,
    StrategySpec,
    UnsupportedError,
    installed_version,
)
from anygauge.planning.machines import Hardware
from anygauge.registry import AUTO, BLOCK_VARIABLE, Provided, Registry, select_backend
from anygauge.util.console import Console

# -- backends -------------------------------------------------------------------------------------


def backends(json_: JsonOption = False) -> None:
    """List the installed backends, what each found on this machine, and what auto would choose."""
    registry = Registry.load()
    probes = registry.probe_all()
    ranked = sorted(registry.backends, key=lambda p: (-p.spec.priority, p.spec.name))
    report: dict[str, Any] = {
        "api_version": API_VERSION,
        "backends": [
            {
                "name": provided.spec.name,
                "distribution": provided.distribution,
                "version": provided.version,
                "plugin": provided.entry_point,
                "priority": provided.spec.priority,
                "available": probe.available,
                "reason": probe.reason,
                "device_count": probe.device_count,
                "notes": probe.notes,
                "findings": {question: asdict(finding) for question, finding in probe.questions},
            }
            for provided in ranked
            for probe in [probes[provided.spec.name]]
        ],
        "auto": _auto_selection(registry),
        "duplicates": [
            {"kind": d.kind, "name": d.name, "reason": d.reason} for d in registry.duplicates
        ],
        "failed": [asdict(failure) for failure in registry.failures],
        "failed_hardware": [asdict(failure) for failure in Hardware.load(registry).failures],
        "blocked": [asdict(blocked) for blocked in registry.blocked],
        "unmatched_blocks": registry.unmatched_blocks,
    }
    if json_:
        typer.echo(json.dumps(report, indent=2))
    else:
        _show_backends(report)


def _auto_selection(registry: Registry) -> dict[str, Any]:
    try:
        selection = select_backend(registry, AUTO)
    except AnygaugeError as error:
        return {"chosen": None, "reason": str(error), "rejected": []}
    return {
        "chosen": selection.spec.name,
        "reason": selection.reason,
        "rejected": [{"name": name, "reason": reason} for name, reason in selection.rejected],
    }


def _show_backends(report: Mapping[str, Any]) -> None:
    """The report for people: a table, what each looked at, then plugins that are not in use."""
    console = Console()
    columns = ("Backend", "Available", "Priority", "From", "Why")
    table = Table(*columns, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for row in report["backends"]:
        table.add_row(
            Text(row["name"], "bold"),
            Text("yes", "green") if row["available"] else Text("no", "red"),
            str(row["priority"]),
            f"{row['distribution']} {row['version']}",
            row["reason"],
        )
    console.print(table if report["backends"] else "No backend is installed.")
    for row in report["backends"]:
        seen = []
        for question, finding in row["findings"].items():
            seen.append(f"{question}: {finding['presence']}; {finding['detail']}")
            if finding["looked_at"]:
                seen.append(f"    looked at {', '.join(finding['looked_at'])}")
        if row["device_count"] is not None:
            seen.append(f"devices: {row['device_count']}")
        notes = (f"note: {note}" for note in row["notes"])
        _print_titled(console, f"What {row['name']} looked at", [*seen, *notes])
    auto = report["auto"]
    if auto["chosen"] is None:
        _print_titled(console, f"--backend {AUTO} would be refused", [auto["reason"]])
    else:
        rejected = (f"not {other['name']}: {other['reason']}" for other in auto["rejected"])
        title = f"--backend {AUTO} would choose {auto['chosen']}: {auto['reason']}"
        _print_titled(console, title, rejected)
    for key, title in (
        ("duplicates", "Names claimed twice"),
        ("failed", "Plugins that failed to load"),
        ("failed_hardware", "Descriptions of hardware that cannot be read"),
    ):
        troubles = [
            each["reason"] if key == "duplicates" else f"{_plugin_identity(each)}: {each['reason']}"
            for each in report[key]
        ]
        if troubles:
            _print_titled(console, title, troubles, "bold red")
    blocked = [_plugin_identity(each) for each in report["blocked"]]
    blocked += [f"{name}: no plugin has this name" for name in report["unmatched_blocks"]]
    if blocked:
        _print_titled(console, f"Plugins blocked by {BLOCK_VARIABLE}", blocked)


def _print_titled(console: Console, title: str, items: Iterable[str], style: str = "bold") -> None:
    """A list under its title; further lines of an item are below it."""
    console.print(f"\n{title}", style=style)
    for item in items:
        console.print("  " + item.replace("\n", "\n    "))


def _plugin_identity(plugin: Mapping[str, Any]) -> str:
    return f"{plugin['entry_point'] or '-'} ({plugin['distribution']} {plugin['version']})"


# -- launchers ------------------------------------------------------------------------------------

TESTED_ON = {
    "real": "run with the target's own software",
    "emulated": (
        "rendered jobs pass the target's models, and their commands ran the way the target starts "
        "them"
    ),
    "schema": "rendered jobs pass the target's models",
}


def launchers(json_: JsonOption = False) -> None:
    """List the installed launchers: where each starts ranks, what its jobs can do."""
    # This machine comes first, then those that share its files, then those that do not.
    by_distance = sorted(
        Registry.load().launchers, key=lambda p: (p.spec.remote, not p.spec.shared_filesystem)
    )
    found = [{"distribution": p.distribution, **describe_launcher(p.spec)} for p in by_distance]
    if json_:
        typer.echo(json.dumps(found, indent=2))
        return
    console = Console()
    for one in found:
        console.print(one["name"], style="bold")
        console.print(f"    ranks on {one['machines']}; files {one['files']}")
        for ability in one["can"]:
            console.print(f"    a job {ABILITIES[ability]}")
        if "detach" not in one["can"]:
            console.print("    a job ends with the command that started it")
        console.print(f"    tested: {one['tested_on']} ({one['proof']})")


def describe_launcher(spec: LauncherSpec) -> dict[str, Any]:
    """A launcher in plain words."""
    several = "other machines" if spec.max_nodes is None else f"up to {spec.max_nodes} machines"
    files = "are shared with this machine" if spec.shared_filesystem else "are the machines' own"
    return {
        "name": spec.name,
        "machines": "this machine" if spec.max_nodes == 1 else several,
        "files": files,
        "can": sorted(spec.can),
        "tested_on": spec.tested_on,
        "proof": TESTED_ON.get(spec.tested_on, ""),
    }


# -- strategies -----------------------------------------------------------------------------------


def strategies(backend: BackendOption = None, json_: JsonOption = False) -> None:
    """List the strategies: what each needs, and whether a backend can run it."""
    from anygauge.config.strategies import StrategySection

    registry, selection, chosen = choose_backend(backend, need_device=False)
    provided = {each.spec.name: each for each in registry.strategies}
    found = [
        _describe_strategy(provided[name], section.model_fields, chosen)
        for name, section in StrategySection.of_plugins().items()
    ]
    if json_:
        typer.echo(json.dumps({"backend": chosen.name, "strategies": found}, indent=2))
        return
    console = Console()
    console.print(f"backend {chosen.name} ({selection.reason})")
    for one in found:
        console.print(f"\n{one['name']}{' (default)' * one['default']}", style="bold")
        console.print(f"    {one['summary']}\n    ranks: {one['ranks']}")
        if one["fields"]:
            console.print(f"    fields: {', '.join(one['fields'])}")
        for need in one["needs"]:
            console.print(f"    needs {need['capability']}: {need['because']}")
        for name, version in one["packages"].items():
            console.print(f"    package {name}: {version or 'not installed'}")
        refused = one["refused"]
        console.print(f"    {chosen.name}: {f'no. {refused}' if refused else 'yes'}")


def _describe_strategy(
    provided: Provided[StrategySpec], fields: Iterable[str], backend: Backend
) -> dict[str, Any]:
    """A strategy in plain values; ``refused`` is why the backend cannot run it, empty if it can."""
    from anygauge.config.strategies import StrategySection
    from anygauge.training.build_strategy import check_backend

    spec, refused = provided.spec, ""
    try:
        check_backend(spec, backend)
    except UnsupportedError as error:
        refused = str(error)
    return {
        "name": spec.name,
        "default": spec.name == StrategySection.default_plugin,
        "summary": spec.summary,
        "distribution": provided.distribution,
        "ranks": "1" if spec.single_process else "any number",
        "fields": [name for name in fields if name != "name"],
        "needs": [{"capability": c, "because": because} for c, because in spec.needs.items()],
        "packages": {name: installed_version(name) for name in spec.distributions},
        "refused": refused,
    }


# -- kernels --------------------------------------------------------------------------------------


def kernels(backend: BackendOption = None, json_: JsonOption = False) -> None:
    """List the kernels of each operation, and what a run on this machine would choose."""
    registry, selection, chosen = choose_backend(backend, need_device=False)
    rows = _kernel_rows(registry, chosen)
    if json_:
        typer.echo(json.dumps({"backend": chosen.name, "kernels": rows}, indent=2))
        return
    console = Console()
    console.print(f"backend {chosen.name} ({selection.reason}); a run would use those marked *")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True, style="dim")
    before = None
    for row in rows:
        if row["operation"] != before:
            table.add_row(Text(row["operation"], "bold"))
        before = row["operation"]
        mark, style = ("* ", "green") if row["chosen"] else ("  ", "")
        table.add_row(Text(f"{mark}{row['kernel']}", style), row["why"], row["from"])
    console.print(table)


def _kernel_rows(registry: Registry, backend: Backend) -> list[dict[str, Any]]:
    """Every kernel of every operation, the one that would be chosen first, as plain values."""
    from anygauge.kernels.choose import choose_kernels, kernels_using, why_unfit

    choices = choose_kernels(registry, backend, {})
    packed = choose_kernels(registry, backend, {}, packing=True)
    inner = {name for p in registry.kernels for name in p.spec.uses}
    called = {name for c in choices.values() if c.provided for name in c.provided.spec.uses}
    rows = []

    def add(operation: str, kernel: str, why: str, origin: str, *, chosen: bool = False) -> None:
        row = {"operation": operation, "kernel": kernel, "chosen": chosen, "why": why}
        rows.append({**row, "from": origin})

    for operation, choice in choices.items():
        chosen = operation not in inner - called
        only = f"only for kernels that use one ({kernels_using(registry, operation)})"
        origin = "the model's own" if choice.provided is None else choice.provided.origin
        add(operation, choice.name, choice.reason if chosen else only, origin, chosen=chosen)
        others = (p for p in registry.kernels if p.spec.operation == operation)
        for provided in sorted(others, key=lambda p: p.spec.name):
            if provided == choice.provided:
                continue
            name = provided.spec.name
            problem = dict(choice.rejected).get(name) or why_unfit(provided.spec, backend)
            if packed[operation].name == name:
                problem = f"for packed rows: {packed[operation].reason}"
            fine = f"can run here; to select it: kernels.{operation}: {name}"
            add(operation, name, problem or fine, provided.origin)
    return rows
