"""``anygauge env``: the variables that a run's ranks would get, why, and who won."""

from __future__ import annotations

import enum
import json
import os
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from anygauge.cli.shared_options import BackendOption, DevicesOption, NodesOption, SetOption
from anygauge.config.load import load_run_file
from anygauge.config.strategies import StrategySection
from anygauge.interface import Job, LaunchSettings, Setting, UsageError, choose_fabric
from anygauge.launch.foreign import without_launcher
from anygauge.launch.rank_environment import inspect_node
from anygauge.registry import (
    AUTO,
    Registry,
    ResolvedSetting,
    resolve_environment,
    select_backend,
)
from anygauge.util.console import Console
from anygauge.util.hiding import holds_secret
from anygauge.util.text import escape

RUN_FILE = "The run file (YAML); default: a run with all defaults."
LOCAL_RANK = "Show only this rank of the machine."
EXPLAIN = "Also show the rules, including those that do not apply."
SHOW_VALUES = "Also show the values that the run file sets; secrets stay hidden."


class OutputFormat(enum.StrEnum):
    """How the environment is printed."""

    table = "table"
    shell = "shell"
    json = "json"


def env(
    run_file: Annotated[Path | None, typer.Argument(help=RUN_FILE, metavar="RUN.yaml")] = None,
    backend: BackendOption = None,
    devices: DevicesOption = None,
    nodes: NodesOption = None,
    set_: SetOption = None,
    local_rank: Annotated[int | None, typer.Option(help=LOCAL_RANK)] = None,
    format_: Annotated[
        OutputFormat, typer.Option("--format", help="Output format.")
    ] = OutputFormat.table,
    explain: Annotated[bool, typer.Option("--explain", help=EXPLAIN)] = False,
    show_values: Annotated[bool, typer.Option("--show-values", help=SHOW_VALUES)] = False,
) -> None:
    """Show the environment that a run would get, and why. Needs no device, imports no torch."""
    registry = Registry.load()
    job = _make_job(registry, run_file, backend, devices, nodes, set_ or [])
    ranks = range(job.launch.devices) if local_rank is None else (local_rank,)
    if local_rank is not None and not 0 <= local_rank < job.launch.devices:
        last = job.launch.devices - 1
        raise UsageError(f"--local-rank: {local_rank} is not a rank of this machine: 0 to {last}")
    by_rank = rank_environments(registry, job, ranks)
    explained = _explain_rules(registry, job, ranks[0]) if explain else {}
    rules = explained.get("rules", ())
    if format_ is OutputFormat.json:
        record: dict[str, Any] = {
            str(r): [s.record(values=show_values) for s in found] for r, found in by_rank.items()
        }
        typer.echo(json.dumps(record | explained, indent=2))
    elif format_ is OutputFormat.shell:
        for rank, found in by_rank.items():
            typer.echo(f"# local rank {rank}")
            for one in found:
                typer.echo(_shell_line(one, values=show_values))
        for rule in rules:
            typer.echo(f"# {rule['name']}: {rule['here']}: {rule['why']} [{rule['source']}]")
    else:
        console = Console()
        console.print(
            f"Backend {job.backend}, {job.launch.nodes} x {job.launch.devices} ranks. "
            "Precedence: your own variable, run file, site hook, backend."
        )
        print_environment(console, by_rank, values=show_values)
        if explain:
            _print_rules(console, job.backend, rules, explained["fabric"])


def _make_job(
    registry: Registry,
    run_file: Path | None,
    backend: str | None,
    devices: int | None,
    nodes: int | None,
    overrides: list[str],
) -> Job:
    if run_file is not None:
        flags = {"backend": backend, "launch.devices": devices, "launch.nodes": nodes}
        run = load_run_file(run_file, overrides, flags)
        backend = run.backend
        fields: dict[str, Any] = {
            "name": run.name,
            "run_directory": str(Path(run.output).absolute() / run.name),
            "strategy": run.strategy.name,
            "launch": run.launch,
            "environment": run.environment,
            "backend_options": run.backend_options,
        }
    elif overrides:
        raise UsageError(
            "--set changes a run file, and none is given: anygauge env RUN.yaml --set ..."
        )
    else:
        launch = LaunchSettings(nodes=nodes or 1, devices=devices or 1)
        fields = {"name": "env", "run_directory": str(Path.cwd()), "launch": launch}
        fields["strategy"] = StrategySection.default_plugin
    chosen = select_backend(registry, backend or AUTO, need_device=False).spec.name
    return Job(run_file=str(run_file or ""), backend=chosen, rendezvous="file:///none", **fields)


