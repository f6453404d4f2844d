"""The trackers that come with anygauge: TensorBoard, JSON lines, Weights & Biases, MLflow.

A resumed run continues in the same run of its tracker. `wandb_login` and `mlflow_store` find before
ranks start what a tracker would otherwise ask for on a terminal. Torch is imported on use.
"""

from __future__ import annotations

import json
import netrc
import os
import secrets
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from anygauge.interface import (
    AnygaugeError,
    NotAvailableError,
    Options,
    RunStatus,
    TrackerContext,
)
from anygauge.util.files import write_text
from anygauge.util.text import finite

_WANDB_SERVER = "https://api.wandb.ai"
_SEND_S = 25.0
"""Seconds that wandb has to send the rest at the end; the data stays on disk for `wandb sync`."""
_PROMPT_S = 5.0
"""Seconds that wandb waits for an answer on the terminal when a key is invalid."""
_MLFLOW_STATUS: Mapping[RunStatus, str] = {
    "finished": "FINISHED",
    "failed": "FAILED",
    "stopped": "KILLED",
}
_MOST_PARAMETERS = 100
"""Parameters that one request to MLflow may carry (its REST API, runs/log-batch)."""
_LONGEST_VALUE = 500
"""Characters of a parameter that MLflow servers of all versions accept."""


Text = Annotated[str, Field(min_length=1)]


class JsonLinesOptions(Options):
    """Options of the tracker jsonl."""

    path: Text = Field(description="File to append to; a relative path is in the run directory.")


class WandbOptions(Options):
    """Options of the tracker wandb."""

    project: Text | None = Field(None, description="Left out: WANDB_PROJECT, or anygauge.")
    entity: Text | None = Field(None, description="User or team.")
    name: Text | None = Field(None, description="Left out: the run's name.")
    group: Text | None = Field(None, description="Group of runs.")
    notes: Text | None = Field(None, description="Longer description.")
    tags: list[str] | None = Field(None, description="Labels.")
    mode: Literal["online", "offline"] | None = Field(
        None,
        description="online, or offline to send the run later with `wandb sync`. Left out: "
        "WANDB_MODE, or online.",
    )


class MLflowOptions(Options):
    """Options of the tracker mlflow."""

    tracking_uri: Text | None = Field(
        None, description="Server or store. Left out: MLFLOW_TRACKING_URI."
    )
    experiment: Text | None = Field(
        None,
        description="Created if missing. Left out: MLFLOW_EXPERIMENT_NAME, or anygauge.",
    )
    name: Text | None = Field(None, description="Left out: the run's name.")


class TensorBoard:
    """Event files under ``<run directory>/tensorboard``: scalars by step, the run file as text."""

    def __init__(self, context: TrackerContext) -> None:
        from torch.utils.tensorboard import SummaryWriter

        resumed = context.resumed_from_step
        self._last = resumed or 0
        self._writer = SummaryWriter(
            log_dir=str(context.run_directory / "tensorboard"),
            # Steps after the checkpoint are trained, and logged, again.
            purge_step=None if resumed is None else resumed + 1,
        )
        if resumed is None:
            self._writer.add_text("parameters", _table(context.parameters), 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._last = step
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self, status: RunStatus, summary: Mapping[str, float]) -> None:
        """See `Tracker.close`."""
        self._writer.add_text("summary", _table({"status": status, **summary}), self._last)
        self._writer.close()


def _table(values: Mapping[str, Any]) -> str:
    """Markdown, which TensorBoard shows as a table."""
    rows = [f"| {name} | {value} |" for name, value in values.items()]
    return "\n".join(["| name | value |", "|---|---|", *rows])


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


