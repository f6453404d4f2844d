"""Devices that are unusual and sound: the kit finds nothing wrong with them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from anygauge.testing.process import PartVerdicts
from tests.testing.mutation_forks import answers_by_part, mutant_site
from tests.testing.test_kit import kit
from tests.testing.test_mutations import failures
from tests.testing.unusual import ALONE
from tests.testing.wrong import table

SOUND = [found.name for found in table().values() if found.part == "sound"]
PARTS = ("basic", "device", "ranks")
CASES = [(part, name) for part in PARTS for name in SOUND if (part, name) != ("ranks", ALONE)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], PartVerdicts]:
    """Answers of a part's checks on one of them."""
    return answers_by_part(
        tmp_path_factory.mktemp("unusual"),
        lambda part: dict.fromkeys(name for each, name in CASES if each == part),
    )


@pytest.mark.parametrize(("part", "name"), CASES, ids=[f"{p}-{n}" for p, n in CASES])
def test_nothing_fails(part: str, name: str, answers: Callable[[str, str], PartVerdicts]) -> None:
    assert failures(part, answers(part, name)) == {}


def test_the_ranks_of_a_single_device_are_not_tried(tmp_path: Path) -> None:
    done = kit(
        tmp_path,
        *("--anygauge-backend", "mutant", "-k", "on_ranks", "--anygauge-report", "page.json"),
        ANYGAUGE_MUTATION=ALONE,
        PYTHONPATH=os.pathsep.join([str(mutant_site(tmp_path)), str(Path.cwd())]),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads((tmp_path / "page.json").read_text())["checks"]
    assert {line["result"] for line in lines} == {"untried"}
    assert {line["why"] for line in lines} == {"fewer devices than the 2 ranks that it takes"}
