"""The trackers that come with anygauge: JSON lines, and those of `accelerate.tracking`.

accelerate's know how to speak to each service; here each keeps its run over a resume and gets our
summary. They run without accelerate's PartialState, which would start a process group.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate import tracking

from anygauge.interface import AnygaugeError, NotAvailableError, RunStatus, TrackerContext
from anygauge.training.trackers.options import mlflow_store, wandb_login
from anygauge.util.files import write_text
from anygauge.util.text import finite

_SEND_S = 25.0
"""Seconds that wandb has to send the rest at the end; the data stays on disk for `wandb sync`."""
_PROMPT_S = 5.0
"""Seconds that wandb waits for an answer on the terminal when a key is invalid."""
_MLFLOW_STATUS: Mapping[RunStatus, str] = {
    "finished": "FINISHED",
    "failed": "FAILED",
    "stopped": "KILLED",
}
_LONGEST_VALUE = 500
"""Characters of a parameter that MLflow servers of all versions accept."""


class _Logger(logging.LoggerAdapter):
    """accelerate's own raises without a PartialState."""

    @functools.lru_cache(None)  # noqa: B019 - there is one
    def warning_once(self, *args: Any) -> None:
        """As accelerate's."""
        self.warning(*args)


tracking.logger = _Logger(logging.getLogger(tracking.__name__), {})


