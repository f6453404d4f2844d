"""Weights & Biases, online or offline; a resumed run goes on in the same run."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

from anygauge.interface import NotAvailableError, RunStatus, TrackerContext
from anygauge.training.trackers.kept import KeptId
from anygauge.training.trackers.ready import wandb_login

SEND_S = 25.0
"""Seconds to send what is left at the end; the data stays on disk for `wandb sync`."""
PROMPT_S = 5.0
"""An invalid key must not end in a question that nobody answers."""


class WeightsAndBiases:
    """One run of Weights & Biases; its files are under ``<run directory>/wandb``."""

    def __init__(self, context: TrackerContext) -> None:
        reason = wandb_login(context.options, os.environ)
        if reason is not None:
            raise NotAvailableError(f"tracker 'wandb': {reason}")
        import wandb

        options = dict(context.options)
        kept = KeptId(context.run_directory, "wandb")
        known = kept.read()
        identity = known or secrets.token_hex(4)
        mode: Any = options.get("mode") or os.environ.get("WANDB_MODE") or "online"
        self._run = wandb.init(
            project=options.get("project") or os.environ.get("WANDB_PROJECT") or "anygauge",
            entity=options.get("entity"),
            name=options.get("name", context.run_name),
            group=options.get("group"),
            notes=options.get("notes"),
            tags=options.get("tags"),
            mode=mode,
            id=identity,
            # Offline there is nobody to ask; the id alone joins the parts when they are sent.
            resume="allow" if known and mode == "online" else None,
            dir=str(context.run_directory),
            config=dict(context.parameters),
            settings=wandb.Settings(
                console="off",
                silent=True,
                login_timeout=PROMPT_S,
                finish_timeout=SEND_S,
                finish_timeout_raises=True,
            ),
        )
        kept.write(identity)
        # A resumed run repeats steps, which the service's own counter would refuse.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._run.log({"step": step, **metrics})

    def close(self, status: RunStatus, summary: Mapping[str, float]) -> None:
        """See `Tracker.close`."""
        self._run.summary.update({"status": status, **summary})
        self._run.finish(exit_code=1 if status == "failed" else 0)