def rank_environments(
    registry: Registry, job: Job, ranks: Iterable[int]
) -> dict[int, list[ResolvedSetting]]:
    """The settings of local ranks of this machine."""
    backend = registry.create_backend(job.backend, job.backend_options)
    environ = without_launcher(os.environ)
    node = inspect_node(backend, environ)
    return {
        rank: resolve_environment(registry, backend, job, node, rank, environ) for rank in ranks
    }


def print_environment(
    console: Console, by_rank: Mapping[int, list[ResolvedSetting]], *, values: bool = False
) -> None:
    """Each variable and distinct value with its ranks, who set it, and why.

    Args:
        values: show what the run file sets, too.
    """
    rows: dict[tuple[str, str, str], tuple[list[int], ResolvedSetting]] = {}
    for rank, found in by_rank.items():
        for one in found:
            key = (one.name, one.display(one.value, values=values), one.origin)
            rows.setdefault(key, ([], one))[0].append(rank)
    for (name, value, origin), (ranks, one) in rows.items():
        over = "; ".join(f"not {one.display(v, values=values)} ({o})" for o, v in one.overruled)
        why = f"{one.setting.reason} [{one.setting.source}]" + (f"; {over}" if over else "")
        which = "all ranks" if len(ranks) == len(by_rank) else f"rank {','.join(map(str, ranks))}"
        console.print(f"  {name}  {value}", style="bold")
        console.print(f"    {which}, set by {origin}: {why}")
    if not rows:
        console.print("  none: this backend sets nothing for such a job")


def _shell_line(one: ResolvedSetting, *, values: bool) -> str:
    if one.value is None:
        return f"unset {one.name}"
    if one.secret or holds_secret(one.value):
        return f"# {one.name} is a secret: not shown"
    if one.private and not values:
        return f"# {one.name} is set by the run file: not shown (--show-values shows it)"
    if escape(one.value) != one.value:
        inside = one.value.replace("\\", "\\\\").replace("'", "\\'")
        return f"export {one.name}=$'{escape(inside)}'"
    return f"export {one.name}={shlex.quote(one.value)}"


def _explain_rules(registry: Registry, job: Job, local_rank: int) -> dict[str, Any]:
    """The backend's networks between machines, and its rules with what each decides here."""
    backend = registry.create_backend(job.backend, job.backend_options)
    node = inspect_node(backend, without_launcher(os.environ))
    chosen = choose_fabric(backend.fabrics, job, node)
    known = {
        fabric.name: {"what": fabric.what, "seen": fabric.detect(node) if fabric.detect else None}
        for fabric in backend.fabrics
    }
    rules = [
        {
            "name": rule.name,
            "rule": rule.value,
            "scope": rule.scope.value,
            "reason": rule.reason,
            "source": rule.source,
            "here": str(decision.value) if isinstance(decision, Setting) else "(left as it is)",
            "why": decision.reason,
        }
        for rule, decision in backend.explain_environment(job, node, local_rank)
    ]
    fabric = {"chosen": chosen.name, "why": chosen.why, "known": known}
    return {"fabric": fabric, "rules": rules}


def _print_rules(
    console: Console, backend: str, rules: Iterable[Mapping[str, str]], fabric: Mapping[str, Any]
) -> None:
    console.print("Networks between machines (launch.fabric)", style="bold")
    for name, one in fabric["known"].items():
        console.print(f"{name}{'  chosen' * (name == fabric['chosen'])}", style="bold")
        console.print(f"    what: {one['what']}\n    here: {one['seen'] or 'not seen'}")
    if not fabric["chosen"]:
        console.print(f"    none chosen: {fabric['why']}")
    console.print(f"Rules of {backend}", style="bold")
    for rule in rules:
        console.print(f"{rule['name']}  {rule['here']}", style="bold")
        console.print(f"    here: {rule['why']}")
        console.print(f"    rule: {rule['rule']} (the same in each {rule['scope']})")
        console.print(f"    reason: {rule['reason']}\n    source: {rule['source']}")
    if not rules:
        console.print("  this backend has no table of rules")
