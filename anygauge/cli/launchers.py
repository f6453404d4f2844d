"""``anygauge launchers``: how runs can be started here, and what each way was tested on."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from anygauge.interface import ABILITIES, LauncherSpec
from anygauge.registry import Registry

PROVEN = {
    "real": "run with the target's own software",
    "emulated": (
        "rendered jobs pass the target's models, and their commands ran the way the target starts "
        "them"
    ),
    "schema": "rendered jobs pass the target's models",
}


def launchers(
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a list.")] = False,
) -> None:
    """List the installed launchers: where each starts ranks, what its jobs can do."""
    found = [
        {"distribution": provided.distribution, **describe(provided.spec)}
        for provided in sorted(Registry.load().launchers, key=lambda p: _distance(p.spec))
    ]
    if json_:
        typer.echo(json.dumps(found, indent=2))
        return
    console = Console(emoji=False, highlight=False, soft_wrap=True)
    for one in found:
        console.print(Text(one["name"], style="bold"))
        console.print(Text(f"    ranks on {one['machines']}; files {one['files']}"))
        for ability in one["can"]:
            console.print(Text(f"    a job {ABILITIES[ability]}"))
        if "detach" not in one["can"]:
            console.print(Text("    a job ends with the command that started it"))
        console.print(Text(f"    tested: {one['tested_on']} ({one['proof']})"))


def describe(spec: LauncherSpec) -> dict[str, Any]:
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


def _distance(spec: LauncherSpec) -> tuple[bool, bool]:
    """This machine comes first, then those that share its files, then those that do not."""
    return spec.remote, not spec.shared_filesystem
