"""What a rehearsal without values says is held, against the tensors of ranks that compute."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import run_ranks
from tests.planning.compared import CASES, PHASES

QUICK = ("single", "fsdp-all", "zero3")
LOADS_WITH_VALUES = ("single-nf4-dora",)
"""DoRA's norms are computed of decoded weights, one at a time, while a rank loads."""
SCALARS = 4096
"""Bytes of numbers that come and go, such as a norm."""

Found = Callable[[str], tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Rehearsed and measured bytes by phase; the quick cases are run at once, and so are others."""
    folders: dict[bool, Path] = {}

    def of(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        quick = name in QUICK
        if quick not in folders:
            made = folders[quick] = tmp_path_factory.mktemp("compared")
            names = [case for case in CASES if (case in QUICK) == quick]
            run_ranks(
                "tests.planning.compared", [str(made), *names], world=1, folder=made, timeout_s=1500
            )
        folder = folders[quick]
        log = (folder / "rank0.log").read_text()[-4000:]
        files = [folder / f"{name}.{role}.json" for role in ("rehearsed", "measured")]
        assert all(file.exists() for file in files), log
        one, two = (json.loads(file.read_text()) for file in files)
        return one, two

    return of


def marked(name: str) -> Any:
    return name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", map(marked, CASES))
def test_never_under_and_at_most_a_little_over(name: str, found: Found) -> None:
    rehearsed, measured = found(name)
    unseen = SCALARS + CASES[name].on_its_way
    phases = PHASES if name in LOADS_WITH_VALUES else ("load", *PHASES)
    for phase in phases:
        assert rehearsed[phase] >= measured[phase] - unseen, phase
        assert rehearsed[phase] <= 1.03 * measured[phase], phase


@pytest.mark.parametrize("name", map(marked, CASES))
def test_tensors_are_for_what_those_of_the_ranks_are(name: str, found: Found) -> None:
    rehearsed, measured = found(name)
    one, two = rehearsed["kinds"], measured["kinds"]
    assert sum(one.values()) == max(rehearsed[phase] for phase in ("load", *PHASES))
    for kind in {**one, **two}:
        unseen = SCALARS + CASES[name].on_its_way
        assert one.get(kind, 0) == pytest.approx(two.get(kind, 0), rel=0.03, abs=unseen), kind


@pytest.mark.parametrize("name", map(marked, CASES))
def test_bytes_sent_and_operations_are_those_of_the_ranks(name: str, found: Found) -> None:
    rehearsed, measured = found(name)
    assert rehearsed["flops"] == pytest.approx(measured["flops"], rel=0.01)
    assert rehearsed["flops"]
    assert rehearsed["sent"] == pytest.approx(measured["sent"], rel=0.01)
    assert bool(rehearsed["sent"]) == (CASES[name].ranks > 1)
