"""``anygauge evaluate``: the loss of an adapter, a model or a base on rows.

Ranks, kernels and strategy are those of a run, so that devices can be compared.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anygauge.cli.shared_options import (
    BackendOption,
    DevicesOption,
    JsonOption,
    ModelArgument,
    SetOption,
    TokenizerOption,
)
from anygauge.cli.trained import OWN_ADAPTER, ModelOrigin, model_origin
from anygauge.interface import UsageError
from anygauge.util.text import fitted

if TYPE_CHECKING:
    from anygauge.config.schema import RunFile

ROWS = "Rows to evaluate on, laid out as those of the run: a file, an address or a hub name."
BASE = "Evaluate the base model alone."
NAME = "evaluate"
FOUND = (
    *("loss", "perplexity", "loss_tokens", "data", "device", "backend", "ranks", "strategy"),
    "param_dtype",
)
"""What ranks report, in ``--json`` too; see `anygauge.training.save.evaluated`."""


def evaluate(
    model: ModelArgument,
    rows: Annotated[str, typer.Option(help=ROWS, metavar="FILE")],
    base: Annotated[bool, typer.Option("--base", help=BASE)] = False,
    adapter: Annotated[Path | None, typer.Option(help=OWN_ADAPTER)] = None,
    tokenizer: TokenizerOption = None,
    backend: BackendOption = None,
    devices: DevicesOption = None,
    set_: SetOption = None,
    json_: JsonOption = False,
) -> None:
    """Show the loss and perplexity of a model on rows; nothing is trained or kept."""
    if base and adapter is not None:
        raise UsageError("--base is the model without an adapter; leave --adapter out")
    origin = model_origin(model, adapter, tokenizer)
    if tokenizer is not None and origin.run is not None:
        section = origin.run.model.model_copy(update={"tokenizer": tokenizer})
        origin = replace(origin, run=origin.run.model_copy(update={"model": section}))
    folder = Path(tempfile.mkdtemp(prefix=f"anygauge-{NAME}-"))
    try:
        run = _run_of(origin, rows, folder, base=base, backend=backend, devices=devices or 1)
        status = _start(run, folder / f"{NAME}.yaml", set_ or [])
        found = {} if status else json.loads((folder / NAME / "report.json").read_text())
    except BaseException:
        shutil.rmtree(folder)
        raise
    if status:
        raise typer.Exit(status)  # its logs were named, and stay
    shutil.rmtree(folder)
    shown = {"model": model, "adapter": None if base else origin.adapter and str(origin.adapter)}
    if json_:
        typer.echo(json.dumps({**shown, **{name: found[name] for name in FOUND}}))
        return
    loss, perplexity = (math.nan if found[n] is None else found[n] for n in FOUND[:2])
    with_adapter = f" with {shown['adapter']}" if shown["adapter"] else ""
    for line in (
        f"loss {loss:.6f}  perplexity {perplexity:.4f}",
        f"rows: {found['data']}",
        f"{'base of ' if base else ''}{model}{with_adapter} on {found['device']}: backend "
        f"{found['backend']}, {found['param_dtype']}, ranks {found['ranks']}, {found['strategy']}",
    ):
        typer.echo(fitted(line, sys.stdout))


def _run_of(
    origin: ModelOrigin, rows: str, folder: Path, *, base: bool, backend: str | None, devices: int
) -> RunFile:
    """A run of one step on these rows; the evaluation before that step is what is wanted.

    Raises:
        UsageError: there are no such rows.
    """
    from anygauge.config.paths import complaint_about, locate
    from anygauge.config.schema import DataSection, RunFile, SourceSection
    from anygauge.config.sections import AdapterSection, TrainSection
    from anygauge.config.strategies import section_of
    from anygauge.interface import LaunchSettings
    from anygauge.registry import installed_plugins

    place = ("data", "train", "path")
    path = locate(place, rows, Path.cwd())
    if complaint := complaint_about(place, path):
        raise UsageError(f"--rows {rows}: {complaint}")
    section = origin.section
    trained = origin.run
    if trained is None:
        trained = RunFile(model=section, data=DataSection(train=SourceSection(path=path)))
    elif base or origin.adapter is not None:
        section = trained.model
    where = {"subset", "revision", "split", "limit", "weight"}
    fields = trained.data.train_sources[0].model_dump(exclude=where)
    source = SourceSection(**{**fields, "path": path})
    # An adapter that was not trained changes nothing; without any, all weights would be trained,
    # and take memory for it.
    adapter = AdapterSection(r=1, verify=False)
    if origin.adapter is not None and not base:
        adapter = AdapterSection(start_from=str(origin.adapter.absolute()), verify=False)
    same = {"seed", "micro_batch_size", "router_aux_loss_coef", "deterministic"}
    kept = trained.train.model_dump(include=same)
    size = devices * trained.train.micro_batch_size
    strategy = trained.strategy
    alone = installed_plugins().find_strategy(strategy.name).spec.single_process
    if devices == 1 or alone or strategy.name == "auto":
        strategy = section_of("single" if devices == 1 else "ddp").model_validate({})
    of_backend = {}
    if backend not in (None, trained.backend):
        of_backend = {"backend": backend, "backend_options": {}, "kernels": {}, "environment": {}}
    return RunFile(
        name=NAME,
        output=str(folder),
        model=section,
        adapter=adapter,
        data=trained.data.model_copy(
            update={"train": source, "eval": source, "eval_fraction": 0.0, "streaming": False}
        ),
        train=TrainSection(steps=1, global_batch_size=size, system_every_s=0, **kept),
        precision=trained.precision,
        strategy=strategy,
        launch=LaunchSettings(devices=devices),
        **{
            **{n: getattr(trained, n) for n in ("backend", "backend_options", "kernels")},
            "environment": trained.environment,
            **of_backend,
        },
    )


def _start(run: RunFile, path: Path, overrides: list[str]) -> int:
    """Have ranks evaluate, and follow them; returns the exit status."""
    from anygauge.config.resolved import dump_run
    from anygauge.launch.follow import follow
    from anygauge.launch.prepare import prepare_run
    from anygauge.launch.request import read_request, render_plan
    from anygauge.launch.submit import submit_job

    path.write_text(dump_run(run))
    request = read_request(path, overrides, {}, need_device=True)
    request = replace(request, job=replace(request.job, evaluates=True))
    request, found, _ = prepare_run(request, plan=False)
    for note in found.notes:
        typer.echo(fitted(f"note: {note}", sys.stderr), err=True)
    with submit_job(request, render_plan(request), resuming=False) as (running, signals):
        folder = request.job.run_directory
        return follow(running, run_directory=folder, quiet=True, signals=signals)
