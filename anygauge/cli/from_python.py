"""`anygauge.train`, `anygauge.plan` and `anygauge.load`: for scripts and notebooks."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from anygauge.interface import HOST_DEVICE, UsageError
from anygauge.util.errors import error_class
from anygauge.util.events import EVENTS_FD
from anygauge.util.forks import lacks_torch_threads

if TYPE_CHECKING:
    import torch

    from anygauge.config.load import RunSource
    from anygauge.launch.follow import Ending

PathText = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run has left; docs/run-folder.md has its files and metrics.

    Attributes:
        folder: the run directory, absolute.
        adapter: the folder of the adapter; None where none was trained, or the run was ended.
        model: the folder of the model, where its own weights were trained.
        metrics: the lines of ``metrics.jsonl``: steps, evaluations and samples.
        stopped_by: ``steps`` (it has them all), ``request`` (a signal that the program handles),
            or what else ended the run, as ``report.json`` says it.
    """

    folder: Path
    adapter: Path | None
    model: Path | None
    metrics: list[dict[str, Any]] = field(repr=False)
    stopped_by: str

    @property
    def losses(self) -> list[float]:
        """The training loss of every step, in nats per loss token, or pair."""
        return [line["loss"] for line in self.metrics if "loss" in line]


def train(
    run: RunSource,
    *,
    backend: str | None = None,
    devices: int | None = None,
    nodes: int | None = None,
    output: PathText | None = None,
    resume: PathText | None = None,
    plan: bool | None = None,
    force: bool = False,
    quiet: bool = False,
    **set: Any,
) -> Result:
    """Train as ``anygauge train`` does, and show the same; returns when the ranks have ended.

    Args:
        run: the path of a run file, a dict of what is in one, or a `RunFile`.
        set: fields to change, as with ``--set``: ``**{"train.steps": 10}``. The others are the
            command's options.

    Raises:
        AnygaugeError: the run is refused, or a rank failed; with the class of its cause, and the
            command's `exit_status`.
        KeyboardInterrupt: Ctrl-C, once the ranks have written a checkpoint and ended.
        SystemExit: another signal, likewise. One that the program handles reaches it instead.
    """
    from anygauge.launch.request import read_request
    from anygauge.launch.start_run import start

    _refuse_a_fork("train")
    _refuse_a_rank()
    flags: dict[str, Any] = {"backend": backend, "launch.devices": devices, "launch.nodes": nodes}
    paths = {"output": output, "checkpoint.resume": resume}
    flags |= {name: os.fspath(path) for name, path in paths.items() if path is not None}
    request = read_request(run, set_options(set), flags, need_device=True)
    if not request.launcher.shared_filesystem:
        raise request.run.error(
            "launch.launcher",
            f"{request.launcher.name} leaves a run's folder on other machines, and anygauge.train "
            "returns what is in it; start the run with `anygauge launch`",
        )
    ending = start(request, quiet=quiet, plan_memory=plan, force=force)
    return _result(ending, Path(request.job.run_directory))


def plan(
    run: RunSource,
    *,
    machine: str | None = None,
    backend: str | None = None,
    devices: int | None = None,
    nodes: int | None = None,
    hardware: Sequence[PathText] = (),
    suggest: bool = False,
    strategies: bool = False,
    compare: Sequence[str] = (),
    **set: Any,
) -> SimpleNamespace:
    """What ``anygauge plan`` says of a run, without its devices; computes in this process.

    Args:
        run, set: as of `train`. The others are the command's options.

    Returns:
        An object whose attributes are the keys of ``anygauge plan --json``; docs/planning.md has
        them all.

    Raises:
        AnygaugeError: the run or an option is wrong, or the run cannot be planned.
    """
    from anygauge.cli.plan import Asked, answer
    from anygauge.util.console import Console

    _refuse_a_fork("plan")
    flags = {"backend": backend, "launch.devices": devices, "launch.nodes": nodes}
    asked = Asked(machine, [Path(file) for file in hardware], suggest, strategies, compare)
    return SimpleNamespace(**answer(run, set_options(set), flags, asked, Console(quiet=True)))


