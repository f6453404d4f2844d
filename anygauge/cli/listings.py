"""What is installed: ``anygauge backends``, ``launchers``, ``strategies`` and ``kernels``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from anygauge.cli.options import BackendOption, JsonOption, choose_backend
from anygauge.interface import (
    ABILITIES,
    API_VERSION,
    AnygaugeError,
    Backend,
    LauncherSpec,
    Probe,
    StrategySpec,
    UnsupportedError,
)
from anygauge.planning.machines import Hardware
from anygauge.registry import (
    AUTO,
    BLOCK_VARIABLE,
    Provided,
    Registry,
    installed_version,
    select_backend,
)
from anygauge.util.console import Console

if TYPE_CHECKING:
    from anygauge.config.strategies import StrategySection
    from anygauge.kernels.choose import KernelChoice

PROVEN = {
    "real": "run with the target's own software",
    "emulated": (
        "rendered jobs pass the target's models, and their commands ran the way the target starts "
        "them"
    ),
    "schema": "rendered jobs pass the target's models",
}


# -- backends -------------------------------------------------------------------------------------


def backends(json_: JsonOption = False) -> None:
    """List the installed backends, what each found on this machine, and what auto would choose."""
    report = _collect(Registry.load())
    if json_:
        typer.echo(json.dumps(report, indent=2))
    else:
        _show_report(report, Console())


def _collect(registry: Registry) -> dict[str, Any]:
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
            for question, finding in probe.questions
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


def _show_report(report: Mapping[str, Any], console: Console) -> None:
    """For people; every line fits the console's width."""
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
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in ("Backend", "Available", "Priority", "From", "Why"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            Text(row["name"], style="bold"),
            Text("yes", style="green") if row["available"] else Text("no", style="red"),
            str(row["priority"]),
            Text(f"{row['distribution']} {row['version']}"),
            Text(row["reason"]),
        )
    console.print(table)


def _details(row: Mapping[str, Any], console: Console) -> None:
    console.print()
    console.print(Text(f"What {row['name']} looked at", style="bold"))
    for question, finding in row["findings"].items():
        _item(f"{question}: {finding['presence']}; {finding['detail']}", console)
        if finding["looked_at"]:
            _item(f"    looked at {', '.join(finding['looked_at'])}", console)
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
    doubled = [each["reason"] for each in report["duplicates"]]
    _titled("Names claimed twice", doubled, console)
    for key, title in (
        ("failed", "Plugins that failed to load"),
        ("failed_hardware", "Descriptions of hardware that cannot be read"),
    ):
        _titled(title, [f"{_identity(each)}: {each['reason']}" for each in report[key]], console)
    blocked = [_identity(each) for each in report["blocked"]]
    blocked += [f"{name}: no plugin has this name" for name in report["unmatched_blocks"]]
    _titled(f"Plugins blocked by {BLOCK_VARIABLE}", blocked, console, "bold")


def _titled(title: str, items: list[str], console: Console, style: str = "bold red") -> None:
    """A list under its title; nothing where it is empty."""
    if items:
        console.print()
        console.print(Text(title, style=style))
    for item in items:
        _item(item, console)


def _identity(plugin: Mapping[str, Any]) -> str:
    return f"{plugin['entry_point'] or '-'} ({plugin['distribution']} {plugin['version']})"


def _item(text: str, console: Console) -> None:
    """One entry of a list, wrapped under itself."""
    for number, line in enumerate(text.splitlines()):
        console.print(Text(f"{'    ' if number else '  '}{line}"))


# -- launchers ------------------------------------------------------------------------------------


def launchers(json_: JsonOption = False) -> None:
    """List the installed launchers: where each starts ranks, what its jobs can do."""
    found = [
        {"distribution": provided.distribution, **describe_launcher(provided.spec)}
        for provided in sorted(Registry.load().launchers, key=_distance)
    ]
    if json_:
        typer.echo(json.dumps(found, indent=2))
        return
    console = Console()
    for one in found:
        console.print(Text(one["name"], style="bold"))
        console.print(Text(f"    ranks on {one['machines']}; files {one['files']}"))
        for ability in one["can"]:
            console.print(Text(f"    a job {ABILITIES[ability]}"))
        if "detach" not in one["can"]:
            console.print(Text("    a job ends with the command that started it"))
        console.print(Text(f"    tested: {one['tested_on']} ({one['proof']})"))