class JsonLinesFile:
    """Appends ``{"time", "run", "step", name: value, ...}``, one object a line, each written whole.

    The file is for whatever collects logs. The last line of a run has ``status`` and ``summary``.
    inf and nan become null.
    """

    def __init__(self, context: TrackerContext) -> None:
        path = context.run_directory / Path(context.options.path).expanduser()
        self._run = context.run_name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Line by line, so that a reader sees whole objects.
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise AnygaugeError(
                f"tracker_options.jsonl.path: cannot append to {path}: {error.strerror}; give the "
                "path of a file that can be written"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._write({"step": step, **metrics})

    def close(self, status: RunStatus, summary: Mapping[str, float]) -> None:
        """See `Tracker.close`."""
        self._write({"status": status, "summary": summary})
        self._file.close()

    def _write(self, values: Mapping[str, Any]) -> None:
        record = {"time": time.time(), "run": self._run, **values}
        self._file.write(json.dumps(finite(record)) + "\n")


class _Service:
    """Over one of accelerate's trackers, whose `log` has its arguments in another order."""

    main_process_only = False
    name: str
    start: Callable[[], None]
    finish: Callable[[], None]
    store_init_configuration: Callable[[dict[str, Any]], None]

    def open(self, context: TrackerContext, *args: Any, **kwargs: Any) -> None:
        """Start accelerate's tracker, made with these arguments."""
        self._last = context.resumed_from_step or 0
        super().__init__(*args, **kwargs)
        self.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._last = step
        super().log(dict(metrics), step=step)  # type: ignore[misc]

    def close(self, status: RunStatus, summary: Mapping[str, float]) -> None:
        """See `Tracker.close`. Most services have no summaries: its values become metrics."""
        if summary:
            self.log(self._last, {f"summary/{name}": value for name, value in summary.items()})
        self.end(status)

    def end(self, status: RunStatus) -> None:
        """The last call to the service."""
        self.finish()


class TensorBoard(_Service, tracking.TensorBoardTracker):
    """Event files under ``<run directory>/tensorboard``: scalars by step, the run file as text."""

    def __init__(self, context: TrackerContext) -> None:
        resumed = context.resumed_from_step
        # Steps after the checkpoint are trained, and logged, again.
        purge = None if resumed is None else resumed + 1
        self.open(context, "tensorboard", context.run_directory, purge_step=purge)
        if resumed is None:
            self.log(0, {"parameters": _table(context.parameters)})

    def close(self, status: RunStatus, summary: Mapping[str, float]) -> None:
        """See `Tracker.close`."""
        self.log(self._last, {"summary": _table({"status": status, **summary})})
        self.finish()


def _table(values: Mapping[str, Any]) -> Any:
    """Markdown, which TensorBoard shows as a table."""
    rows = [f"| {name} | {value} |" for name, value in values.items()]
    return "\n".join(["| name | value |", "|---|---|", *rows])


class WeightsAndBiases(_Service, tracking.WandBTracker):
    """One run of Weights & Biases; its files are under ``<run directory>/wandb``."""

    def __init__(self, context: TrackerContext) -> None:
        refuse(self.name, wandb_login(context.options, os.environ))
        import wandb

        options = context.options.model_dump()
        project = options.pop("project") or os.environ.get("WANDB_PROJECT") or "anygauge"
        mode = options.pop("mode") or os.environ.get("WANDB_MODE") or "online"
        known = kept_id(context, self.name)
        identity = known or secrets.token_hex(4)
        self.open(
            context,
            project,
            **{**options, "name": options["name"] or context.run_name},
            mode=mode,
            id=identity,
            # Offline there is no server to ask; `wandb sync` joins the parts by their id.
            resume="allow" if known and mode == "online" else None,
            dir=str(context.run_directory),
            config=dict(context.parameters),
            settings=wandb.Settings(
                console="off",
                silent=True,
                login_timeout=_PROMPT_S,
                finish_timeout=_SEND_S,
                finish_timeout_raises=True,
            ),
        )
        keep_id(context, self.name, identity)
        # A resumed run repeats steps, which wandb's own step counter would refuse.
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        tracking.WandBTracker.log(self, {"step": step, **metrics})

    def close(self, status: RunStatus, summary: Mapping[str, float]) -> None:
        """See `Tracker.close`."""
        self.run.summary.update({"status": status, **summary})
        self.run.finish(exit_code=1 if status == "failed" else 0)


class MLflow(_Service, tracking.MLflowTracker):
    """One run of MLflow."""

    def __init__(self, context: TrackerContext) -> None:
        refuse(self.name, mlflow_store(context.options, os.environ))
        import mlflow

        options = context.options
        mlflow.set_tracking_uri(options.tracking_uri or os.environ["MLFLOW_TRACKING_URI"])
        self._context = context
        self.open(context)

    def start(self) -> None:
        """Resume the run, or make one: without the tags that accelerate's would add, of whoever
        runs it and of the folder and commit that it runs from.
        """
        import mlflow

        context, options = self._context, self._context.options
        known = kept_id(context, self.name)
        if known is not None:
            mlflow.start_run(run_id=known)
            return
        client = mlflow.MlflowClient()
        name = options.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "anygauge"
        found = client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else client.create_experiment(name)
        run = client.create_run(experiment, run_name=options.name or context.run_name)
        keep_id(context, self.name, run.info.run_id)
        mlflow.start_run(run_id=run.info.run_id)
        values = {n: str(v)[:_LONGEST_VALUE] for n, v in context.parameters.items()}
        self.store_init_configuration(values)

    def end(self, status: RunStatus) -> None:
        """End the run with how it ended."""
        import mlflow

        mlflow.end_run(_MLFLOW_STATUS[status])


class Trackio(_Service, tracking.TrackioTracker):
    """One run of Trackio, which knows it by its name."""

    def __init__(self, context: TrackerContext) -> None:
        options = _given(context, name=context.run_name)
        resume = "never" if context.resumed_from_step is None else "allow"
        quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        self.open(context, options.pop("project"), **options, resume=resume, **quiet)
        self.store_init_configuration(dict(context.parameters))


class SwanLab(_Service, tracking.SwanLabTracker):
    """One run of SwanLab; its files are under ``<run directory>/swanlab``."""

    def __init__(self, context: TrackerContext) -> None:
        options = _given(context, name=context.run_name)
        identity = kept_id(context, self.name) or secrets.token_hex(11)[:21]
        folder = str(context.run_directory / "swanlab")
        project = options.pop("project")
        self.open(context, project, **options, id=identity, resume="allow", log_dir=folder)
        keep_id(context, self.name, identity)
        self.store_init_configuration(dict(context.parameters))


class Comet(_Service, tracking.CometMLTracker):
    """One experiment of Comet; offline it is under ``<run directory>/comet``."""

    def __init__(self, context: TrackerContext) -> None:
        from comet_ml import ExperimentConfig

        options = _given(context, name=context.run_name)
        key = kept_id(context, self.name) or secrets.token_hex(16)
        config = ExperimentConfig(
            name=options.pop("name"),
            tags=options.pop("tags", None),
            offline_directory=str(context.run_directory / "comet"),
            # Only what a run sends to all of its trackers.
            **dict.fromkeys(
                ("log_code", "log_git_patch", "parse_args", "auto_output_logging"), False
            ),
        )
        more = {"experiment_key": key, "mode": "get_or_create", "experiment_config": config}
        self.open(context, options.pop("project_name"), **options, **more)
        keep_id(context, self.name, key)
        self.store_init_configuration(dict(context.parameters))


class Aim(_Service, tracking.AimTracker):
    """One run of Aim."""

    def __init__(self, context: TrackerContext) -> None:
        from aim import Repo

        options = _given(context, name=context.run_name)
        repo = options.pop("repo", None)
        if repo is None:
            repo = str(context.run_directory / "aim")
            Repo.from_path(repo, init=True)
        known = kept_id(context, self.name)
        quiet = {"system_tracking_interval": None, "capture_terminal_logs": False}
        self.open(
            context,
            options.pop("name"),
            repo,
            **options,
            run_hash=known,
            force_resume=known is not None,
            **quiet,
        )
        keep_id(context, self.name, self.writer.hash)
        self.store_init_configuration(dict(context.parameters))


class ClearML(_Service, tracking.ClearMLTracker):
    """One task of ClearML."""

    def __init__(self, context: TrackerContext) -> None:
        options = _given(
            context,
            project_name=os.environ.get("CLEARML_PROJECT", "anygauge"),
            task_name=os.environ.get("CLEARML_TASK", context.run_name),
        )
        known = kept_id(context, self.name)
        again = {"reuse_last_task_id": False} if known is None else {"continue_last_task": known}
        watched = ("arg_parser", "frameworks", "streams")
        quiet = {"auto_resource_monitoring": False, **{f"auto_connect_{n}": False for n in watched}}
        self.open(context, **options, **again, **quiet)
        keep_id(context, self.name, self.task.id)
        self.store_init_configuration(dict(context.parameters))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`; ``train_`` and ``eval_`` are what makes series of one diagram."""
        super().log(step, {name.replace("/", "_", 1): value for name, value in metrics.items()})


class DVCLive(_Service, tracking.DVCLiveTracker):
    """Files of DVCLive."""

    def __init__(self, context: TrackerContext) -> None:
        options = _given(context, dir=str(context.run_directory / "dvclive"))
        resume = context.resumed_from_step is not None
        self.open(context, **options, resume=resume, dvcyaml=f"{options['dir']}/dvc.yaml")
        if not resume:
            self.store_init_configuration(dict(context.parameters))


def _given(context: TrackerContext, **usual: str) -> dict[str, Any]:
    """The options that the run file sets, over the usual ones."""
    return {**usual, **context.options.model_dump(exclude_none=True)}


def refuse(name: str, reason: str | None) -> None:
    """Raises: NotAvailableError: there is a reason."""
    if reason is not None:
        raise NotAvailableError(f"tracker {name!r}: {reason}")


def kept_id(context: TrackerContext, name: str) -> str | None:
    """The id that a tracker gave to the run; None where there is none yet, or the file is damaged.

    It is kept in the run directory, for when the run is resumed.
    """
    try:
        value = json.loads(_id_file(context, name).read_text(encoding="utf-8"))["id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return value if isinstance(value, str) and value else None


def keep_id(context: TrackerContext, name: str, value: str) -> None:
    """Keep it."""
    write_text(_id_file(context, name), json.dumps({"id": value}) + "\n")


def _id_file(context: TrackerContext, name: str) -> Path:
    return context.run_directory / f"{name}-run.json"
