"""``anygauge evaluate``: the loss of a model on rows, by ranks and kernels as a run has them."""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anygauge.cli import shared_options as options
from anygauge.cli.trained import OWN_ADAPTER, ModelOrigin, model_origin
from anygauge.interface import UsageError
from anygauge.util.text import json_values, wrap_for_stream

if TYPE_CHECKING:
    from anygauge.config.schema import RunFile

ROWS = "Rows to evaluate on, laid out as those of the run: a file, an address or a hub name."
NAME = "evaluate"
LARGEST_EXPONENT = math.log(sys.float_info.max)


def evaluate(
    model: options.ModelArgument,
    rows: Annotated[str, typer.Option(help=ROWS, metavar="FILE")],
    base: Annotated[bool, typer.Option("--base", help="Evaluate the base model alone.")] = False,
    adapter: Annotated[Path | None, typer.Option(help=OWN_ADAPTER)] = None,
    backend: options.BackendOption = None,
    devices: options.DevicesOption = 1,
    set_: options.SetOption = None,
    json_: options.JsonOption = False,
) -> None:
    """Show the loss and perplexity of a model on rows; nothing is trained or kept."""
    if base and adapter is not None:
        raise UsageError("--base is the model without an adapter; leave --adapter out")
    origin = model_origin(model, adapter, None)
    origin = replace(origin, adapter=None) if base else origin
    run = _run_of(origin, rows, base=base, backend=backend, devices=devices or 1)
    folder = Path(tempfile.mkdtemp(prefix=f"anygauge-{NAME}-"))
    try:
        if status := _start(run, folder, set_ or []):
            raise typer.Exit(status)
        report = json.loads((folder / NAME / "report.json").read_text())
    except BaseException as error:
        if not isinstance(error, typer.Exit):  # then its logs were named, and stay
            shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)
    record = report["evaluations"][0]
    loss = math.nan if record["eval_loss"] is None else record["eval_loss"]
    if pairs := record.get("eval_pairs"):
        found: dict[str, Any] = {"loss": loss, "objective": run.objective, "pairs": pairs}
    else:
        perplexity = math.inf if loss > LARGEST_EXPONENT else math.exp(loss)
        found = {"loss": loss, "perplexity": perplexity, "loss_tokens": record["eval_tokens"]}
    used = origin.adapter and str(origin.adapter)
    found |= {"rows": report["data"], "model": model, "adapter": used, "ranks": devices}
    found |= {name: report[name] for name in ("backend", "strategy")}
    found["param_dtype"] = report["choices"]["precision"]["param_dtype"]
    if json_:
        typer.echo(json.dumps(json_values(found)))
        return
    for name, value in found.items():
        shown = "none" if value is None else value
        typer.echo(wrap_for_stream(f"{name.replace('_', ' '):<11}  {shown}", sys.stdout))


def _run_of(
    origin: ModelOrigin, rows: str, *, base: bool, backend: str | None, devices: int
) -> RunFile:
    """A run of one step on these rows; the evaluation before that step is what is wanted.

    Raises:
        UsageError: there are no such rows.
    """
    from anygauge.config import schema, sections
    from anygauge.config.paths import complaint_about, locate
    from anygauge.config.strategies import StrategySection
    from anygauge.registry import installed_plugins

    place = ("data", "train", "path")
    path = locate(place, rows, Path.cwd())
    if complaint := complaint_about(place, path):
        raise UsageError(f"--rows {rows}: {complaint}")
    section, trained, adapter = origin.section, origin.run, origin.adapter
    if trained is None:
        data = schema.DataSection(train=schema.SourceSection(path=path))
        trained = schema.RunFile(model=section, data=data)
    elif base or adapter is not None:
        section = trained.model
    elsewhere = {"path", "subset", "revision", "split", "limit", "weight"}
    source = trained.data.train_sources[0].model_dump(exclude=elsewhere)
    both = dict.fromkeys(("train", "eval"), schema.SourceSection(path=path, **source))
    # A new adapter changes nothing; without any, all weights would be trained, which takes memory.
    start = {"r": 1} if adapter is None else {"start_from": str(adapter.absolute())}
    same = {"seed", "micro_batch_size", "router_aux_loss_coef", "deterministic"}
    kept = trained.train.model_dump(include=same)
    size = devices * trained.train.micro_batch_size
    strategy = trained.strategy
    alone = installed_plugins().find_strategy(strategy.name).spec.single_process
    if devices == 1 or alone or strategy.name == "auto":
        strategy = StrategySection.of_plugin("single" if devices == 1 else "ddp").model_validate({})
    names = ("backend", "backend_options", "kernels", "environment")
    own = {name: getattr(trained, name) for name in names if backend in (None, trained.backend)}
    return schema.RunFile(
        name=NAME,
        model=section,
        adapter=sections.AdapterSection(verify=False, **start),
        data=trained.data.model_copy(update={**both, "eval_fraction": 0.0, "streaming": False}),
        train=sections.TrainSection(steps=1, global_batch_size=size, **kept),
        objective=trained.objective,
        objective_options=trained.objective_options,
        precision=trained.precision,
        strategy=strategy,
        launch=schema.LaunchSettings(devices=devices),
        **{"backend": backend, **own},
    )


def _start(run: RunFile, folder: Path, overrides: list[str]) -> int:
    """Have ranks evaluate, and follow them; returns the exit status."""
    from anygauge.config.resolved import dump_run
    from anygauge.launch import prepare, request, submit
    from anygauge.launch.follow import follow

    path = folder / f"{NAME}.yaml"
    path.write_text(dump_run(run))
    asked = request.read_request(path, overrides, {"output": str(folder)}, need_device=True)
    asked = replace(asked, job=replace(asked.job, evaluates=True))
    asked, found, _ = prepare.prepare_run(asked, plan=False)
    for note in found.notes:
        typer.echo(wrap_for_stream(f"note: {note}", sys.stderr), err=True)
    plan = request.render_plan(asked)
    with submit.submit_job(asked, plan, resuming=False) as (running, signals):
        ending = follow(running, run_directory=asked.job.run_directory, quiet=True, signals=signals)
        return ending.show(asked.job.run_directory)
