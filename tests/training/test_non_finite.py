"""What is not finite in one rank: no weight changes, the rows are named, all ranks end together."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from anygauge.interface import NonFiniteLossError
from anygauge.strategies.zero.deepspeed_versions import skips_non_finite
from tests.helpers.forked import RunPart, runs_of
from tests.helpers.runs import Run, run_file

BF16 = {"param_dtype": "bfloat16"}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def name_of(value: Any) -> str:
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)


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
                save_file(
                    {name: value.contiguous() for name, value in trained.items()}, folder / TRAINED
                )

    return running


def prepared(prepare_run: Any) -> Any:
    """The run's name says what is spoiled: the processes of all runs have one environment."""

    def preparing(job: Any, run: Any, *args: Any) -> Any:
        os.environ["SPOIL"] = next((w for w in ("loss", "gradient") if run.name.endswith(w)), "")
        return prepare_run(job, run, *args)

    return preparing


@contextlib.contextmanager
def spoiled() -> Iterator[None]:
    """The last rank makes a loss or a gradient non-finite in one step.

    The device is one that works ahead: a step's numbers are read when the next one was given to it.
    However a run ends, rank 0 writes what was trained into the run's folder.
    """
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
        yield


def train(folder: Path, ranks: int, strategy: dict[str, Any], more: dict[str, Any]) -> list[Run]:
    """The steps before the bad one alone; then with a bad gradient, and a bad loss."""
    files = []
    for name, steps in (("good", BAD_STEP - 1), ("bad-gradient", 6), ("bad-loss", 6)):
        fields = {
            "steps": steps,
            "micro_batch_size": 2,
            "global_batch_size": 4 * (1 if {"tp", "cp", "pp"} & set(strategy) else ranks),
            "schedule": {"name": "constant", "warmup_ratio": 0.0},
            **more.get("train", {}),
        }
        rest = {key: value for key, value in more.items() if key != "train"}
        files.append(
            run_file(
                folder,
                name=name,
                strategy=strategy,
                launch={"devices": ranks},
                train=fields,
                **rest,
            )
        )
    return runs_of([RunPart(file=str(file)) for file in files], within=spoiled)


@pytest.mark.parametrize(
    ("ranks", "strategy", "more"),
    [
        (1, {"name": "single"}, {}),
        (2, {"name": "ddp"}, {}),
        (2, {"name": "zero", "stage": 3}, {"precision": BF16}),
        slow(1, {"name": "single"}, {"precision": BF16, "adapter": None}),
        *(
            slow(1, {"name": "single"}, {"train": {"optimizer": {"name": name, "lr": 1e-3}}})
            for name in ("lion", "sgd", "adafactor")
        ),
        slow(2, {"name": "ddp", "tp": 2}, {}),
        slow(2, {"name": "ddp", "cp": 2}, {}),
        slow(2, {"name": "ddp", "pp": 2}, {}),
        slow(2, {"name": "fsdp"}, {"precision": BF16}),
        slow(2, {"name": "fsdp"}, {"adapter": None}),
        slow(2, {"name": "fsdp", "offload": "both"}, {}),
        slow(2, {"name": "zero", "stage": 0}, {}),
        slow(
            2, {"name": "zero", "stage": 0}, {"precision": {**BF16, "reduce_dtype": "param_dtype"}}
        ),
        slow(2, {"name": "zero", "stage": 1}, {}),
        slow(2, {"name": "zero", "stage": 1}, {"precision": BF16}),
        slow(2, {"name": "zero", "stage": 2}, {}),
        slow(2, {"name": "zero", "stage": 2}, {"precision": BF16}),
        slow(2, {"name": "zero", "stage": 3}, {}),
        slow(2, {"name": "zero", "stage": 3, "offload": "optimizer"}, {"precision": BF16}),
    ],
    ids=name_of,
)
def test_no_weight_changes_and_the_rows_are_named(
    ranks: int, strategy: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    if strategy.get("stage") == 0 and "precision" in more and not skips_non_finite():
        pytest.skip("DeepSpeed 0.16.9 has no stage 0 in bfloat16")
    good, *bad = train(tmp_path, ranks, strategy, more)
    assert good.status == 0, good.err
    wanted = load_file(good.folder / TRAINED)
    for run, what in zip(bad, ("the gradient's norm became", "the loss became inf"), strict=True):
        assert run.status == NonFiniteLossError.exit_status, run.err
        events = [json.loads(line) for line in run.out.splitlines()]
        failures = [each for each in events if each["event"] == "failed"]
        assert len(failures) == ranks, "all ranks end by themselves"
        for failure in failures:
            assert failure["error"] == "NonFiniteLossError", failure
            assert failure["message"].startswith(f"{what}"), failure
            assert f"at step {BAD_STEP}, with rows " in failure["message"]
            assert "rows.jsonl:" in failure["message"]
        assert len({failure["message"] for failure in failures}) == 1
        assert len(run.steps("loss")) == BAD_STEP - 1, "a bad step is no metric"
        assert run.steps("loss") == good.steps("loss")
        found = load_file(run.folder / TRAINED)
        assert found.keys() == wanted.keys()
        changed = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
        assert not changed, f"{len(changed)} of {len(wanted)} tensors have changed"
