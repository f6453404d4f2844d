"""Time shares, failures that leave the others standing, the page, and what is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from benchmarks.contender_plan import BenchmarkError
from benchmarks.contender_processes import ROOT
from benchmarks.gpu import __main__ as page_command
from benchmarks.gpu import part, training
from benchmarks.gpu.__main__ import QUICK_S, chosen, hosts_of
from benchmarks.gpu.part import (
    FAILED,
    LATE,
    OK,
    PARTS,
    SKIPPED,
    Context,
    Part,
    PartError,
    Report,
    names,
    page,
    run_parts,
    write,
)
from benchmarks.gpu.pytests import outcomes
from benchmarks.gpu.training import TINY, Prediction, TrainingCase, plan_of, prediction, table
from benchmarks.measure import RunOutcome, TableRow
from benchmarks.measure import table as markdown

PROBE = """
import time
from benchmarks.gpu.part import LATE, SKIPPED, PartError
from benchmarks.measure import TableRow

def well(context, report):
    report.add(TableRow(case="", name="x", figures={"seconds": context.seconds}))

def badly(context, report):
    report.add(TableRow(case="", name="x", figures={"a": 1}))
    raise ValueError("no such card")

def never(context, report):
    report.add(TableRow(case="", name="x", figures={"a": 2}))
    time.sleep(600)

def not_here(context, report):
    raise PartError(SKIPPED, "one card only")

def half(context, report):
    report.add(TableRow(case="", name="x", figures={"a": 3}))
    raise PartError(LATE, "no time was left for y")