def describe_launcher(spec: LauncherSpec) -> dict[str, Any]:
    """A launcher in plain words."""
    if spec.max_nodes == 1:
        machines = "this machine"
    else:
        machines = (
            "other machines" if spec.max_nodes is None else f"up to {spec.max_nodes} machines"
        )
    return {
        "name": spec.name,
        "machines": machines,
        "files": "are shared with this machine"
        if spec.shared_filesystem
        else "are the machines' own",
        "can": sorted(spec.can),
        "tested_on": spec.tested_on,
        "proof": PROVEN.get(spec.tested_on, ""),
    }


def _distance(provided: Provided[LauncherSpec]) -> tuple[bool, bool]:
    """This machine comes first, then those that share its files, then those that do not."""
    return provided.spec.remote, not provided.spec.shared_filesystem


# -- strategies -----------------------------------------------------------------------------------


def strategies(backend: BackendOption = None, json_: JsonOption = False) -> None:
    """List the strategies: what each needs, and whether a backend can run it."""
    from anygauge.config.strategies import all_sections

    registry, selection, chosen = choose_backend(backend, need_device=False)
    provided = {each.spec.name: each for each in registry.strategies}
    found = [_describe_strategy(provided[n], s, chosen) for n, s in all_sections().items()]
    if json_:
        typer.echo(json.dumps({"backend": chosen.name, "strategies": found}, indent=2))
        return
    console = Console()
    console.print(Text(f"backend {chosen.name} ({selection.reason})"))
    for one in found:
        name = f"{one['name']} (default)" if one["default"] else one["name"]
        console.print(Text(f"\n{name}", style="bold"))
        console.print(Text(f"    {one['summary']}"))
        console.print(Text(f"    ranks: {one['ranks']}"))
        if one["fields"]:
            console.print(Text(f"    fields: {', '.join(one['fields'])}"))
        for need in one["needs"]:
            console.print(Text(f"    needs {need['capability']}: {need['because']}"))
        for name, version in one["packages"].items():
            console.print(Text(f"    package {name}: {version or 'not installed'}"))
        refused = one["refused"]
        console.print(Text(f"    {chosen.name}: {f'no. {refused}' if refused else 'yes'}"))


def _describe_strategy(
    provided: Provided[StrategySpec],
    section: type[StrategySection],
    backend: Backend,
) -> dict[str, Any]:
    """A strategy in plain values; ``refused`` is why the backend cannot run it, empty if it can."""
    from anygauge.config.strategies import DEFAULT
    from anygauge.training.strategy import check_backend

    spec = provided.spec
    try:
        check_backend(spec, backend)
        refused = ""
    except UnsupportedError as error:
        refused = str(error)
    sizes = " or ".join(map(str, spec.world_sizes))
    return {
        "name": spec.name,
        "default": spec.name == DEFAULT,
        "summary": spec.summary,
        "distribution": provided.distribution,
        "ranks": sizes or "any number",
        "fields": [name for name in section.model_fields if name != "name"],
        "needs": [{"capability": need.capability, "because": need.because} for need in spec.needs],
        "packages": {name: installed_version(name) for name in spec.distributions},
        "refused": refused,
    }


# -- kernels --------------------------------------------------------------------------------------


def kernels(backend: BackendOption = None, json_: JsonOption = False) -> None:
    """List the kernels of each operation, and what a run on this machine would choose."""
    from anygauge.kernels.choose import choose_kernels

    registry, selection, chosen = choose_backend(backend, need_device=False)
    packed = choose_kernels(registry, chosen, {}, packing=True)
    rows = _kernel_rows(registry, chosen, choose_kernels(registry, chosen, {}), packed)
    if json_:
        typer.echo(json.dumps({"backend": chosen.name, "kernels": rows}, indent=2))
        return
    console = Console()
    title = f"backend {chosen.name} ({selection.reason}); a run would use those marked *"
    console.print(Text(title))
    console.print(_kernel_table(rows))


def _kernel_rows(
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
    from anygauge.kernels.choose import unfit, users

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


def _kernel_table(rows: Sequence[dict[str, Any]]) -> Table:
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
