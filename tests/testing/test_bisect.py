"""The search for a cause: bounds that hold for what is sound, and the first thing that is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from anygauge.testing import bisect, loop_checks
from anygauge.testing.bisect import Replay
from anygauge.testing.check import sharding_spec
from anygauge.testing.loop_checks import (
    EVALUATION,
    LOSS,
    NORM,
    LoopTrials,
    RunFailed,
    TrainRun,
    compare_runs,
)
from anygauge.testing.process import Subject


class MixedBlock(nn.Module):
    """Something of everything: products, a norm, softmax, look-ups, recomputation."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 32)
        self.inner = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 32))
        self.norm = nn.LayerNorm(32)
        self.drop = nn.Hardtanh()
        self.to(dtype)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.embedding(rows)
        self.drop(x.detach())  # makes no node: the look-up's must not be taken for its own
        x = x + torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        scores = (x @ x.transpose(1, 2) / 32).softmax(-1)
        return self.norm(scores @ x).float().pow(2).sum(-1).log().mean()


class WrongOperation(TorchDispatchMode):
    """One operation of the "device", which here is the host, gives something else."""

    def __init__(self, name: str, change: Any, calls: int = 1) -> None:
        super().__init__()
        self._name, self._change, self._calls = name, change, calls
        self._replayed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ != self._name or args[0].dtype is torch.float64:
            return result
        self._replayed += 1
        # The host repeats each of them once in the same type, which stays right.
        return self._change(result) if self._replayed % 2 else result


def trained(dtype: torch.dtype, wrong: TorchDispatchMode | None = None) -> tuple[Replay, str]:
    """A step of the block, repeated: (what was found, where)."""
    model = MixedBlock(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = torch.arange(2 * 7).view(2, 7) % 11
    if wrong is not None:
        wrong.__enter__()
    try:
        with Replay("cpu") as replay:
            model(rows).backward()
            optimizer.step()
    finally:
        if wrong is not None:
            wrong.__exit__(None, None, None)
    return replay, replay.found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sound_operations_are_within_their_bounds(dtype: torch.dtype) -> None:
    replay, found = trained(dtype)
    assert found == ""
    assert replay.compared > 100
    assert not replay.unknown


@pytest.mark.parametrize(
    ("operation", "found"),
    [
        ("_softmax", "aten::_softmax (float32, 2 x 7 x 7)"),
        ("_softmax_backward_data", "aten::_softmax_backward_data (float32, 2 x 7 x 7)"),
        ("silu", "aten::silu (float32, 2 x 7 x 48)"),
        ("silu_backward", "aten::silu_backward (float32, 2 x 7 x 48)"),
        ("embedding_dense_backward", "aten::embedding_dense_backward (float32, 2 x 7 x 32)"),
        ("addmm", "aten::addmm (float32, "),
    ],
)
def test_the_first_wrong_operation_is_named(operation: str, found: str) -> None:
    _, said = trained(torch.float32, WrongOperation(operation, lambda result: result * (1 + 1e-4)))
    assert said.startswith(found)


# -- the search ------------------------------------------------------------------------------------


def test_a_search_that_fails_says_so(tmp_path: Path) -> None:
    nowhere = tmp_path / "run"
    said = bisect.cause_of(Subject(name="cpu"), tmp_path, nowhere, 1, ranks=1)
    assert said.startswith(f"{bisect.NOT_FOUND}: the process ended with status 1: ")
    assert str(nowhere) in said
    said = bisect.cause_of(Subject(name="nobody"), tmp_path, nowhere, 1, ranks=1)
    assert said.startswith(bisect.NOT_FOUND)
    assert "nobody" in said


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_fails_in_training_has_a_cause(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = RunFailed("it ended with status 1", tmp_path)

    def made(
        self: LoopTrials, kind: str, dtype: str = "", *, host: bool = False, **_: Any
    ) -> TrainRun:
        if not host:
            raise failed
        return run([6.0], {})

    monkeypatch.setattr(LoopTrials, "run", made)
    monkeypatch.setattr(loop_checks, "cause_of", lambda *at, **of: f"{at[2]} on {of['ranks']}")
    kind, spec = ("adapter", None) if ranks == 1 else ("spread", sharding_spec())
    of = LoopTrials(Subject(name="cpu"), tmp_path)
    assert of.trial(kind, spec=spec, ranks=ranks) == str(failed), "it has not come to a step"
    (tmp_path / "run.json").touch()
    wanted = f"it ended with status 1; {tmp_path} on {ranks}"
    assert of.trial(kind, spec=spec, ranks=ranks) == wanted


# -- how far losses may be ------------------------------------------------------------------------


def run(losses: list[float], evaluations: dict[int, float], first: int = 1) -> TrainRun:
    steps: list[dict[str, Any]] = [
        {"step": at, "loss": loss, "num_loss_tokens": 80, "lr": 2e-3, "grad_norm": 6.0}
        for at, loss in enumerate(losses, start=first)
    ]
    held_out = [
        {"step": done, "eval_loss": loss, "eval_tokens": 200} for done, loss in evaluations.items()
    ]
    records = sorted([*steps, *held_out], key=lambda each: (each["step"], "eval_loss" in each))
    other = {"cpu_percent": 3.0}  # of how busy the machine is, and of no step
    return TrainRun(folder=Path(), metrics=json.loads(json.dumps([other, *records])))


def test_what_an_author_states_stands_for_losses_and_raises_norms(tmp_path: Path) -> None:
    def allowed(stated: dict[str, float], **of: Any) -> dict[str, float]:
        return LoopTrials(Subject(name="cpu"), tmp_path, stated).tolerances("float32", **of)

    usual, exact, loose = allowed({}), allowed({"float32": 0.0}), allowed({"float32": 1e-3})
    assert usual[NORM] == 10 * usual[LOSS] == 10 * usual[EVALUATION]
    assert exact[LOSS] == exact[EVALUATION] == 0.0
    assert exact[NORM] == usual[NORM], "norms are never lower than what is usual"
    assert (loose[LOSS], loose[NORM]) == (1e-3, 1e-2)
    assert allowed({"float32": 0.0}, tolerance=0.0) == usual, "sums of ranks have another order"
    assert allowed({}, tolerance=1e-3) == loose
    assert allowed({"bfloat16": 0.0}) == usual


def test_the_first_number_beyond_its_bound_is_told() -> None:
    host = run([6.0, 5.0, 4.0], {0: 6.5, 2: 5.5})
    bounds = {NORM: 1e-2, LOSS: 1e-3, EVALUATION: 1e-3}
    # Resumed after a step.
    most, step, wrong = compare_runs(run([5.001, 4.0], {2: 5.6}, 2), host, bounds)
    assert (step, wrong) == (
        2,
        "the loss of the evaluation after step 2 is 5.6, on the host 5.5: 1.8e-02 away, 1.0e-03 "
        "is allowed",
    )
    assert most == {LOSS: pytest.approx(2e-4), NORM: 0.0, EVALUATION: pytest.approx(0.1 / 5.5)}
    assert compare_runs(run([5.001, 4.0], {}, 2), host, bounds)[-1] == ""
    _, step, wrong = compare_runs(run([6.0, float("nan"), 4.0], {}), host, bounds)
    assert step == 2 and wrong.startswith("the loss of step 2 is nan")
    for short in (run([6.0, 5.0], {}), run([], {})):
        with pytest.raises(AssertionError, match=r"it trained steps .*, not \[1, 2, 3\]"):
            compare_runs(short, host, bounds)