def load(
    result: Result | PathText,
    *,
    device: str | torch.device = HOST_DEVICE,
    dtype: torch.dtype | None = None,
) -> tuple[Any, Any]:
    """The trained model and its tokenizer, by transformers and peft, in evaluation mode.

    The base of an adapter is the one that the run had; what was quantized is quantized again.

    Args:
        result: of `train`; or the folder of a run, an adapter, a checkpoint or a model, or a name
            of the hub.
        dtype: of the weights; None: that of the base's files.

    Raises:
        ModelError: there is no result, or it cannot be loaded.
    """
    _refuse_a_fork("load")
    import torch

    from anygauge.cli.trained import fetch_model, model_origin
    from anygauge.models.factory import dtype_name
    from anygauge.models.generate import load_for_inference
    from anygauge.models.source import load_config
    from anygauge.models.tokenizer import check_vocabulary, load_tokenizer

    folder = result.folder if isinstance(result, Result) else result
    origin = model_origin(os.fspath(folder), None, None)
    fetch_model(origin.section)
    of_base = getattr(load_config(origin.section), dtype_name(), None) or torch.float32
    tokenizer = load_tokenizer(origin.section)
    model = load_for_inference(
        origin.section,
        adapter=origin.adapter,
        device=torch.device(device),
        dtype=dtype or of_base,
        attention=None,
    )
    check_vocabulary(model.config, tokenizer)
    return model, tokenizer


def _result(ending: Ending, folder: Path) -> Result:
    """What is left of a run that has ended, or what its end raises; see `train`."""
    from anygauge.launch.run_directory import METRICS
    from anygauge.launch.view import where_logs_are
    from anygauge.training.checkpoints.identity import finished_run

    text = ending.text
    if ending.state == "stopped":
        text += '; to resume: the same call with resume="auto"'
    elif text:
        text += f"\nlogs: {where_logs_are(folder)}"
    if ending.signals:
        first = signal.Signals(ending.signals[0])
        if first == signal.SIGINT:
            raise KeyboardInterrupt(text or f"{folder} has all its steps")
        if signal.getsignal(first) == signal.SIG_DFL:
            print(text, file=sys.stderr)
            raise SystemExit(ending.status)
        signal.raise_signal(first)
    elif ending.state != "ok":
        error = error_class(ending.kind)(text)
        error.exit_status = ending.status
        raise error
    finished = finished_run(folder) if ending.state == "ok" else None
    saved = {} if finished is None else {finished.result.name: finished.result}
    metrics = folder / METRICS  # not there where a run ended before its first step
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    reason = (finished and finished.report.get("stopped_by")) or "steps"
    return Result(
        folder=folder,
        adapter=saved.get("adapter"),
        model=saved.get("model"),
        metrics=[json.loads(line) for line in lines],
        stopped_by=reason if ending.state == "ok" else "request",
    )


def set_options(values: Mapping[str, Any]) -> list[str]:
    """Fields to change as the command's options."""
    from anygauge.config.yaml_text import write_flow

    try:
        return [f"{path}={write_flow(value)}" for path, value in values.items()]
    except ValueError as error:
        raise UsageError(f"fields to change: {error}") from None


def _refuse_a_fork(function: str) -> None:
    """Raise a `UsageError` where torch may hang; see `anygauge.util.forks`."""
    if lacks_torch_threads():
        raise UsageError(
            f"anygauge.{function}: this process is a fork of one in which torch had threads, which "
            "a fork lacks, so that torch may hang in it. Start the process anew instead: "
            'multiprocessing.get_context("spawn"), or subprocess.run'
        )


def _refuse_a_rank() -> None:
    """Raise a `UsageError` where each of several ranks would start a run."""
    from anygauge.launch.foreign import find_launch

    torch = sys.modules.get("torch")
    foreign = find_launch(os.environ)
    if foreign is not None:
        what = f"{foreign.launcher} has started it as rank {foreign.rank} of {foreign.world_size}"
    elif EVENTS_FD in os.environ:
        what = "anygauge has started it"
    elif torch and torch.distributed.is_available() and torch.distributed.is_initialized():
        what = "it has a process group (torch.distributed)"
    else:
        return
    raise UsageError(
        f"anygauge.train starts ranks, but this process is a rank already: {what}. Call it in a "
        "process that no launcher has started (python SCRIPT.py); or have the launcher start the "
        "command as its ranks: torchrun ... -m anygauge train RUN.yaml"
    )
