"""``anygauge env``: the variables that a run's ranks would get, why, and who won."""

from __future__ import annotations

import enum
import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from anygauge.cli.options import BackendOption, DevicesOption, NodesOption, SetOption
from anygauge.interface import Backend, Job, LaunchSettings, Node, RunFileError, Setting
from anygauge.util.console import Console
from anygauge.util.text import escaped

if TYPE_CHECKING:
    from anygauge.cli.intent import Intent
    from anygauge.registry import Registry, ResolvedSetting


class OutputFormat(enum.StrEnum):
    """How the environment is printed."""

    table = "table"
    shell = "shell"
    json = "json"


def env(
    run_file: Annotated[
        Path | None,
        typer.Argument(
            help="The run file (YAML); default: a run with all defaults.", metavar="RUN.yaml"
        ),
    ] = None,
    backend: BackendOption = None,
    devices: DevicesOption = None,
    nodes: NodesOption = None,
    set_: SetOption = None,
    local_rank: Annotated[
        int | None, typer.Option("--local-rank", help="Show only this rank of the machine.")
    ] = None,
    format_: Annotated[
        OutputFormat, typer.Option("--format", help="Output format.")
    ] = OutputFormat.table,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Also show the rules, including those that do not apply."),
    ] = False,
    show_values: Annotated[
        bool,
        typer.Option(
            "--show-values",
            help="Also show the values that the run file sets; secrets stay hidden.",
        ),
    ] = False,
) -> None:
    """Show the environment that a run would get, and why. Needs no device, imports no torch."""
    registry, job = _job(run_file, backend, devices, nodes, set_)
    ranks = range(job.launch.devices) if local_rank is None else (local_rank,)
    if local_rank is not None and not 0 <= local_rank < job.launch.devices:
        raise typer.BadParameter(
            f"{local_rank} is not a rank of this machine: 0 to {job.launch.devices - 1}",
            param_hint="--local-rank",
        )
    by_rank = {rank: _resolve(registry, job, rank) for rank in ranks}
    rules, fabrics = _explained(registry, job, ranks[0]) if explain else ([], {})
    console = Console()
    if format_ is OutputFormat.json:
        record: dict[str, Any] = {
            str(r): [s.record(values=show_values) for s in found] for r, found in by_rank.items()
        }
        more = {"fabric": fabrics, "rules": rules} if explain else {}
        typer.echo(json.dumps(record | more, indent=2))
    elif format_ is OutputFormat.shell:
        for rank, found in by_rank.items():
            typer.echo(f"# local rank {rank}")
            for one in found:
                typer.echo(_shell(one, values=show_values))
        for rule in rules:
            typer.echo(f"# {rule['name']}: {rule['here']}: {rule['why']} [{rule['source']}]")
    else:
        console.print(
            f"Backend {job.backend}, {job.launch.nodes} x {job.launch.devices} ranks. "
            "Precedence: your own variable, run file, site hook, backend."
        )
        print_environment(console, by_rank, values=show_values)
        if explain:
            _print_fabrics(console, fabrics)
            _print_rules(console, job.backend, rules)


def _explained(
    registry: Registry, job: Job, local_rank: int
) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """The backend's rules, with what each decides here, and its networks between machines."""
    backend = registry.create_backend(job.backend, job.backend_options)
    node = _node(backend)
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
    chosen = backend.fabric(job, node)
    known = {
        fabric.name: {"what": fabric.what, "seen": fabric.detect(node) if fabric.detect else None}
        for fabric in backend.fabrics
    }
    return rules, {"chosen": chosen.name, "why": chosen.why, "known": known}


def _print_fabrics(console: Console, fabrics: dict[str, Any]) -> None:
    console.print(Text("Networks between machines (launch.fabric)", style="bold"))
    for name, one in fabrics["known"].items():
        mark = "  chosen" if name == fabrics["chosen"] else ""
        console.print(Text(f"{name}{mark}", style="bold"))
        _indented(console, f"what: {one['what']}", f"here: {one['seen'] or 'not seen'}")
    if not fabrics["chosen"]:
        _indented(console, f"none chosen: {fabrics['why']}")


def _print_rules(console: Console, backend: str, rules: list[dict[str, str]]) -> None:
    console.print(Text(f"Rules of {backend}", style="bold"))
    for rule in rules:
        console.print(Text(f"{rule['name']}  {rule['here']}", style="bold"))
        _indented(
            console,
            f"here: {rule['why']}",
            f"rule: {rule['rule']} (the same in each {rule['scope']})",
            f"reason: {rule['reason']}",
            f"source: {rule['source']}",
        )
    if not rules:
        console.print("  this backend has no table of rules")


