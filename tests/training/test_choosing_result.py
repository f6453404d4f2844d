"""Which step's weights a run saves, and when it ends by its evaluations.

Also after a resume, and on several ranks, it is what an undisturbed run comes to.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.sections import EarlyStoppingSection
from anygauge.interface import RunFileError
from anygauge.training.checkpoints.manager import REQUEST
from anygauge.training.evaluation import early_stop
from tests.helpers.forked import RunPart, finished, runs_of
from tests.helpers.runs import FIXTURES, Run, run_file, trained_here

SINGLE = {"strategy": {"name": "single"}}
LIMIT = 24


def rows(folder: Path, name: str, begin: int, count: int) -> dict[str, Any]:
    """A source of some of the fixture rows."""
    lines = (FIXTURES / "rows.jsonl").read_text().splitlines()[begin : begin + count]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return {"path": str(path)}


def overfitting(folder: Path, **train: Any) -> dict[str, Any]:
    """Sections of a run that learns few rows by heart: its evaluation loss falls, then rises."""
    schedule = {"name": "constant"}
    usual = {"steps": 20, "eval_every": 2, "schedule": schedule, "optimizer": {"lr": 0.05}}
    return {
        "data": {"train": rows(folder, "few", 0, 4), "eval": rows(folder, "others", 20, 6)},
        "train": {**usual, **train},
    }


def report(run: Run) -> dict[str, Any]:
    return dict(json.loads((run.folder / "report.json").read_text()))


def result(run: Run) -> str:
    return hashlib.sha256(
        (run.folder / "adapter/adapter_model.safetensors").read_bytes()
    ).hexdigest()


def by_step(run: Run, name: str = "eval") -> dict[int, float]:
    return {r["step"]: r["eval_loss"] for r in run.records if r.get("name") == name}


STOPPING = {"early_stopping": {"patience": 2}}
BEST = {"checkpoint": {"result": "best"}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All steps, undisturbed, with the last step's weights as its result."""
    folder = tmp_path_factory.mktemp("whole")
    return trained_here(run_file(folder, **SINGLE, **overfitting(folder)))


def test_the_run_ends_when_its_evaluations_are_no_longer_better(whole: Run, tmp_path: Path) -> None:
    run = trained_here(run_file(tmp_path, **SINGLE, **BEST, **overfitting(tmp_path, **STOPPING)))
    losses = by_step(whole)
    best = min(losses, key=lambda step: losses[step])
    assert 2 <= best <= 14, "the losses rise within the run"
    assert run.steps("step") == list(range(1, best + 5))
    assert run.steps("loss") == whole.steps("loss")[: best + 4]
    assert by_step(run) == {step: loss for step, loss in losses.items() if step <= best + 4}
    found = report(run)
    assert (found["stopped_by"], found["steps"], found["planned_steps"]) == (
        "early_stopping",
        best + 4,
        20,
    )
    assert found["result_step"] == best
    assert found["verified"]["reloaded"], found["verified"]
    card = (run.folder / "adapter/README.md").read_text()
    assert f"the weights are those after step {best}" in card
    assert report(whole)["stopped_by"] is None and "result_step" not in report(whole)
    # The same bytes as a run that ends there.
    (tmp_path / "short").mkdir()
    short = overfitting(tmp_path / "short", steps=best)
    assert result(run) == result(trained_here(run_file(tmp_path / "short", **SINGLE, **short)))
    assert result(run) != result(whole)


