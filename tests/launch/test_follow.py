"""A run on the screen: lines, the bar, the end, and Ctrl-C."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from anygauge.interface import STOPPED, JobState
from anygauge.launch.follow import Signals, follow
from anygauge.launch.view import View, evaluation_line, step_line, summary_lines
from anygauge.util.console import Console
from anygauge.util.text import format_bytes
from tests.helpers.child_processes import PATIENCE_S, alive, begin, until
from tests.launch.fakes import FAKE_CLI, FOREVER, read_pid, sends, write_script

STEP = {
    "event": "step",
    "step": 10,
    "steps": 200,
    "loss": 2.34561,
    "lr": 1.9e-4,
    "grad_norm": 0.98,
    "tokens_per_s": 5120.4,
    "peak_memory": 1.2 * 2**30,
}
ENDED = {"event": "ended", "state": "ok", "exit_status": 0, "cause": None}
FAILED = {"event": "ended", "state": "failed", "exit_status": 2, "cause": "rank 1 [bold] died"}


class Played:
    """A job that reports what it is told."""

    record: Mapping[str, Any] | None = None

    def __init__(self, *events: Mapping[str, Any]) -> None:
        self._events = events

    def events(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._events)

    def state(self) -> JobState:
        return JobState(phase="running", text="played")

    def cancel(self) -> None:
        raise AssertionError("nobody asked for the end")


def play(
    *events: Mapping[str, Any], terminal: bool = False, width: int = 120, **options: Any
) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    found = follow(
        Played(*events),
        run_directory="/runs/one",
        console=Console(file=out, force_terminal=terminal, width=width, color_system=None),
        **options,
    ).show("/runs/one", Console(file=err, width=40, color_system=None))
    return found, out.getvalue(), err.getvalue()


SHOWN = "step 10/200  loss 2.3456  lr 1.9e-04  grad 0.98  5,120 tok/s  peak 1.2 GiB"
EVALUATED = {"name": "eval", "step": 5, "eval_loss": 2.0, "perplexity": 7.39}


@pytest.mark.parametrize(
    ("line", "event", "shown"),
    [
        (step_line, STEP, SHOWN),
        (step_line, {"step": 1, "loss": 1.0, "mfu": 0.412}, "step 1  loss 1.0000  mfu 41.2%"),
        (step_line, {"step": 1, "loss": 1.0, "mfu": None}, "step 1  loss 1.0000"),
        (evaluation_line, EVALUATED, "eval at step 5  loss 2.0000  perplexity 7.39"),
        (evaluation_line, {"name": "eval/de", "eval_loss": 2.0}, "eval/de  loss 2.0000"),
        (format_bytes, 0, "0 B"),
        (format_bytes, 1023, "1023 B"),
        (format_bytes, 1536, "1.5 KiB"),
        (format_bytes, 3 * 2**20, "3.0 MiB"),
        (format_bytes, 2**40, "1.0 TiB"),
        (summary_lines, None, []),
    ],
)
def test_each_is_one_line(line: Callable[[Any], Any], event: Any, shown: Any) -> None:
    assert line(event) == shown


def test_a_summary_is_a_line_for_each_single_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a path below it is shown as it would be typed
    summary = {
        "final_loss": 1.25,
        "tokens": 12345,
        "tokens_per_s": 5120.44,
        "warmup_s": 0.4,
        "evaluations": [{"eval_loss": 1.0}],
        "skipped": None,
        "saved": str(tmp_path / "one/adapter"),
        "start_s": 0.05,
        "seconds": 1234.5,
    }
    assert summary_lines(summary) == [
        "final loss  1.25",
        "tokens      12,345",
        "tokens/s    5,120.4",
        "saved       one/adapter",
        "start       50.0 ms",
        "time        20.6 min",
        "to publish  upload one/adapter alone, never the run's whole folder: job.json holds a "
        "secret",
    ]


@pytest.mark.parametrize(
    ("counted", "line"),
    [
        ("allocator", "predicted 3.0 MiB, measured 2.0 MiB (peak of rank 0)"),
        (
            "process",
            "predicted 3.0 MiB of tensors; measured 2.0 MiB, which is all of rank 0's process",
        ),
    ],
)
def test_what_was_planned_stands_beside_what_was_measured(counted: str, line: str) -> None:
    measured = {"measured": {"load": 2**20, "training": 2 * 2**20}, "counted": counted}
    planned = {"predicted": {"load": 2**20, "step": 3 * 2**20}}
    assert summary_lines({"memory": {**planned, **measured}}) == [f"memory  {line}"]
    assert summary_lines({"memory": measured}) == []
    times = {"predicted": 1.2345, "measured": 2.0}
    assert summary_lines({"step_s": times}) == ["step  predicted 1.23 s, measured 2 s"]
    assert summary_lines({"step_s": {"measured": 2.0}}) == []


def test_header_messages_and_summary_appear_and_brackets_stay() -> None:
    status, out, err = play(
        {"event": "started", "steps": 2, "lines": ["model tiny [llama]"], "rank": 0},
        {"event": "started", "steps": 2, "lines": ["model tiny [llama]"], "rank": 1},
        {"event": "message", "text": "[red]3 rows", "level": "info", "rank": 0},
        {"event": "message", "text": "slow disk", "level": "warning", "rank": 1},
        {"event": "rank_exited", "rank": 0, "code": 0, "log": "x"},
        STEP,
        {"event": "finished", "rank": 0, "summary": {"steps": 2}},
        {"event": "finished", "rank": 1},
        ENDED,
    )
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        *("model tiny [llama]", "[red]3 rows", "warning: rank 1: slow disk", SHOWN, "steps  2")
    ]


def test_quiet_leaves_warnings() -> None:
    warning = {"event": "message", "text": "slow disk", "level": "warning"}
    note = {"event": "message", "text": "note", "level": "info"}
    assert play(STEP, note, warning, ENDED, quiet=True)[1] == "warning: slow disk\n"


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_gets_a_bar_with_the_metrics_and_no_line_for_each_step(width: int) -> None:
    steps = (STEP, {**STEP, "step": 200})
    status, out, _ = play(
        {"event": "started", "steps": 200}, *steps, ENDED, terminal=True, width=width
    )
    assert status == 0
    assert step_line(STEP) not in out
    (bar,) = {line for line in re.split(r"[\r\n]|\x1b\[2K", out) if "step 200/200" in line}
    assert "loss 2.3456" in bar and "━━━━" in bar and re.search(r"eta [-0-9:]+$", bar)
    assert ("peak" in bar) == (width == 120)


@pytest.mark.parametrize("rate", [5.0, 5120.4, 5.12e6])
def test_a_bar_shows_as_many_metrics_however_long_a_figure_is(rate: float) -> None:
    begun, step = {"event": "started", "steps": 200}, {**STEP, "tokens_per_s": rate}
    _, out, _ = play(begun, step, ENDED, terminal=True, width=80)
    assert "grad 0.98" in out and "tok/s" not in out


def test_a_failure_is_one_message_on_standard_error_with_the_logs() -> None:
    status, out, err = play(STEP, FAILED)
    assert status == 2
    assert "died" not in out
    assert err == "error: rank 1 [bold] died\nlogs: /runs/one/logs\n"


def test_a_stream_without_an_end_means_that_the_agent_died() -> None:
    status, _, err = play(STEP)
    assert status == 1
    assert "agent died" in err
    assert "see /runs/one/logs/agent0.log" in err


def test_an_error_of_the_launcher_is_not_swallowed_and_ends_the_job() -> None:
    class Broken(Played):
        cancelled = 0

        def events(self) -> Iterator[Mapping[str, Any]]:
            raise LookupError("gone")

        def cancel(self) -> None:
            self.cancelled += 1

    broken = Broken()
    with pytest.raises(LookupError, match="gone"):
        follow(broken, run_directory="/runs/one", console=Console(file=io.StringIO()))
    assert broken.cancelled == 1


class Signalled(Played):
    """A job whose follower gets signals once something is shown, by a wrapper twice each; it ends
    because it is cancelled, or by itself a while later."""

    def __init__(
        self, signum: int, out: io.StringIO, *reported: Mapping[str, Any], times: int = 1
    ) -> None:
        super().__init__(*reported)
        self.signum, self.out, self.times = signum, out, times
        self.cancelled = 0

    def events(self) -> Iterator[Mapping[str, Any]]:
        yield from self._events
        if self._events:
            until(self.out.getvalue, "what was reported")
        for _ in range(self.times):
            os.kill(os.getpid(), self.signum)
            time.sleep(0.3)  # the loop looks at signals meanwhile
        deadline = time.monotonic() + 1.2
        while not self.cancelled and time.monotonic() < deadline:
            time.sleep(0.02)
        if not self.cancelled:
            yield ENDED
        elif self.record is None:
            yield {"event": "ended", "state": "cancelled", "exit_status": 143, "cause": ""}
        else:
            yield {"event": "ended", "state": "stopped", "exit_status": STOPPED, "cause": "asked"}

    def cancel(self) -> None:
        self.cancelled += 1


@pytest.mark.parametrize(
    ("signum", "answer", "status", "cancelled"),
    [
        (signal.SIGTERM, None, 0, 0),
        (signal.SIGINT, None, STOPPED, 1),  # nobody can be asked
        (signal.SIGINT, "d", 0, 0),
        (signal.SIGINT, "c", STOPPED, 1),
        (signal.SIGINT, "", 0, 0),
    ],
)
def test_a_job_elsewhere_is_left_or_cancelled(
    signum: int,
    answer: str | None,
    status: int,
    cancelled: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader) as typed:
        os.write(writer, f"{answer}\n".encode())
        terminal = mock.Mock(wraps=typed, isatty=lambda: answer is not None)
        terminal.fileno = lambda: reader
        monkeypatch.setattr("sys.stdin", terminal)
        out = io.StringIO()
        running = Signalled(signum, out)
        running.record = {"job": 7}
        found = follow(
            running,
            run_directory="/runs/one",
            console=Console(file=out, width=120),
        ).status
        os.close(writer)
    assert (found, running.cancelled) == (status, cancelled)
    assert ("d to detach" in capsys.readouterr().out) is (answer is not None)
    left = signum == signal.SIGTERM or answer == "d"
    assert ("anygauge job follow /runs/one" in out.getvalue()) is left


def test_a_signal_answers_the_question_before_a_line_does(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    answered, signals = threading.Event(), list[int]()

    def interrupt() -> None:
        signals.append(signal.SIGINT)
        if not answered.wait(PATIENCE_S / 4):
            os.write(writer, b"d\n")

    with os.fdopen(reader) as typed, os.fdopen(writer, "w"):
        monkeypatch.setattr("sys.stdin", typed)
        asked = threading.Timer(0.2, interrupt)
        asked.start()
        found = View(Console(file=io.StringIO()), quiet=False).ask("? ", signals)
        answered.set()
        asked.join()
    assert (found, signals) == ("c", [])


def command_line(folder: Path, ranks: dict[int, list[Any]], grace: str) -> subprocess.Popen[str]:
    script = write_script(folder, ranks)
    program = (sys.executable, FAKE_CLI, script)
    return begin(folder / "a run", len(ranks), grace, program=program)


def test_a_terminal_that_takes_no_text_stops_nobody(tmp_path: Path) -> None:
    steps = [sends("step", step=step, loss=1.0) for step in range(20_000)]  # more than a pipe holds
    failed = sends("failed", error="E", message="too late", for_user=True)
    command = command_line(tmp_path, {0: [*steps, ["touch", "sent"], failed, ["exit", 1]]}, "0.5")
    until((tmp_path / "sent").exists, "the last step")
    rank = read_pid(tmp_path / "pid0")
    until(lambda: not alive(rank), "the end of the rank, with nobody reading")
    out, err = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == 1 and "too late" in err, "failures are not dropped"
    assert 0 < out.count("step ") < len(steps)


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_ctrl_c_ends_the_ranks_in_order(tmp_path: Path, signum: int, status: int) -> None:
    command = command_line(tmp_path, {0: [["touch", "up"], FOREVER]}, "30")
    until((tmp_path / "up").exists, "the rank")
    command.send_signal(signum)
    out, err = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == status
    assert "Ctrl-C again to kill" in " ".join(out.split())
    assert "ended on request" in err
    assert "Traceback" not in err
    assert not alive(read_pid(tmp_path / "pid0"))


@pytest.mark.parametrize(
    ("reported", "promised"),
    [
        (None, "no step has been taken, so there is nothing to save"),
        ({"event": "message", "text": "loading"}, "no step has been taken"),
        ({"event": "started", "lines": ["tiny"], "stops": True}, "writing a checkpoint"),
        ({"event": "started", "lines": ["tiny"], "stops": False}, "cannot write checkpoints"),
    ],
)
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_promises_what_comes(
    times: int, reported: Mapping[str, Any] | None, promised: str
) -> None:
    out, err = io.StringIO(), io.StringIO()
    running = Signalled(signal.SIGINT, out, *filter(None, [reported]), times=times)
    ending = follow(running, run_directory="/runs/one", console=Console(file=out, width=120))
    assert ending.show("/runs/one", Console(file=err, width=120)) == 130
    assert ending.signals[0] == signal.SIGINT
    assert running.cancelled == 1
    shown = out.getvalue()
    assert promised in shown and "killing" not in shown and shown.count("Ctrl-C again to kill") == 1
    assert ("writing a checkpoint" in shown) is (promised == "writing a checkpoint")
    begun = "stops" in (reported or {})
    assert ("before the first step; there was nothing to save" in err.getvalue()) is not begun


def test_a_signal_that_came_while_the_job_was_submitted_has_its_answer() -> None:
    cancelled = {"event": "ended", "state": "cancelled", "exit_status": 143, "cause": "SIGTERM"}
    signals = Signals()
    signals.received.append(signal.SIGINT)
    status, out, err = play(cancelled, signals=signals)
    assert status == 130 and "nothing to save" in out
    assert "ended on request before the first step" in err


def test_a_second_ctrl_c_kills(tmp_path: Path) -> None:
    ranks = {0: [["ignore", signal.SIGTERM], ["touch", "up"], FOREVER]}
    command = command_line(tmp_path, ranks, "3600")
    until((tmp_path / "up").exists, "the rank")
    assert command.stdout is not None
    command.send_signal(signal.SIGINT)
    assert "Ctrl-C again" in command.stdout.readline()
    with pytest.raises(subprocess.TimeoutExpired):
        command.wait(timeout=1)  # the rank is deaf, and its grace time long
    command.send_signal(signal.SIGINT)
    _, err = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == 130
    assert "Traceback" not in err
    assert not alive(read_pid(tmp_path / "pid0"))