class WeightsAndBiases:
    """One run of Weights & Biases; its files are under ``<run directory>/wandb``."""

    def __init__(self, context: TrackerContext) -> None:
        reason = wandb_login(context.options, os.environ)
        if reason is not None:
            raise NotAvailableError(f"tracker 'wandb': {reason}")
        import wandb

        options = context.options
        kept = context.run_directory / "wandb-run.json"
        known = kept_id(kept)
        identity = known or secrets.token_hex(4)
        mode: Any = options.mode or os.environ.get("WANDB_MODE") or "online"
        self._run = wandb.init(
            project=options.project or os.environ.get("WANDB_PROJECT") or "anygauge",
            entity=options.entity,
            name=options.name or context.run_name,
            group=options.group,
            notes=options.notes,
            tags=options.tags,
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
        keep_id(kept, identity)
        # A resumed run repeats steps, which wandb's own step counter would refuse.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._run.log({"step": step, **metrics})

    def close(self, status: RunStatus, summary: Mapping[str, float]) -> None:
        """See `Tracker.close`."""
        self._run.summary.update({"status": status, **summary})
        self._run.finish(exit_code=1 if status == "failed" else 0)


class MLflow:
    """One run of MLflow. Summary values are metrics named ``summary/...``."""

    def __init__(self, context: TrackerContext) -> None:
        reason = mlflow_store(context.options, os.environ)
        if reason is not None:
            raise NotAvailableError(f"tracker 'mlflow': {reason}")
        from mlflow import MlflowClient

        options = context.options
        uri = options.tracking_uri or os.environ["MLFLOW_TRACKING_URI"]
        self._client = MlflowClient(tracking_uri=uri)
        self._last = context.resumed_from_step or 0
        kept = context.run_directory / "mlflow-run.json"
        known = kept_id(kept)
        if known is not None:
            self._id = known
            self._client.update_run(self._id, status="RUNNING")
            return
        run = self._client.create_run(
            self._experiment(options), run_name=options.name or context.run_name
        )
        self._id = run.info.run_id
        keep_id(kept, self._id)
        self._log_parameters(context.parameters)

    def _experiment(self, options: MLflowOptions) -> str:
        name = options.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "anygauge"
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _log_parameters(self, parameters: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        left = iter(parameters.items())
        while part := list(islice(left, _MOST_PARAMETERS)):
            params = [Param(name, str(value)[:_LONGEST_VALUE]) for name, value in part]
            self._client.log_batch(self._id, params=params)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        from mlflow.entities import Metric

        self._last = step
        now = int(time.time() * 1000)
        entries = [Metric(name, float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=entries)

    def close(self, status: RunStatus, summary: Mapping[str, float]) -> None:
        """See `Tracker.close`."""
        if summary:
            self.log(self._last, {f"summary/{name}": value for name, value in summary.items()})
        self._client.set_terminated(self._id, status=_MLFLOW_STATUS[status])


def kept_id(path: Path) -> str | None:
    """The id that a tracker gave to the run; None where there is none yet, or the file is damaged.

    It is kept in the run directory, for when the run is resumed.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))["id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return value if isinstance(value, str) and value else None


def keep_id(path: Path, value: str) -> None:
    """Keep it."""
    write_text(path, json.dumps({"id": value}) + "\n")


def wandb_login(options: WandbOptions, environ: Mapping[str, str]) -> str | None:
    """Why Weights & Biases would ask for a login; None with a key, or where nothing is sent."""
    mode = options.mode or environ.get("WANDB_MODE") or "online"
    if mode != "online":
        return None
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return None
    server = urlsplit(environ.get("WANDB_BASE_URL") or _WANDB_SERVER).hostname
    if any(host == server or "wandb" in host for host in _netrc_hosts(environ)):
        return None
    return (
        f"not logged in to {server}: run `wandb login`, set WANDB_API_KEY, or set "
        "tracker_options.wandb.mode: offline and send the run later with `wandb sync`"
    )


def mlflow_store(options: MLflowOptions, environ: Mapping[str, str]) -> str | None:
    """Why MLflow would not know where to write; None where it would."""
    if options.tracking_uri or environ.get("MLFLOW_TRACKING_URI"):
        return None
    return (
        "no server or store is set: set tracker_options.mlflow.tracking_uri or "
        "MLFLOW_TRACKING_URI, such as http://host:5000"
    )


def _netrc_hosts(environ: Mapping[str, str]) -> set[str]:
    home = Path(environ.get("HOME") or Path.home())
    named = environ.get("NETRC")
    for path in [Path(named)] if named else [home / ".netrc", home / "_netrc"]:
        try:
            return set(netrc.netrc(str(path)).hosts)
        except (OSError, netrc.NetrcParseError):
            continue
    return set()
