"""``anygauge strategies``: how a model can be spread, and which ways a backend can go."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from anygauge.cli.intent import BackendOption
from anygauge.config.strategies import StrategySection, all_sections
from anygauge.interface import Backend, StrategySpec, UnsupportedError
from anygauge.registry import AUTO, Provided, Registry, installed_version, select_backend
from anygauge.training.strategy import check_backend


def strategies(
    backend: BackendOption = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a list.")] = False,
) -> None:
    """List the strategies: what each needs, and whether a backend can run it."""
    registry = Registry.load()
    selection = select_backend(registry, backend or AUTO, need_device=False)
    chosen = registry.create_backend(selection.spec.name)
    provided = {each.spec.name: each for each in registry.strategies}
    default = registry.default_strategy().spec.name
    found = [describe(provided[n], s, chosen, default) for n, s in all_sections().items()]
    if json_:
        typer.echo(json.dumps({"backend": chosen.name, "strategies": found}, indent=2))
        return
    console = Console(emoji=False, highlight=False, soft_wrap=True)
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


def describe(
    provided: Provided[StrategySpec],
    section: type[StrategySection],
    backend: Backend,
    default: str,
) -> dict[str, Any]:
    """A strategy in plain values; ``refused`` is why the backend cannot run it, empty if it can."""
    spec = provided.spec
    try:
        check_backend(spec, backend)
        refused = ""
    except UnsupportedError as error:
        refused = str(error)
    sizes = " or ".join(map(str, spec.world_sizes))
    return {
        "name": spec.name,
        "default": spec.name == default,
        "summary": spec.summary,
        "distribution": provided.distribution,
        "ranks": sizes or "any number",
        "fields": [name for name in section.model_fields if name != "name"],
        "needs": [{"capability": need.capability, "because": need.because} for need in spec.needs],
        "packages": {name: installed_version(name) for name in spec.distributions},
        "refused": refused,
    }
