"""Forked ranks of which the last makes a loss or a gradient non-finite in one step.

The device is one that works ahead: a step's numbers are read when the next one was given to it.
However a run ends, rank 0 writes what was trained into the run's folder.
"""

from __future__ import annotations

import os
import time
from typing import Any
from unittest import mock

import safetensors.torch
import torch

from tests.helpers import forked

TRAINED = "trained.safetensors"
BAD_STEP, MICRO_BATCHES = 3, 2
"""The step, from 1, and the micro-batches of a rank in each."""


class HostEvent:
    """A moment of a device that has done everything at once."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        assert self.at

    def elapsed_time(self, later: HostEvent) -> float:
        return (later.at - self.at) * 1e3


class Spoiled:
    """The model's loss, of which a gradient or the value is not finite in the last micro-batch of
    one step on the last rank."""

    def __init__(self, loss_function: Any) -> None:
        self._loss_function = loss_function
        self._calls = 0

    def __call__(self, outputs: Any) -> torch.Tensor:
        loss: torch.Tensor = self._loss_function(outputs)
        self._calls += torch.is_grad_enabled() and not loss.is_meta
        last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
        spoil = os.environ.get("SPOIL")
        if not (last and spoil and self._calls == BAD_STEP * MICRO_BATCHES):
            return loss
        if spoil == "loss":
            return loss + torch.inf  # its gradient is 1
        # The gradient of a sum is given to both: the loss stays what it is.
        nothing = torch.zeros_like(loss, requires_grad=True)
        loss.register_hook(lambda gradient: gradient * torch.nan)
        return loss + nothing


def noted(run: Any) -> Any:
    def running(self: Any) -> Any:
        try:
            return run(self)
        finally:
            trained = dict(self.engine.export_trained())
            if os.environ["RANK"] == "0":
                folder = self.checkpoints.run_directory
                safetensors.torch.save_file(
                    {name: value.contiguous() for name, value in trained.items()}, folder / TRAINED
                )

    return running


def prepared(prepare_run: Any) -> Any:
    """The run's name says what is spoiled: the processes of all runs have one environment."""

    def preparing(job: Any, run: Any, *args: Any) -> Any:
        os.environ["SPOIL"] = next((w for w in ("loss", "gradient") if run.name.endswith(w)), "")
        return prepare_run(job, run, *args)

    return preparing


if __name__ == "__main__":
    from anygauge.training import setup
    from anygauge.training.loop import Loop
    from anygauge_cpu.placement import CpuPlacement

    with (
        mock.patch.object(setup, "prepare_run", prepared(setup.prepare_run)),
        mock.patch.object(setup, "model_loss", Spoiled(setup.model_loss)),
        mock.patch.object(Loop, "run", noted(Loop.run)),
        mock.patch.object(CpuPlacement, "works_ahead", True),
        mock.patch.object(CpuPlacement, "event", lambda self: HostEvent()),
    ):
        forked.main()
