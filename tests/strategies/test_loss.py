"""The loss made in the output layer under ZeRO-3: equal, and its weight gathered once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.ranks import run_ranks
from tests.strategies.count_rank import CONFIG
from tests.strategies.loss_rank import CASES

WEIGHT = CONFIG["vocab_size"] * CONFIG["hidden_size"]


USUAL = (
    "lora, nothing kept",
    "lora on the output layer",
    "all weights, tied, no recomputation",
    "all weights, capped",
)
OTHERS = tuple(case for case in CASES if case not in USUAL)
EVERY = [*USUAL, *(pytest.param(case, marks=pytest.mark.slow) for case in OTHERS)]

Results = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What a case gave; the usual ones are run at once, and so are the others."""
    found: dict[str, Any] = {}

    def of(case: str) -> dict[str, Any]:
        if case not in found:
            folder = tmp_path_factory.mktemp("loss")
            output = folder / "results.json"
            cases = USUAL if case in USUAL else OTHERS
            arguments = [str(output), *cases]
            run_ranks("tests.strategies.loss_rank", arguments, world=2, folder=folder)
            found.update(json.loads(output.read_text()))
        result: dict[str, Any] = found[case]
        return result

    return of


@pytest.mark.parametrize("case", EVERY)
def test_losses_gradients_and_weights_are_those_of_logits_in_one_process(
    results: Results, case: str
) -> None:
    found = results(case)
    for alone, held, fused in (*found["loss"], *found["norm"]):
        assert held == pytest.approx(alone, rel=1e-4)
        assert fused == pytest.approx(alone, rel=1e-4)
    # Adam's first steps are of the rate's size, whatever the gradient's: 1e-2, twice. Where a
    # gradient is next to nothing, its sign is rounding's; on average it is not.
    assert found["difference"] < 1e-5


def test_a_frozen_output_layer_is_gathered_once(results: Results) -> None:
    gathered = results("lora, nothing kept")["gathered"]
    # With logits, once for the forward and once for the backward.
    assert gathered["held"] - gathered["fused"] == WEIGHT


@pytest.mark.parametrize("case", EVERY)
def test_no_output_layer_is_gathered_more_often_than_with_logits(
    results: Results, case: str
) -> None:
    gathered = results(case)["gathered"]
    assert 0 < gathered["fused"] <= gathered["held"]
