"""A check that hangs is named, with its rank and where it is; the answers before it are kept."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from anygauge.testing import process
from anygauge.testing.contract import CHECKS
from anygauge.testing.process import (
    BEGUN,
    CLOSING,
    Answers,
    Subject,
    answers_in,
    ask,
    merge,
    run_to_end,
)
from tests.testing.mutation_forks import mutant_site
from tests.testing.wrong import LIMIT


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    """The backend `mutant`, of which a test names the mutation."""
    root = Path(__file__).parents[2]
    return Subject(
        name="mutant",
        environment={"PYTHONPATH": os.pathsep.join([str(mutant_site(tmp_path)), str(root)])},
    )


def of_mutation(subject: Subject, mutation: str) -> Subject:
    environment = {**subject.environment, "ANYGAUGE_MUTATION": mutation, LIMIT: "15"}
    return dataclasses.replace(subject, environment=environment)


def test_a_check_that_hangs_is_named(subject: Subject, tmp_path: Path) -> None:
    found = ask("device", of_mutation(subject, "a new peak never begins"), tmp_path)
    said = re.fullmatch(r"(\w+) had not ended after 15 s \(in never, table.py:\d+\)", found.trouble)
    assert said is not None, found.trouble
    assert found.of(CHECKS[said[1]]) == ("failed", found.trouble)
    assert "passed" in dict(found.verdicts.values()), "what was before it is kept"
    later = found.of(CHECKS["odd_lengths"])[1]
    assert later == f"the check was not reached: {found.trouble}"


def test_the_rank_that_hangs_is_named(subject: Subject, tmp_path: Path) -> None:
    named = of_mutation(subject, "rank 1 never comes to a barrier")
    found = ask("ranks", named, tmp_path, ranks=2)
    said = re.search(
        r"rank 1: (\w+) had not ended after 15 s \(in never, table.py:\d+\)", found.trouble
    )
    assert said is not None, found.trouble
    assert "(in barrier, collectives.py:" in found.trouble, "the other waits for it"
    result, why = found.of(CHECKS[said[1]])
    assert result == "failed" and "rank 1: " in why
    assert "passed" in dict(found.verdicts.values()), "what was before it is kept"


def test_the_rank_that_has_come_least_far_keeps_the_others_waiting(tmp_path: Path) -> None:
    files = [tmp_path / "0.json", tmp_path / "1.json"]
    one, two = (json.dumps([name, BEGUN, "7 s"]) + "\n" for name in ("one", "two"))
    files[0].write_text(one + '["one", "passed", ""]\n' + two)
    files[1].write_text(one)
    for file in files:
        frame = 'Thread 0x7f (most recent call first):\n  File "/a/b.py", line 3 in never\n'
        file.with_suffix(".log").write_text(f"noise\nTimeout (0:00:07)!\n{frame}")
    ended = types.SimpleNamespace(poll=lambda: 1)
    where = "had not ended after 7 s (in never, b.py:3)"
    trouble = run_to_end([ended, ended], files, 60)
    assert trouble == f"rank 1: one {where}; rank 0: two {where}"
    assert run_to_end([ended], files[:1], 60) == f"two {where}"
    found = merge(files, "why").verdicts
    assert found == {"one": ("failed", "why"), "two": ("failed", "why")}


def test_ranks_do_not_wait_long_for_one_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "ALONE_S", 0.2)
    processes = [
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])
        for seconds in (600, 0)
    ]
    files = [tmp_path / "0.json", tmp_path / "1.json"]
    assert run_to_end(processes, files, 600) == "rank 0 had not ended 0 s after another"
    assert processes[0].poll() is not None


def test_a_line_that_is_not_whole_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "answers.json"
    answers = Answers(path)
    monkeypatch.setitem(process.STEPS_S, "one", 90.0)
    try:
        answers.begin("one")
        assert answers_in(path) == {"one": (BEGUN, "90 s")}
        answers.write("one", "passed", "")
        assert answers_in(path) == {"one": ("passed", "")}
        answers.begin(CLOSING)
        wanted = {"one": ("passed", ""), CLOSING: (BEGUN, "60 s")}
        assert answers_in(path) == wanted
        path.write_text(path.read_text() + '["tw')
        assert answers_in(path) == wanted
    finally:
        faulthandler.cancel_dump_traceback_later()
