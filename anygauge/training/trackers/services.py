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
from operator import attrgetter
from pathlib import Path
from typing import Any

from accelerate import tracking

from anygauge.interface import AnygaugeError, NotAvailableError, RunStatus, TrackerContext
from anygauge.training.trackers.tracker_options import mlflow_store, wandb_login
from anygauge.util.files import write_text
from anygauge.util.text import json_values

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
        """Warn as accelerate's logger does."""
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
        self._file.write(json.dumps(json_values(record)) + "\n")


class _Service:
    """Over one of accelerate's trackers, whose `log` has its arguments in another order.

    Attributes:
        known: what the service calls the run that this one resumes; None for a new one.
        id_at: where that is for the run that was started; empty where it needs no such name.
    """

    main_process_only = False
    id_at = ""
    name: str
    start: Callable[[], None]
    finish: Callable[[], None]
    store_init_configuration: Callable[[dict[str, Any]], None]

    def __init__(self, context: TrackerContext) -> None:
        self._last = context.resumed_from_step or 0
        self.context = context
        self.known = kept_id(context, self.name)
        given = context.options.model_dump(exclude_none=True)
        super().__init__(**{**self._arguments(context, given), **given})
        self.start()
        if self.id_at:
            keep_id(context, self.name, str(attrgetter(self.id_at)(self)))
        self._describe(dict(context.parameters))

    def _arguments(self, context: TrackerContext, given: dict[str, Any]) -> dict[str, Any]:
        """What accelerate's tracker is made with, beside the run file's options: `given`."""
        return {}

    def _describe(self, parameters: dict[str, Any]) -> None:
        """Send the run file."""
        self.store_init_configuration(parameters)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._last = step
        super().log(dict(metrics), step=step)  # type: ignore[misc]

    def close(self, status: RunStatus, summary: Mapping[str, float]) -> None:
        """See `Tracker.close`. Most services have no summaries: its values become metrics."""
        if summary:
            self.log(self._last, {f"summary/{name}": value for name, value in summary.items()})
        self._end(status)

    def _end(self, status: RunStatus) -> None:
        """The last call to the service."""
        self.finish()


class TensorBoard(_Service, tracking.TensorBoardTracker):
    """Event files under ``<run directory>/tensorboard``: scalars by step, the run file as text."""

    def _arguments(self, context: TrackerContext, given: dict[str, Any]) -> dict[str, Any]:
        """Steps after the checkpoint are trained, and logged, again."""
        resumed = context.resumed_from_step
        purge = None if resumed is None else resumed + 1
        folder = context.run_directory
        return {"run_name": "tensorboard", "logging_dir": folder, "purge_step": purge}

    def _describe(self, parameters: dict[str, Any]) -> None:
        """As a text: accelerate's way makes a second run of them."""
        if self.context.resumed_from_step is None:
            self.log(0, {"parameters": _table(parameters)})

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

    id_at = "run.id"

    def _arguments(self, context: TrackerContext, given: dict[str, Any]) -> dict[str, Any]:
        _refuse(self.name, wandb_login(context.options, os.environ))
        import wandb

        project = given.pop("project", None) or os.environ.get("WANDB_PROJECT") or "anygauge"
        mode = given.get("mode") or os.environ.get("WANDB_MODE") or "online"
        return {
            "run_name": project,
            "name": context.run_name,
            "mode": mode,
            "id": self.known or secrets.token_hex(4),
            # Offline there is no server to ask; `wandb sync` joins the parts by their id.
            "resume": "allow" if self.known and mode == "online" else None,
            "dir": str(context.run_directory),
            "config": dict(context.parameters),
            "settings": wandb.Settings(
                console="off",
                silent=True,
                login_timeout=_PROMPT_S,
                finish_timeout=_SEND_S,
                finish_timeout_raises=True,
            ),
        }

    def _describe(self, parameters: dict[str, Any]) -> None:
        """A resumed run repeats steps, which wandb's own step counter would refuse."""
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

    id_at = "active_run.info.run_id"

    def _arguments(self, context: TrackerContext, given: dict[str, Any]) -> dict[str, Any]:
        """None: `start` reads the options."""
        _refuse(self.name, mlflow_store(context.options, os.environ))
        given.clear()
        return {}

    def start(self) -> None:
        """Resume the run, or make one: without the tags that accelerate's would add, of whoever
        runs it and of the folder and commit that it runs from.
        """
        import mlflow

        options = self.context.options
        mlflow.set_tracking_uri(options.tracking_uri or os.environ["MLFLOW_TRACKING_URI"])
        client = mlflow.MlflowClient()
        identity = self.known
        if identity is None:
            name = options.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "anygauge"
            found = client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else client.create_experiment(name)
            named = options.name or self.context.run_name
            identity = client.create_run(experiment, run_name=named).info.run_id
        self.active_run = mlflow.start_run(run_id=identity)

    def _describe(self, parameters: dict[str, Any]) -> None:
        """Once: MLflow refuses another value."""
        if self.known is None:
            short = {name: str(value)[:_LONGEST_VALUE] for name, value in parameters.items()}
            self.store_init_configuration(short)

    def _end(self, status: RunStatus) -> None:
        """Send how the run ended."""
        import mlflow

        mlflow.end_run(_MLFLOW_STATUS[status])


