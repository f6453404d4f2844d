"""Which drawn defects the kit finds: ``python -m tests.testing.second_proof SEED [FILE.json]``.

Each is tried on the checks of its part, in forks: on a device until one fails. It prints a line for
each, then how many were found of those that count: that the kit had not found before its checks
were written, and that change something.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from anygauge.testing.check import verdict
from anygauge.testing.contract import CHECKS
from anygauge.testing.process import PartAnswers
from tests.testing.drawn import SEEDS, Defect, drawn, without_effect
from tests.testing.mutation_forks import FIRST_FAILURE, answers_of
from tests.testing.test_mutations import mutant_site

SOUND = "none, on a simulated card"
BEFORE = Path(__file__).with_name("drawn_before.json")
"""Names of those that were found before: they do not count."""


def failed(part: str, answers: PartAnswers) -> list[str]:
    """Names of the checks of a part that fail."""
    checks = [check for check in CHECKS.values() if check.part == part]
    return [check.name for check in checks if verdict(answers.of(check))[0] == "failed"]


def found(drawn_ones: Iterable[Defect], folder: Path) -> dict[str, list[str]]:
    """The checks that each defect fails, by its name; without a defect none may fail."""
    defects = list(drawn_ones)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(mutant_site(folder)), os.environ.get("PYTHONPATH")])
    )
    os.environ["ANYGAUGE_SIM_CARDS"] = "4"  # as many as the mutant's probe says
    result = {}
    for part in ("device", "ranks"):
        names = [one.name for one in defects if one.part == part]
        until = FIRST_FAILURE if part == "device" else None
        answers = answers_of(part, {SOUND: None, **dict.fromkeys(names, until)}, folder)
        assert not failed(part, answers[SOUND]), (part, failed(part, answers[SOUND]))
        result |= {name: failed(part, answers[name]) for name in names}
    return result


def main(seed: str = str(SEEDS[-1]), output: str | None = None) -> None:
    """All that a seed draws."""
    before = set(json.loads(BEFORE.read_text(encoding="utf-8")))
    new = [one for one in drawn(int(seed)) if one.name not in before]
    counted = [one for one in new if without_effect(one) is None]
    with tempfile.TemporaryDirectory() as folder:
        results = found(counted, Path(folder))
    for name, checks in results.items():
        print(f"{name}: {', '.join(checks[:4]) or 'NOT FOUND'}")
    for one in new:
        if one not in counted:
            print(f"{one.name}: does not count; {without_effect(one)}")
    drawn_ones = len(drawn(int(seed)))
    print(
        f"{drawn_ones} drawn, {drawn_ones - len(new)} found before, "
        f"{len(new) - len(counted)} without effect; {sum(map(bool, results.values()))} of the "
        f"other {len(results)} found"
    )
    if output is not None:
        Path(output).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