"""


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that end in each way."""
    (tmp_path / "probe.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    ways = ("well", "badly", "never", "not_here", "half")
    monkeypatch.setattr(part, "PARTS", {way: Part(way, way, 1, f"probe:{way}") for way in ways})


def context(folder: Path, **changes: Any) -> Context:
    return Context(**{"device": "cpu", "folder": str(folder), "seconds": 0.0, **changes})


def test_a_part_that_fails_leaves_the_others_standing(
    probes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part, "GRACE_S", 0.0)
    order = ["badly", "not_here", "half", "never", "well"]
    results = list(run_parts(order, context(tmp_path / "out"), 30.0))
    badly, skipped, half, never, well = results
    assert [result.part for result in results] == order
    assert badly.status == FAILED and badly.rows[0].figures == {"a": 1}
    assert badly.problem.endswith("ValueError: no such card") and "Traceback" in badly.problem
    # A part that gives its reason shows no traceback.
    assert (skipped.status, skipped.problem) == (SKIPPED, "one card only")
    assert (half.status, half.problem) == (LATE, "no time was left for y")
    assert half.rows[0].figures == {"a": 3}
    assert never.status == LATE and never.rows[0].figures == {"a": 2}
    assert never.problem.startswith("not done after its")
    assert well.status == OK
    # A fifth of the time each; what a part leaves, later ones get.
    assert 5 < badly.allowed <= 6 < skipped.allowed < half.allowed < never.allowed
    assert sum(result.seconds for result in results) < 30


def test_a_part_without_time_is_not_begun(probes: None, tmp_path: Path) -> None:
    (result,) = run_parts(["well"], context(tmp_path / "out"), 1.0)
    assert (result.status, result.problem) == (LATE, "the parts before it left no time")
    assert not (tmp_path / "out").exists()


def test_the_quick_parts_share_all_of_their_time() -> None:
    shares = {name: PARTS[name].share for name in names(full=False)}
    assert sum(shares.values()) == QUICK_S and shares["kit"] >= 120


ROWS = (
    TableRow(case="one", name="anygauge", figures={"tokens/s": 1234.5, "MFU": 0.25},
        predicted={"tokens/s": 2000.0}),
    TableRow(case="one", name="trainer | x", figures={"tokens/s": 1000.0}, note="slow\nvery"),
    TableRow(case="two", name="trl", note="missing"),
)  # fmt: skip


def test_predictions_stand_beside_figures() -> None:
    assert markdown(ROWS)[0] == "| case | contender | tokens/s | planned | MFU | note |"
    assert markdown(ROWS)[2:] == [
        "| one | anygauge | 1,234 | 2,000 | 25.0% |  |",
        "|  | trainer \\| x | 1,000 | - | - | slow very |",
        "| two | trl | - | - | - | missing |",
    ]
    assert markdown(()) == ["Nothing was found."]


def test_the_page_names_what_failed_with_its_error(tmp_path: Path) -> None:
    results = [
        Report(tmp_path, title="A", rows=[*ROWS], notes=["so it is"]),
        Report(tmp_path, title="B", status=FAILED, problem="status 1\nTraceback", allowed=2.0),
    ]
    write(tmp_path, {"card": "NVIDIA X", "cards": 1}, results)
    text = (tmp_path / "page.md").read_text()
    assert text == page({"card": "NVIDIA X", "cards": 1}, results)
    assert "| B | **failed**: status 1 | 0 of 2 |" in text
    assert "```\nstatus 1\nTraceback\n```" in text and "- so it is" in text


def test_a_report_is_whole_after_every_row(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = Report(path)
    assert Report.read(path).rows == []
    for row in ROWS:
        report.add(row)
        assert Report.read(path).rows[-1] == row
    for _ in range(2):
        report.note("once")
    assert Report.read(path).notes == ["once"]


def test_parts_are_chosen_in_their_order() -> None:
    assert chosen("", full=False, predict=False) == names(full=False)
    assert chosen("", full=True, predict=False) == list(PARTS)
    assert chosen("kit, parity", full=False, predict=False) == ["parity", "kit"]
    assert set(chosen("", full=True, predict=True)) < set(PARTS)
    with pytest.raises(typer.BadParameter, match="speed: choose from parity"):
        chosen("speed", full=False, predict=False)


def test_host_files_are_counted(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# two\nnode1 slots=2\n\nnode2 slots=2 # the other\n")
    assert hosts_of(tmp_path / "hosts") == (str(tmp_path / "hosts"), 2)
    assert hosts_of(None) == ("", 1)
    (tmp_path / "none").write_text("# nobody\n")
    for name, reported in (("none", "lists no machine"), ("absent", "cannot be read")):
        with pytest.raises(typer.BadParameter, match=reported):
            hosts_of(tmp_path / name)


CARD = ["NVIDIA H200", 2**37, [9, 0]]


@pytest.mark.parametrize(
    ("torch", "cuda", "cards", "reported"),
    [
        ("2.13.0+cpu", None, [], "is built without CUDA"),
        ("2.13.0", "13.0", [], "sees no usable card"),
        ("2.9.1", "12.8", [CARD, CARD], "2.11 or newer"),
        ("2.13.0", "13.0", [CARD], "GPUS=2, but torch"),
        ("2.13.0+cu130", "13.0", [CARD, CARD], None),
    ],
)
def test_machines_are_described_or_refused(
    torch: str, cuda: str | None, cards: Any, reported: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        page_command, "look", lambda: {"torch": torch, "cuda": cuda, "cards": cards}
    )
    if reported:
        with pytest.raises(BenchmarkError, match=reported):
            page_command.described("cuda", 2)
        return
    described = page_command.described("cuda", 2)
    assert described["card"] == "NVIDIA H200" and described["cards"] == 2
    assert (described["memory, GiB"], described["compute capability"]) == (128.0, "9.0")


def test_plans_become_predictions() -> None:
    plan = {
        "ranks": 2,
        "device": {"load": {"total": 2**29}, "forward": {"total": 2**30}},
        "time": {"tokens_per_s": 10.0, "mfu": 0.5, "flops": 600.0, "tokens": 100, "peak": 120.0},
    }
    found = prediction(plan)
    assert found.figures == {"peak memory, GiB": 2.0, "tokens/s": 10.0, "MFU": 0.5}
    assert (found.flops_per_token, found.peak, found.problem) == (6.0, 120.0, "")
    untimed = prediction({**plan, "time": None, "untimed": "no bandwidth"})
    assert untimed.figures == {"peak memory, GiB": 2.0} and untimed.problem == "no bandwidth"


@pytest.mark.parametrize(
    ("card", "named"),
    [("NVIDIA H100 80GB HBM3", ["--machine", "h100:2"]), ("", []), ("NVIDIA Unheard 1", None)],
)
def test_cards_are_planned_for_by_their_own_name(
    card: str, named: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[str]] = []

    def start(processes: Any) -> Any:
        asked.append(processes.argv)
        processes.logs[0].write_text("no\nplan")
        return nullcontext([SimpleNamespace(poll=lambda: 2)])

    monkeypatch.setattr(training, "started", start)
    where = context(tmp_path, card=card, gpus=2)
    with ExitStack() as stack:
        found = training.planner(where, "x", {"name": "x"}, stack)(5.0)
    if named is None:
        assert not asked and "no description of NVIDIA Unheard 1" in found.problem
    else:
        assert asked[0][list(asked[0]).index("--json") + 1 :] == named
        assert found.problem == "anygauge plan ended with 2: plan"


def test_results_of_tests_are_counted_by_function(tmp_path: Path) -> None:
    (tmp_path / "x.xml").write_text(
        '<testsuites><testsuite><testcase name="test_a[1]"/><testcase name="test_a[2]">'
        '<failure/></testcase><testcase name="test_b"><skipped/></testcase></testsuite>'
        "</testsuites>"
    )
    counts = {name: dict(count) for name, count in outcomes(tmp_path / "x.xml").items()}
    assert counts == {"test_a": {"passed": 1, "failed": 1}, "test_b": {"skipped": 1}}


def planned(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """Run files that the planner is asked about; it predicts nothing."""
    asked: list[Mapping[str, Any]] = []

    def planner(context: Context, name: str, run: Mapping[str, Any], stack: Any) -> Any:
        asked.append(run)
        return lambda timeout_s: Prediction(problem="unknown")

    monkeypatch.setattr(training, "planner", planner)
    return asked


def test_several_machines_are_planned_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = planned(monkeypatch)
    where = context(tmp_path, device="cuda", gpus=2, nodes=2, machine="dgx-h100")
    report = Report(tmp_path / "report.json")
    case = TrainingCase("DDP", ("anygauge-ddp", "ddp"))
    training.compare(where, report, [case], TINY, ranks=4)
    (run,) = asked
    assert (run["backend"], run["strategy"]) == ("cuda", {"name": "ddp"})
    assert run["launch"] == {"nodes": 2, "devices": 2}
    assert [(row.name, row.note) for row in report.rows] == [("anygauge, ddp", "unknown")]
    assert plan_of(where, TINY, ranks=1).nodes == 1  # on one device of this machine


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Contenders in the order in which they run, for no time at all; HF Trainer takes 100 s."""
    order: list[str] = []

    def run_once(entrant: Any, plan: Any, rows: Any, *, folder: Path, round_: int) -> RunOutcome:
        order.append(f"{round_} {folder.parent.parent.name} {entrant.name}")
        seconds = 100.0 if entrant.name == "trainer-single" else 1.0
        return RunOutcome(
            name=entrant.name, round=round_, status="ok", tokens_per_s=10.0, wall_seconds=seconds
        )

    planned(monkeypatch)
    monkeypatch.setattr(training, "run_once", run_once)
    monkeypatch.setattr(training, "prepare_rows", lambda workload, plan: (None, plan, workload))
    monkeypatch.setattr(training, "make_model", lambda plan: 7)
    return order


def test_every_case_runs_once_before_any_runs_twice(trained: list[str], tmp_path: Path) -> None:
    report = Report(tmp_path / "report.json")
    training.one_device(context(tmp_path, seconds=1000.0), report)
    assert trained[:6] == [
        "1 full anygauge-single",
        "1 full trainer-single",
        "1 generated anygauge-single",
        "1 generated trainer-single",
        "1 generated anygauge-single-packed",
        "2 full trainer-single",
    ]
    assert [row.case for row in report.rows] == ["unsharded"] * 2 + ["padded"] * 2 + ["packed"]


def test_what_no_time_was_left_for_is_named(trained: list[str], tmp_path: Path) -> None:
    report = Report(tmp_path / "report.json")
    with pytest.raises(PartError, match="no time was left for padded: HF Trainer") as raised:
        training.one_device(context(tmp_path, seconds=90.0), report)
    assert raised.value.status == LATE
    assert "2 full anygauge-single" in trained


def test_what_trained_and_failed_afterwards_has_figures() -> None:
    case = TrainingCase("unsharded", ("anygauge-single", "trainer-single"))
    failed = RunOutcome(
        name="anygauge-single", round=1, status="failed", problem="not verified", tokens_per_s=5.0
    )
    never = RunOutcome(name="trainer-single", round=1, status="failed", problem="no memory")
    runs = {(case, "anygauge-single"): [failed], (case, "trainer-single"): [never]}
    ours, theirs = table([case], runs, {})
    assert (ours.figures["tokens/s"], ours.note) == (5.0, "not verified")
    assert (theirs.figures, theirs.note) == ({}, "no memory")
