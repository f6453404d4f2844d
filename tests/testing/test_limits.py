"""A check that hangs is named, with its rank and where it is; the answers before it are kept."""

from __future__ import annotations

import dataclasses
import faulthandler
import os
from pathlib import Path

import pytest

from anygauge.testing.check import Answer, verdict
from anygauge.testing.contract import CHECKS
from anygauge.testing.process import Subject, ask
from anygauge.testing.watch import CLOSING, STACK_SIGNAL, Answers, Watch, begun, lines
from tests.testing.test_mutations import mutant_site


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
    limited(monkeypatch, "synchronizes", 3)
    limited(monkeypatch, "moves_data", 3)  # the first that waits for the device
    found = ask("device", of_mutation(subject, "waiting for the device never ends"), tmp_path)
    said = "moves_data had not ended after 3 s (in synchronize, wrong_ends.py:"
    assert verdict(found.of(CHECKS["opens"])) == ("passed", ""), "what was answered before is kept"
    assert verdict(found.of(CHECKS["moves_data"]))[1].startswith(said)
    assert found.of(CHECKS["ends_on_device"]).detail.startswith(said)
    later = found.of(CHECKS["memory_moves"]).detail
    assert later.startswith(f"the check was not reached: {said}")


def test_the_rank_that_hangs_is_named(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, "barrier_waits", 5)
    named = of_mutation(subject, "rank 1 never comes to a barrier")
    found = ask("ranks", named, tmp_path, ranks=2)
    result, why = verdict(found.of(CHECKS["barrier_waits"]))
    assert result == "failed"
    assert "rank 1: barrier_waits had not ended after 5 s (in barrier, wrong_ends.py:" in why
    assert "(in barrier, collectives.py:" in why, "the other waits for it"
    assert verdict(found.of(CHECKS["all_reduce_sums"])) == ("passed", "")


def test_the_rank_that_has_come_least_far_keeps_the_others_waiting(tmp_path: Path) -> None:
    files = [tmp_path / "0.json", tmp_path / "1.json"]
    files[0].write_text('{"begun": "one"}\n{"name": "one", "holds": true}\n{"begun": "two"}\n')
    files[1].write_text('{"begun": "one"}\n')
    watch = Watch(files, [0, 0], {"one": 0.0, "two": 0.0})
    assert watch.overdue([0, 1]) == "", "it has just been seen to begin"
    assert watch.overdue([0, 1]) == "rank 1: one had not ended after 0 s"
    assert set(watch.broken("why")) == {"one", "two"}


def test_a_line_that_is_not_whole_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    answers = Answers(path)
    try:
        answers.begin("one")
        answers.write("one", Answer(holds=True))
        answers.begin(CLOSING)
        assert begun(path) == CLOSING
        path.write_text(path.read_text() + '{"name": "tw')
        assert len(lines(path)) == 3
    finally:
        faulthandler.unregister(STACK_SIGNAL)
