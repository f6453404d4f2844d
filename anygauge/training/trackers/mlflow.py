"""MLflow, on a server or in a local store; a resumed run goes on in the same run."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from itertools import islice
from typing import Any

from anygauge.interface import NotAvailableError, RunStatus, TrackerContext
from anygauge.training.trackers.kept import KeptId
from anygauge.training.trackers.ready import mlflow_store

STATUS: Mapping[RunStatus, str] = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
MOST_PARAMETERS = 100
"""That one request may carry (MLflow's REST API, runs/log-batch)."""
LONGEST_VALUE = 500
"""Characters of a parameter that servers of all versions take."""


class MLflow:
    """One run of MLflow. Summary values are metrics named ``summary/...``."""

    def __init__(self, context: TrackerContext) -> None:
        reason = mlflow_store(context.options, os.environ)
        if reason is not None:
            raise NotAvailableError(f"tracker 'mlflow': {reason}")
        from mlflow import MlflowClient

        options = context.options
        uri = options.get("tracking_uri") or os.environ["MLFLOW_TRACKING_URI"]
        self._client = MlflowClient(tracking_uri=uri)
        self._last = context.resumed_from_step or 0
        kept = KeptId(context.run_directory, "mlflow")
        known = kept.read()
        if known is not None:
            self._id = known
            self._client.update_run(self._id, status="RUNNING")
            return
        run = self._client.create_run(
            self._experiment(options), run_name=options.get("name", context.run_name)
        )
        self._id = run.info.run_id
        kept.write(self._id)
        self._log_parameters(context.parameters)

    def _experiment(self, options: Mapping[str, Any]) -> str:
        name = options.get("experiment") or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "anygauge"
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _log_parameters(self, parameters: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        left = iter(parameters.items())
        while part := list(islice(left, MOST_PARAMETERS)):
            params = [Param(name, str(value)[:LONGEST_VALUE]) for name, value in part]
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
        self._client.set_terminated(self._id, status=STATUS[status])