class Trackio(_Service, tracking.TrackioTracker):
    """One run of Trackio, which knows it by its name."""

    def _arguments(self, context: TrackerContext, given: dict[str, Any]) -> dict[str, Any]:
        return {
            "run_name": given.pop("project", "anygauge"),
            "name": context.run_name,
            "resume": "never" if context.resumed_from_step is None else "allow",
            **_off("embed", "auto_log_cpu", "auto_log_gpu"),
        }


class SwanLab(_Service, tracking.SwanLabTracker):
    """One run of SwanLab; its files are under ``<run directory>/swanlab``."""

    id_at = "known"

    def _arguments(self, context: TrackerContext, given: dict[str, Any]) -> dict[str, Any]:
        self.known = self.known or secrets.token_hex(11)[:21]  # of this length
        return {
            "run_name": given.pop("project", "anygauge"),
            "name": context.run_name,
            "id": self.known,
            "resume": "allow",
            "log_dir": str(context.run_directory / "swanlab"),
        }


class Comet(_Service, tracking.CometMLTracker):
    """One experiment of Comet; offline it is under ``<run directory>/comet``."""

    id_at = "writer.id"

    def _arguments(self, context: TrackerContext, given: dict[str, Any]) -> dict[str, Any]:
        from comet_ml import ExperimentConfig

        return {
            "run_name": given.pop("project_name", "anygauge"),
            "experiment_key": self.known or secrets.token_hex(16),
            "mode": "get_or_create",
            "experiment_config": ExperimentConfig(
                name=context.run_name,
                offline_directory=str(context.run_directory / "comet"),
                **_off("log_code", "log_git_patch", "parse_args", "auto_output_logging"),
            ),
        }


class Aim(_Service, tracking.AimTracker):
    """One run of Aim; without an option ``repo`` it is under ``<run directory>/aim``."""

    id_at = "writer.hash"

    def _arguments(self, context: TrackerContext, given: dict[str, Any]) -> dict[str, Any]:
        from aim import Repo

        repo = given.pop("repo", None) or str(context.run_directory / "aim")
        if "://" not in repo:
            Repo.from_path(repo, init=True)
        return {
            "run_name": context.run_name,
            "logging_dir": repo,
            "experiment": "anygauge",
            "run_hash": self.known,
            "force_resume": self.known is not None,
            "system_tracking_interval": None,
            **_off("capture_terminal_logs"),
        }


class ClearML(_Service, tracking.ClearMLTracker):
    """One task of ClearML."""

    id_at = "task.id"

    def _arguments(self, context: TrackerContext, given: dict[str, Any]) -> dict[str, Any]:
        again: dict[str, Any] = {"reuse_last_task_id": False}
        if self.known is not None:
            again = {"continue_last_task": self.known}
        return {
            "project_name": os.environ.get("CLEARML_PROJECT", "anygauge"),
            "task_name": os.environ.get("CLEARML_TASK", context.run_name),
            **again,
            **_off("auto_resource_monitoring"),
            **_off(*(f"auto_connect_{name}" for name in ("arg_parser", "frameworks", "streams"))),
        }

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`; ``train_`` and ``eval_`` are what makes series of one diagram."""
        super().log(step, {name.replace("/", "_", 1): value for name, value in metrics.items()})


class DVCLive(_Service, tracking.DVCLiveTracker):
    """Files of DVCLive, under ``<run directory>/dvclive`` without an option ``dir``."""

    def _arguments(self, context: TrackerContext, given: dict[str, Any]) -> dict[str, Any]:
        """Of `dvclive.Live`; nothing is committed unless the run file says so."""
        folder = given.setdefault("dir", str(context.run_directory / "dvclive"))
        resume = context.resumed_from_step is not None
        return {"resume": resume, "dvcyaml": f"{folder}/dvc.yaml", **_off("save_dvc_exp")}


def _off(*names: str) -> dict[str, bool]:
    """What a service would collect by itself, beside what a run sends to all of its trackers."""
    return dict.fromkeys(names, False)


def _refuse(name: str, reason: str | None) -> None:
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
