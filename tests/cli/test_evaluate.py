"""`anygauge evaluate` finds what the run's own evaluations found."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.runs import FIXTURES, Run, anygauge, called, run_file, trained_here

ROWS = FIXTURES / "rows.jsonl"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on all rows that is also evaluated on all of them, before and after."""
    file = run_file(
        tmp_path_factory.mktemp("trained"),
        strategy={"name": "single"},
        data={"eval": {"path": str(ROWS)}},
        train={"eval_at_start": True, "optimizer": {"lr": 0.05}},
    )
    return trained_here(file)


def found(*arguments: Any) -> dict[str, Any]:
    done = anygauge(["evaluate", *arguments, "--rows", ROWS, "--json"])
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_an_adapter_and_its_base_have_the_losses_of_the_run(trained: Run) -> None:
    before, after = trained.evaluations()
    assert before - after > 0.01
    own = found(trained.folder)
    assert own["loss"] == after
    assert (own["backend"], own["ranks"], own["param_dtype"]) == ("cpu", 1, "float32")
    assert own["adapter"] == str(trained.folder / "adapter")
    assert found(trained.folder, "--base")["loss"] == before
    shared = found(trained.folder, "--devices", 2, "--set", "strategy=fsdp")
    assert shared["loss"] == pytest.approx(after, rel=1e-6)
    assert shared["ranks"] == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", str(ROWS.with_name("row.jsonl"))], "row.jsonl; did you mean 'rows.jsonl'?"),
        (["--rows", str(ROWS), "--base", "--adapter", "x"], "leave --adapter out"),
        (["--rows", str(ROWS), "--set", "train.stepz=1"], "train.stepz"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(arguments: list[str], said: str, trained: Run) -> None:
    done = called(["evaluate", trained.folder, *arguments])
    assert done.returncode == 2
    assert said in done.stderr