def _indented(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(Text(f"    {line}"))


def _job(
    run_file: Path | None,
    backend: str | None,
    devices: int | None,
    nodes: int | None,
    set_: list[str] | None,
) -> tuple[Registry, Job]:
    from anygauge.config.strategies import DEFAULT
    from anygauge.registry import Registry, select_backend

    registry = Registry.load()
    if run_file is None:
        if set_:
            raise RunFileError(
                "--set changes a run file, and none is given: anygauge env RUN.yaml --set ..."
            )
        job = Job(
            name="env",
            run_directory=str(Path.cwd()),
            run_file="",
            backend=select_backend(registry, backend or "auto", need_device=False).spec.name,
            strategy=DEFAULT,
            launch=LaunchSettings(nodes=nodes or 1, devices=devices or 1),
            rendezvous="file:///none",
        )
        return registry, job
    from anygauge.config.load import load_run_file

    flags = {"backend": backend, "launch.devices": devices, "launch.nodes": nodes}
    run = load_run_file(run_file, list(set_ or ()), flags).run
    job = Job(
        name=run.name,
        run_directory=str(Path(run.output).absolute() / run.name),
        run_file=str(run_file),
        backend=select_backend(registry, run.backend, need_device=False).spec.name,
        strategy=run.strategy.name,
        launch=run.launch,
        rendezvous="file:///none",
        environment=run.environment,
        backend_options=run.backend_options,
    )
    return registry, job


SHOWN_RANKS = 16
"""Of a machine with more, the first so many and the last are shown."""


def shown_ranks(devices: int) -> list[int]:
    """The local ranks of a machine that a table has room for."""
    return [*range(min(devices, SHOWN_RANKS)), *([devices - 1] if devices > SHOWN_RANKS else [])]


def rank_environments(intent: Intent) -> dict[int, list[ResolvedSetting]]:
    """Local rank -> its settings, for the `shown_ranks` of this machine."""
    return {
        rank: _resolve(intent.registry, intent.job, rank)
        for rank in shown_ranks(intent.job.launch.devices)
    }


def _resolve(registry: Registry, job: Job, local_rank: int) -> list[ResolvedSetting]:
    from anygauge.launch.foreign import scrub
    from anygauge.registry import resolve_environment

    backend = registry.create_backend(job.backend, job.backend_options)
    return resolve_environment(
        registry, backend, job, _node(backend), local_rank, scrub(os.environ)
    )


def _node(backend: Backend) -> Node:
    from anygauge.launch.environment import inspect_node
    from anygauge.launch.foreign import scrub

    return inspect_node(backend=backend, environ=scrub(os.environ))


def print_environment(
    console: Console, by_rank: dict[int, list[ResolvedSetting]], *, values: bool = False
) -> None:
    """Each variable and distinct value with its ranks, who set it, and why.

    Args:
        values: show what the run file sets, too.
    """
    rows: dict[tuple[str, str, str], tuple[list[int], ResolvedSetting]] = {}
    for rank, found in by_rank.items():
        for one in found:
            key = (one.name, one.shown(one.value, values=values), one.origin)
            rows.setdefault(key, ([], one))[0].append(rank)
    for (name, value, origin), (ranks, one) in rows.items():
        over = "; ".join(f"not {one.shown(v, values=values)} ({o})" for o, v in one.overruled)
        why = f"{one.setting.reason} [{one.setting.source}]" + (f"; {over}" if over else "")
        which = "all ranks" if len(ranks) == len(by_rank) else f"rank {','.join(map(str, ranks))}"
        console.print(Text(f"  {name}  {value}", style="bold"))
        _indented(console, f"{which}, set by {origin}: {why}")
    if not rows:
        console.print("  none: this backend sets nothing for such a job")


def _shell(one: ResolvedSetting, *, values: bool) -> str:
    from anygauge.util.hiding import holds_secret

    if one.value is None:
        return f"unset {one.name}"
    if one.secret or holds_secret(one.value):
        return f"# {one.name} is a secret: not shown"
    if one.private and not values:
        return f"# {one.name} is set by the run file: not shown (--show-values shows it)"
    if escaped(one.value) != one.value:
        inside = one.value.replace("\\", "\\\\").replace("'", "\\'")
        return f"export {one.name}=$'{escaped(inside)}'"
    return f"export {one.name}={shlex.quote(one.value)}"
