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

CAUGHT_BY = {
    "basic": {
        "probe imports torch": "probe_is_pure",
        "probe is slow": "probe_is_pure",
        "probe sets a variable": "probe_is_pure",
        "probe varies": "probe_is_pure",
        "probe raises": "probe_is_pure",
        "finding without words": "probe_answers",
        "spec does not pickle": "spec_pickles",
        "another name": "described",
        "takes any option": "unknown_option",
        "opens when it is made": "light_construction",
        "padded beyond the maximum": "shapes_are_sound",
        "a capability that nobody asks about": "described",
        "an engine is refused without a reason": "described",
        "environment varies": "environment_is_pure",
        "environment sets variables itself": "environment_is_pure",
        "a value that is not a text": "settings_explain_themselves",
        "a setting without a reason": "settings_explain_themselves",
        "a rank's value without a rank": "scopes_hold",
        "aborts at its end": "ends_on_paper",
    },
    "device": {
        "memory never moves": "memory_moves",
        "peak is only now": "peak_is_kept_and_reset",
        "peak cannot be reset": "peak_is_kept_and_reset",
        "seed is ignored": "seeds_count",
        "random state is not restored": "rng_state_round_trip",
        "autocast is ignored": "autocast_casts",
        "integers become floats": "moves_data",
        "nested tensors stay behind": "moves_data",
        "every error is out of memory": "out_of_memory_is_told_apart",
        "close leaves it open": "closes",
        "close raises": "ends_on_device",
        "mark_step changes nothing but is declared": "mark_step_is_real",
        "mark_step does nothing but is declared": "mark_step_is_real",
        "mark_step works but is declared missing": "mark_step_is_real",
        "the graph limit is ignored": "graph_limit_holds",
        "memory of no known kind": "memory_numbers_are_sound",
        "opening settles nothing": "capabilities_are_settled",
        "a kernel is wrong": "kernels_agree",
        "mark_step fails after backward": "mark_step_is_harmless",
        "float16 works but is declared missing": "float16_arithmetic",
    },
    "operators": {},
    "ranks": {
        "mean sums": "all_reduce_means",
        "max sums": "all_reduce_maximum",
        "all_reduce is not in place": "all_reduce_sums",
        "always broadcasts rank 0": "broadcasts",
        "gathers backwards": "all_gathers",
        "barrier does nothing": "barrier_waits",
        "host sums lose digits": "sums_on_host",
        "collectives work but are declared missing": "all_gathers",
        "every rank opens the same device": "devices_differ",
    },
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
