"""Every defect is caught by a check, and the backend without one passes all.

docs/conformance/defects.md shows `CAUGHT_BY`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from anygauge.testing.contract import CHECKS
from anygauge.testing.process import PartVerdicts
from tests.testing.mutation_forks import RANKS, answers_by_part
from tests.testing.wrong import table

CAUGHT_BY: dict[str, dict[str, str]] = {part: {} for part in RANKS}
for _mutant in table().values():
    if _mutant.part in CAUGHT_BY:  # others need real runs: `test_wrong_loop`
        CAUGHT_BY[_mutant.part][_mutant.name] = _mutant.check
CASES = [(part, name) for part, mutations in CAUGHT_BY.items() for name in mutations]


def with_marks() -> list[Any]:
    """All of `CASES`; of each check one is tried by default, the others by the slow tests."""
    tried: set[str] = set()
    marked = []
    for part, name in CASES:
        check = CAUGHT_BY[part][name]
        marks = [pytest.mark.slow] if check in tried else []
        tried.add(check)
        marked.append(pytest.param(part, name, id=name, marks=marks))
    return marked


@pytest.fixture(scope="module")
def answers(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[str, str], PartVerdicts]:
    """Answers of a part's checks on a mutant."""
    chosen = {
        item.callspec.params.get("mutation")
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    }
    return answers_by_part(
        tmp_path_factory.mktemp("mutants"),
        lambda part: {
            "none": None,
            **{name: check for name, check in CAUGHT_BY[part].items() if name in chosen},
        },
    )


def failures(part: str, answers: PartVerdicts) -> dict[str, str]:
    """Checks of a part that fail: name -> why."""
    checks = [check for check in CHECKS.values() if check.part == part]
    results = {check.name: answers.of(check) for check in checks}
    return {name: why for name, (result, why) in results.items() if result == "failed"}


@pytest.mark.parametrize("part", CAUGHT_BY)
def test_without_a_defect_nothing_fails(
    part: str, answers: Callable[[str, str], PartVerdicts]
) -> None:
    assert failures(part, answers(part, "none")) == {}


@pytest.mark.parametrize(("part", "mutation"), with_marks())
def test_each_defect_is_caught(
    part: str, mutation: str, answers: Callable[[str, str], PartVerdicts]
) -> None:
    given = answers(part, mutation)
    found, check = failures(part, given), CAUGHT_BY[part][mutation]
    assert check in found, found
    reached = not found[check].startswith("the check was not reached")
    assert reached, f"it is not the check that found it: {found[check]}"