@pytest.mark.parametrize(
    ("devices", "strategy"),
    [
        (1, "single"),
        (2, "ddp"),
        (2, "fsdp"),
        (2, "zero"),
        pytest.param(2, {"name": "ddp", "tp": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"name": "ddp", "pp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_stopped_and_resumed_anywhere_it_ends_where_it_would_have(
    devices: int, strategy: Any, tmp_path: Path
) -> None:
    """At steps with an evaluation that the stop left out, and at others; all ranks agree."""
    shared: dict[str, Any] = {
        "strategy": strategy if isinstance(strategy, dict) else {"name": strategy},
        "launch": {"devices": devices},
        **overfitting(tmp_path, **STOPPING, micro_batch_size=1),
    }
    whole = run_file(tmp_path, name="whole", **BEST, **shared)
    parts = run_file(tmp_path, checkpoint={"result": "best", "resume": "auto"}, **shared)
    runs = runs_of(
        [
            RunPart(file=str(whole)),
            *[RunPart(file=str(parts), stop_after_s=delay) for delay in (0.0, 0.03, 0.06)],
            RunPart(file=str(parts)),
        ]
    )
    reference, last = runs[0], runs[-1]
    assert (reference.status, last.status) == (0, 0), last.err
    assert last.steps("loss") == reference.steps("loss")
    assert by_step(last) == by_step(reference)
    for field in ("stopped_by", "steps", "result_step", "evaluations"):
        assert report(last)[field] == report(reference)[field], field
    assert report(last)["stopped_by"] == "early_stopping"
    assert result(last) == result(reference)


def evaluated(*losses: float) -> list[dict[str, Any]]:
    """Records of evaluations, the first of the base, each with one of a source."""
    return [
        {"step": step, "name": name, "eval_loss": loss}
        for step, loss in enumerate(losses)
        for name in ("eval", "eval/a")
    ]


@pytest.mark.parametrize(
    ("losses", "rule", "stops"),
    [
        ((9.0, 3.0, 2.0, 2.0), {"patience": 1}, True),
        ((9.0, 3.0, 2.0, 2.0), {"patience": 2}, False),
        ((1.0, 3.0, 2.0), {"patience": 1}, False),
        ((9.0, 3.0, 3.5, 2.9, 2.8), {"patience": 2}, False),
        ((9.0, 3.0, 2.95, 2.85), {"patience": 2, "min_delta": 0.1}, False),
        ((9.0, 3.0, 2.95, 2.9), {"patience": 2, "min_delta": 0.1}, True),
        ((9.0, 3.0, math.nan, math.nan), {"patience": 2}, True),
        ((9.0, math.nan, 5.0), {"patience": 2}, False),
        ((9.0,), {"patience": 1}, False),
    ],
)
def test_evaluations_in_a_row_without_a_lower_loss_are_counted(
    losses: tuple[float, ...], rule: dict[str, Any], stops: bool
) -> None:
    found = early_stop(evaluated(*losses), EarlyStoppingSection.model_validate(rule))
    assert (found is not None) is stops
    assert early_stop(evaluated(*losses), None) is None


def test_each_source_has_a_loss_and_all_of_them_one(tmp_path: Path) -> None:
    one, two = rows(tmp_path, "one", 0, 5), rows(tmp_path, "two", 20, 9)
    (tmp_path / "more").mkdir()
    again = rows(tmp_path / "more", "two", 30, 3)
    both = {"data": {"eval": [one, two, again]}, "train": {"eval_every": 2}}
    run = trained_here(run_file(tmp_path, **SINGLE, **both))
    names = ["eval", "eval/one", "eval/two", "eval/two-2"]
    evaluated = [r for r in run.records if "eval_loss" in r]
    assert [(r["step"], r["name"]) for r in evaluated] == [(s, n) for s in (2, 4) for n in names]
    for whole, *parts in (evaluated[:4], evaluated[4:]):
        tokens = [r["eval_tokens"] for r in parts]
        assert sum(tokens) == whole["eval_tokens"]
        summed = sum(r["eval_loss"] * r["eval_tokens"] for r in parts)
        assert summed / sum(tokens) == pytest.approx(whole["eval_loss"], rel=1e-12)
    # Each is what it would be alone.
    (tmp_path / "alone").mkdir()
    alone = {"data": {"eval": two}, "train": {"eval_every": 2}}
    assert by_step(trained_here(run_file(tmp_path / "alone", **SINGLE, **alone))) == by_step(
        run, "eval/two"
    )


def test_a_file_in_the_folder_asks_for_a_checkpoint_now(tmp_path: Path) -> None:
    """On two ranks, which agree; the losses are those of a run that was asked for nothing."""
    shared: dict[str, Any] = {"launch": {"devices": 2}, "train": {"steps": 6}}
    whole = run_file(tmp_path, name="whole", checkpoint={"every": 0}, **shared)
    asked = run_file(tmp_path, name="asked", checkpoint={"every": 0}, **shared)
    folder = tmp_path / "out/asked"
    folder.mkdir(parents=True)
    (folder / REQUEST).touch()
    reference, run = finished([RunPart(file=str(whole)), RunPart(file=str(asked))])
    assert run.folder == folder
    assert not (folder / REQUEST).exists()
    assert [each.name for each in (folder / "checkpoints").iterdir()] == ["step-00000001"]
    assert not (reference.folder / "checkpoints").exists()
    assert run.steps("loss") == reference.steps("loss")
    more = run_file(
        tmp_path,
        name="more",
        checkpoint={"resume": str(folder / "checkpoints/step-00000001")},
        **shared,
    )
    (resumed,) = finished([RunPart(file=str(more))])
    assert resumed.steps("loss") == reference.steps("loss")[1:]


def test_more_patience_resumes_a_run_that_had_ended_early(whole: Run, tmp_path: Path) -> None:
    file = run_file(
        tmp_path, checkpoint={"resume": "auto"}, **SINGLE, **overfitting(tmp_path, **STOPPING)
    )
    first = trained_here(file)
    ended = report(first)["steps"]
    assert ended < 20
    again = trained_here(file)
    assert again.steps("loss") == whole.steps("loss")[:ended]
    longer = trained_here(file, **{"train.early_stopping.patience": 100})
    assert longer.folder == first.folder
    assert longer.steps("loss") == whole.steps("loss")
    assert report(longer)["stopped_by"] is None


def test_a_deterministic_run_says_so_to_torch(tmp_path: Path) -> None:
    import torch

    try:
        run = trained_here(run_file(tmp_path, train={"deterministic": True}, **SINGLE))
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    (tmp_path / "plain").mkdir()
    assert run.steps("loss") == trained_here(run_file(tmp_path / "plain", **SINGLE)).steps("loss")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train": STOPPING}, "'train.early_stopping' needs evaluations during the run"),
        (BEST, "'checkpoint.result: best' needs evaluations during the run"),
        (
            {"train": STOPPING, "data": {"eval_fraction": 0.2}},
            "'train.early_stopping' needs evaluations during the run; set 'train.eval_every'",
        ),
    ],
)
def test_without_evaluations_nothing_can_be_chosen(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(RunFileError, match=said):
        trained_here(run_file(tmp_path, **SINGLE, **changes))
