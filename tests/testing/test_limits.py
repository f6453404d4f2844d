"""A check that hangs is named, with its rank and where it is; the answers before it are kept."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import re
from pathlib import Path

import pytest

from anygauge.testing.check import Answer, verdict
from anygauge.testing.contract import CHECKS
from anygauge.testing.process import Subject, ask, merged_answers
from anygauge.testing.watch import CLOSING, Answers, begun, lines, stack_of, where_it_hangs
from tests.testing.mutation_forks import mutant_site


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    """The backend `mutant`, of which a test names the mutation."""
    root = Path(__file__).parents[2]
    return Subject(
        name="mutant",
        environment={"PYTHONPATH": os.pathsep.join([str(mutant_site(tmp_path)), str(root)])},
    )


def limited(monkeypatch: pytest.MonkeyPatch, check: str, seconds: float) -> None:
    monkeypatch.setitem(CHECKS, check, dataclasses.replace(CHECKS[check], limit_s=seconds))


def of_mutation(subject: Subject, mutation: str) -> Subject:
    environment = {**subject.environment, "ANYGAUGE_MUTATION": mutation}
    return dataclasses.replace(subject, environment=environment)


def test_a_check_that_hangs_is_named(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for check in CHECKS:
        limited(monkeypatch, check, 15)
    found = ask("device", of_mutation(subject, "a new peak never begins"), tmp_path)
    said = re.fullmatch(r"(\w+) had not ended after 15 s \(in never, table.py:\d+\)", found.trouble)
    assert said is not None, found.trouble
    assert verdict(found.of(CHECKS[said[1]])) == ("failed", found.trouble)
    assert any(answer.holds for answer in found.answers.values()), "what was before it is kept"
    later = found.of(CHECKS["closes"]).detail
    assert later == f"the check was not reached: {found.trouble}"


def test_the_rank_that_hangs_is_named(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for check in CHECKS:
        limited(monkeypatch, check, 15)
    named = of_mutation(subject, "rank 1 never comes to a barrier")
    found = ask("ranks", named, tmp_path, ranks=2)
    said = re.search(
        r"rank 1: (\w+) had not ended after 15 s \(in never, table.py:\d+\)", found.trouble
    )
    assert said is not None, found.trouble
    assert "(in barrier, collectives.py:" in found.trouble, "the other waits for it"
    result, why = verdict(found.of(CHECKS[said[1]]))
    assert result == "failed" and "rank 1: " in why
    assert any(answer.holds for answer in found.answers.values()), "what was before it is kept"


def test_the_rank_that_has_come_least_far_keeps_the_others_waiting(tmp_path: Path) -> None:
    files = [tmp_path / "0.json", tmp_path / "1.json"]
    one, two = (json.dumps({"begun": name, "limit_s": 7.0}) + "\n" for name in ("one", "two"))
    files[0].write_text(one + '{"name": "one", "holds": true}\n' + two)
    files[1].write_text(one)
    for file in files:
        stack_of(file).touch()
    assert where_it_hangs(files, files) == "rank 1: one had not ended after 7 s"
    assert where_it_hangs(files[:1], files[:1]) == "two had not ended after 7 s"
    merged = merged_answers(files, "why").answers
    assert {merged[name].detail for name in ("one", "two")} == {"why"}


def test_a_line_that_is_not_whole_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    answers = Answers(path, {"one": 90.0})
    try:
        answers.begin("one")
        assert begun(path) == {"begun": "one", "limit_s": 90.0}
        answers.write("one", Answer(holds=True))
        assert begun(path) == {}
        answers.begin(CLOSING)
        assert begun(path)["begun"] == CLOSING
        path.write_text(path.read_text() + '{"name": "tw')
        assert len(lines(path)) == 3
    finally:
        faulthandler.cancel_dump_traceback_later()
