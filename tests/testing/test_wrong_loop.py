"""Real runs find what is wrong in them, and their message names where it is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.testing.mutation_forks import mutant_site
from tests.testing.test_kit import kit
from tests.testing.wrong import Mutant, table
from tests.testing.wrong_loop import CAUSES, PART, SOUND, TRAINS, WHOLE

ROOT = Path(__file__).parents[2]
MUTANTS = [found for found in table().values() if found.part == PART and found.name != SOUND]


def failure(mutation: str, test: str, folder: Path) -> str:
    """What one of the loop's tests says of a mutant; empty if it passes."""
    site = mutant_site(folder)
    paths = [str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = kit(
        folder,
        *("--anygauge-backend", "mutant", "--anygauge-report", "page.json"),
        *("-k", test.replace("[", " and ").replace("]", "")),
        PYTHONPATH=os.pathsep.join(paths),
        ANYGAUGE_MUTATION=mutation,
        ANYGAUGE_SIM_CARDS="4",
        ANYGAUGE_SIM_LOCKS="",
        OMP_NUM_THREADS="1",
    )
    lines = json.loads((folder / "page.json").read_text())["checks"]
    (line,) = [each for each in lines if each["name"] == test]
    assert line["result"] in ("passed", "failed"), (line, done.stdout)
    return line["why"] if line["result"] == "failed" else ""


@pytest.mark.slow
@pytest.mark.parametrize("found", MUTANTS, ids=lambda found: found.name)
def test_each_is_found_with_its_cause(found: Mutant, tmp_path: Path) -> None:
    why = failure(found.name, found.check, tmp_path)
    assert why, "it passes"
    assert CAUSES[found.name] in why


@pytest.mark.slow
@pytest.mark.parametrize("test", [TRAINS, WHOLE])
def test_what_rounds_otherwise_passes(test: str, tmp_path: Path) -> None:
    assert failure(SOUND, test, tmp_path) == ""
