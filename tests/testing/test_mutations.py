"""Every defect is caught by a check, and the backend without one passes all.

The table of `CAUGHT_BY` is the documentation's; `docs/plugins.md` shows it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anygauge.testing.check import verdict
from anygauge.testing.contract import CHECKS
from anygauge.testing.process import PartAnswers
from tests.testing.mutation_forks import answers_of
from tests.testing.wrong import table

CAUGHT_BY: dict[str, dict[str, str]] = {
    "basic": {},
    "device": {"a kernel is wrong": "kernels_agree"},
    "operators": {},
    "ranks": {},
}
for _mutant in table():
    if _mutant.part == "loop":  # real runs, in `test_wrong_loop`
        continue
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


def mutant_site(folder: Path) -> Path:
    """A folder with an installed distribution that has the backend `mutant`."""
    site = folder / "site"
    info = site / "anygauge_mutant-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: anygauge-mutant\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[anygauge]\nmutant = anygauge_mutant\n")
    shutil.copy(Path(__file__).with_name("mutants.py"), site / "anygauge_mutant.py")
    return site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mutant_site(tmp_path_factory.mktemp("mutant"))


@pytest.fixture(scope="module")
def answers(
    site: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[str, str], PartAnswers]:
    """Answers of a part's checks on a mutant."""
    folder = tmp_path_factory.mktemp("answers")
    chosen = {
        item.callspec.params.get("mutation")
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    }
    forked: dict[str, dict[str, PartAnswers]] = {}

    def given(part: str, mutation: str) -> PartAnswers:
        with pytest.MonkeyPatch.context() as patch:
            paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
            patch.setenv("PYTHONPATH", os.pathsep.join(paths))
            if part not in forked:
                asked = {name: c for name, c in CAUGHT_BY[part].items() if name in chosen}
                forked[part] = answers_of(part, {"none": None, **asked}, folder)
            return forked[part][mutation]

    return given


def failures(part: str, answers: PartAnswers) -> dict[str, str]:
    """Checks of a part that fail: name -> why."""
    checks = [check for check in CHECKS.values() if check.part == part]
    results = {check.name: verdict(answers.of(check)) for check in checks}
    return {name: why for name, (result, why) in results.items() if result == "failed"}


@pytest.mark.parametrize("part", CAUGHT_BY)
def test_without_a_defect_nothing_fails(
    part: str, answers: Callable[[str, str], PartAnswers]
) -> None:
    assert failures(part, answers(part, "none")) == {}


@pytest.mark.parametrize(("part", "mutation"), with_marks())
def test_each_defect_is_caught(
    part: str, mutation: str, answers: Callable[[str, str], PartAnswers]
) -> None:
    given = answers(part, mutation)
    found, check = failures(part, given), CAUGHT_BY[part][mutation]
    assert check in found, found
    reached = not found[check].startswith("the check was not reached")
    assert reached, f"it is not the check that found it: {found[check]}"
