"""What is prepared before a run, as its command has it done.

Refusals are in `tests/cli/test_refusals.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anygauge.cli import run as command
from anygauge.config.schema import ModelSection
from anygauge.interface import AnygaugeError, DataError, ModelError, RunFileError
from anygauge.launch import prepare, prepare_call, prepare_endings
from anygauge.launch.decision import Decision
from anygauge.launch.prepare import prepare_run
from anygauge.launch.prepare_request import PrepareAnswer, PrepareRequest
from anygauge.launch.request import read_request
from anygauge.launch.watchdog import ProcessSample
from anygauge.models.hub import HubUnreachableError, download_requests
from anygauge.training.checks import Findings
from tests.helpers.gaudi import without_driver
from tests.helpers.runs import TINY, run_file

CHECK = PrepareRequest(stages=("check",))


def unchecked(request: Any, **_: Any) -> tuple[Any, Findings, Decision]:
    """In place of `prepare_run`."""
    return request, Findings(settings=[]), Decision()


def test_a_dry_run_shows_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    targets = {"targets": ["q_proj"], "r": 4}
    zero, warmup = {"name": "zero"}, {"schedule": {"warmup_steps": 2}}
    path = run_file(tmp_path, data={"max_length": 36}, adapter=targets, strategy=zero, train=warmup)
    assert command(["train", str(path), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert " of 40 rows; " in out and "(from the cache of " not in out
    assert "data.max_length 36 is too short for " in out and "would hold 95% of the rows" in out
    used = int(out.partition(" of 40 rows; ")[0].rpartition(" ")[2])
    assert f"  4 steps, {16 / used:.3g} epochs\n" in out
    assert "  4 rows a step: 2 micro-batches of 2 on each of 1 ranks\n" in out
    assert "learning rate: 3.3e-04 at step 1, 1.0e-03 at step 3, 5.0e-04 at step 4 (adamw" in out
    assert "zero_optimization" not in out
    kept = json.loads((tmp_path / "cache/tiny-zero.json").read_text())
    assert kept["zero_optimization.stage3_param_persistence_threshold"]["reason"]
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_without_permission_is_named(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    path = run_file(tmp_path, output=str(tmp_path / "locked"))
    with pytest.raises(RunFileError, match="locked cannot be written"):
        command(["train", str(path), "--dry-run"])


def test_more_ranks_than_cores_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "prepare", lambda *_, **__: PrepareAnswer())
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    path = run_file(tmp_path, train={"micro_batch_size": 1})
    for devices, lines in ((2, 0), (4, 1)):
        request = read_request(path, [], {"launch.devices": devices}, need_device=False)
        notes = prepare_run(request)[1].notes
        assert [" share 3 processor cores " in note for note in notes] == [True] * lines


@without_driver
def test_a_device_that_is_not_here_is_told_by_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from anygauge.cli import dry_run

    monkeypatch.setattr(dry_run, "prepare_run", unchecked)
    path = str(run_file(tmp_path))
    assert command(["train", path, "--dry-run", "--backend", "hpu"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("ranks cannot start on this machine: ") == 1
    assert "PT_HPU_LAZY_MODE" in shown
    assert command(["env", "--backend", "hpu", "--devices", "8", "--format", "json"]) == 0
    assert "PT_HPU_LAZY_MODE" in capsys.readouterr().out


def test_a_dry_run_notes_what_a_hub_that_is_switched_off_would_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = run_file(tmp_path, model={"name": "nobody/no-such-model"})
    request = read_request(path, [], {}, need_device=False)
    _, found, _ = prepare_run(request, engine=True, plan=False)
    refusal = "model.name: 'nobody/no-such-model' is not a folder here"
    assert found.notes[0].startswith(f"the run would be refused: {refusal}")
    assert "nobody/no-such-model is neither a folder on this machine" in found.notes[1]
    with pytest.raises(ModelError, match=f"^{refusal}"):
        prepare_run(request)


RENDERING = {"event": "rendering", "template": "the chat template of t", "row": "x.jsonl:7"}
RENDERED = {"event": "rendering", "template": "", "row": ""}
HANGS, KILLED = "exec sleep 120", "kill -KILL $$"


def refused(error: str) -> dict[str, str]:
    return {"event": "refused", "error": error, "message": "no"}


ENDINGS: dict[str, tuple[list[dict[str, Any]], str, type[Exception], str]] = {
    "hangs": (
        [{"event": "stage", "name": "data"}],
        HANGS, AnygaugeError, r"no progress for 0 s on the run file's 'data' section",
    ),
    "hangs at a row": (
        [RENDERING],
        HANGS, DataError,
        r"^the chat template of t has not rendered x\.jsonl:7 within 0 s, and may loop",
    ),
    "is killed at a row": (
        [RENDERING],
        KILLED, DataError,
        r"^the chat template of t was to render x\.jsonl:7, and its process ended with signal 9",
    ),
    "is killed": (
        [],
        "echo memory allocation failed >&2; kill -ABRT $$", AnygaugeError,
        r"signal 6, SIGABRT: memory allocation failed",
    ),
    "says nothing more and does not end": (
        [],
        "exec >&-; " + HANGS, AnygaugeError,
        r"checks the run file's 'model' section .* ended with signal 9, SIGKILL\. There",
    ),
    "refuses the model": ([refused("ModelError")], "", ModelError, "^no$"),
    "refuses the run file": ([refused("RunFileError")], "", RunFileError, "^no$"),
    "refuses for a plugin's reason": ([refused("ErrorOfAPlugin")], "", AnygaugeError, "^no$"),
}  # fmt: skip
"""What the process that checks reports, what its shell does then, and what is raised here."""


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PrepareAnswer]:
    """Asks a shell script in the place of the process."""

    def asked(
        *events: dict[str, Any],
        then: str = "",
        limit_s: float | None = None,
        request: PrepareRequest = CHECK,
        **options: Any,
    ) -> PrepareAnswer:
        if limit_s is not None:
            for stage in ("fetch", "data", "plan"):
                monkeypatch.setitem(prepare_endings.LIMITS_S, stage, limit_s)
            monkeypatch.setattr(prepare_endings, "RENDERING_LIMIT_S", limit_s)
            monkeypatch.setattr(prepare_call, "_END_S", limit_s)
        program = tmp_path / "python"
        lines = [f"echo '{json.dumps(event)}'" for event in events]
        program.write_text("\n".join(["#!/bin/sh", "cat > /dev/null", *lines, then, ""]))
        program.chmod(0o755)
        monkeypatch.setattr(prepare_call, "sys", SimpleNamespace(executable=str(program)))
        return prepare_call.prepare(request, {"PATH": "/usr/bin:/bin"}, **options)

    return asked


@pytest.mark.parametrize("case", ENDINGS)
def test_a_check_that(case: str, ask: Callable[..., PrepareAnswer]) -> None:
    events, then, error, said = ENDINGS[case]
    with pytest.raises(error, match=said):
        ask(*events, then=then, limit_s=0.2 if then.endswith(HANGS) else None)


FETCH = PrepareRequest(fetch=tuple(download_requests(ModelSection(name="somebody/model"))))


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (HANGS, "^nothing arrived from the hub for 0 s: check the network and the disk of HF_HOME"),
        ("echo no >&2; " + KILLED, "^fetching the model ended with signal 9, SIGKILL: no$"),
    ],
    ids=["hangs", "is killed"],
)
def test_a_fetch_that(then: str, said: str, ask: Callable[..., PrepareAnswer]) -> None:
    with pytest.raises(HubUnreachableError, match=said):
        ask(then=then, limit_s=0.2, request=FETCH)


def test_one_that_nobody_waits_for_any_more_is_ended(ask: Callable[..., PrepareAnswer]) -> None:
    turns = iter([True, True, False, False])
    assert ask(then=HANGS, request=FETCH, turn=lambda: next(turns)) == PrepareAnswer()


FOUND = {"event": "found", "fields": {"found": {"data": "40 rows"}}}


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (HANGS, "a plan takes longer than 0 s; `anygauge plan RUN.yaml` waits for it"),
        (
            "echo no >&2; " + KILLED,
            "the process that plans ended with signal 9, SIGKILL: no. There may be too little "
            "memory; a smaller data.max_length or train.micro_batch_size needs less",
        ),
    ],
    ids=["takes long", "is killed"],
)  # fmt: skip
def test_a_plan_that_stops_no_run(then: str, said: str, ask: Callable[..., PrepareAnswer]) -> None:
    request = PrepareRequest(stages=("check", "plan"))
    stage = {"event": "stage", "name": "plan"}
    answer = ask(FOUND, stage, then=then, limit_s=0.2, request=request)
    assert answer.found.data == "40 rows"
    assert answer.decided == Decision(note=f"memory was not planned: {said}")


def test_what_follows_a_rendering_has_not_its_limit(ask: Callable[..., PrepareAnswer]) -> None:
    then = f"sleep 2; echo '{json.dumps(FOUND)}'; echo '{json.dumps(DONE)}'"
    assert ask(RENDERING, RENDERED, then=then, limit_s=1.5).found == Findings(data="40 rows")


DONE = {"event": "done"}


def test_a_busy_processor_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process waits for it does not count, nor time that this one was stopped for."""
    clock = iter([0.0, 1.0, 2.0, 3.0, 90.0])
    monkeypatch.setattr(prepare_call, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    samples = iter([(5.0, "R"), (5.1, "R"), (6.1, "R"), (6.1, "S"), (6.1, "S")])
    monkeypatch.setattr(prepare_call, "sample_process", lambda pid: ProcessSample(*next(samples)))
    silence = prepare_call._SilenceClock(1)
    found = [silence.seconds() for _ in range(4)]
    assert found == pytest.approx([0.1, 1.1, 2.1, 2.1 + prepare_call._FROZEN_S])


def test_what_a_check_could_not_do_is_told_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = PrepareAnswer(unchecked="torch is not installed here")
    monkeypatch.setattr(prepare, "prepare", lambda *_, **__: answer)
    request = read_request(run_file(tmp_path), [], {}, need_device=False)
    _, found, expected = prepare_run(request, plan=True)
    assert found.notes == ["only the ranks will check model and rows: torch is not installed here"]
    assert expected.note == "memory was not planned: torch is not installed here"


@pytest.mark.slow
def test_an_expression_that_would_take_for_ever_is_such_a_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(prepare_endings.LIMITS_S, "model", 20.0)
    path = run_file(tmp_path, adapter={"targets": "(.*.*.*.*.*.*.*)*x"})
    with pytest.raises(AnygaugeError, match=r"no progress for 20 s .* at regular expressions for"):
        command(["train", str(path)])
    assert not (tmp_path / "out").exists()


def test_a_dry_run_of_many_ranks_works_out_few_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from anygauge.cli import dry_run

    asked: list[int] = []
    resolve = dry_run.rank_environments

    def noted(registry: Any, job: Any, ranks: Any) -> Any:
        asked.extend(ranks)
        return resolve(registry, job, ranks)

    monkeypatch.setattr(dry_run, "rank_environments", noted)
    monkeypatch.setattr(dry_run, "prepare_run", unchecked)
    path = run_file(
        tmp_path, train={"global_batch_size": 8192}, model={"config": TINY, "tokenizer": "t"}
    )
    (tmp_path / "t").mkdir()
    assert command(["train", str(path), "--dry-run", "--no-plan", "--devices", "4096"]) == 0
    assert len(asked) <= 17 and asked[-1] == 4095
    assert "ranks 0 to 15 and 4095" in capsys.readouterr().out
