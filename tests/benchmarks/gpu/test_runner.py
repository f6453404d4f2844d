"""Time shares, failures that leave the others standing, the page, and what is asked for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer

from benchmarks.gpu import machine, runner
from benchmarks.gpu.__main__ import chosen, hosts_of
from benchmarks.gpu.context import Context
from benchmarks.gpu.page import page, table, write
from benchmarks.gpu.parts import PARTS, Part, names
from benchmarks.gpu.predict import predict, prediction
from benchmarks.gpu.pytests import outcomes
from benchmarks.gpu.result import Report, Result, TableRow, read_report
from benchmarks.gpu.training import TINY, foresee, plan_of
from benchmarks.processes import ROOT

PROBE = """
import sys, time
from benchmarks.gpu.result import TableRow, SkipPartError

def well(context, report):
    report.add(TableRow(case="", name="x", figures={"seconds": context.seconds}))

def badly(context, report):
    report.add(TableRow(case="", name="x", figures={"a": 1}))
    raise ValueError("no such card")

def never(context, report):
    report.add(TableRow(case="", name="x", figures={"a": 2}))
    time.sleep(600)

def not_here(context, report):
    raise SkipPartError("one card only")
"""
ENTRY = """
import sys
sys.path.insert(0, {folder!r})
from benchmarks.gpu import parts, run_part
parts.PARTS = run_part.PARTS = {{
    name: parts.Part(name=name, title=name, share=1, run="parts_of_a_test:" + name)
    for name in ("well", "badly", "never", "not_here")
}}
sys.exit(run_part.main(sys.argv[1], sys.argv[2]))
"""


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Part]:
    """Parts that end well, badly, never, or do not suit; each process knows them."""
    (tmp_path / "parts_of_a_test.py").write_text(PROBE)
    (tmp_path / "entry.py").write_text(ENTRY.format(folder=str(tmp_path)))
    started = subprocess.Popen

    def popen(argv: list[str], **options: Any) -> Any:
        return started([sys.executable, str(tmp_path / "entry.py"), *argv[-2:]], **options)

    monkeypatch.setattr("benchmarks.processes.subprocess.Popen", popen)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = {
        name: Part(name=name, title=name, share=1, run="")
        for name in ("well", "badly", "never", "not_here")
    }
    monkeypatch.setattr(runner, "PARTS", found)
    return found


def context(folder: Path, **changes: Any) -> Context:
    return Context(**{"device": "cpu", "folder": str(folder), "seconds": 0.0, **changes})


def test_a_part_that_fails_leaves_the_others_standing(
    probes: Mapping[str, Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "GRACE_S", 0.0)
    seen: list[str] = []
    order = ["badly", "not_here", "never", "well"]
    results = runner.run_parts(
        order, context(tmp_path / "out"), 24.0, ended=lambda result: seen.append(result.part)
    )
    badly, skipped, never, well = results
    assert seen == order
    assert badly.status == "failed" and badly.rows[0].figures == {"a": 1}
    assert badly.problem.endswith("ValueError: no such card")
    assert (skipped.status, skipped.problem) == ("skipped", "one card only")
    assert never.status == "out of time" and never.rows[0].figures == {"a": 2}
    assert never.problem.startswith("not done after its")
    assert well.status == "ok"
    # A fourth of the time each; what a part leaves, later ones get.
    assert 5 < badly.allowed <= 6 < skipped.allowed < never.allowed
    assert sum(result.seconds for result in results) < 24


def test_a_part_without_time_is_not_begun(probes: Mapping[str, Part], tmp_path: Path) -> None:
    (result,) = runner.run_parts(["well"], context(tmp_path / "out"), 1.0)
    assert (result.status, result.problem) == ("out of time", "the parts before it left no time")
    assert not (tmp_path / "out").exists()


def result(**changes: Any) -> Result:
    fields = {"part": "a", "title": "A part", "status": "ok", "seconds": 1.0, "allowed": 2.0}
    return Result(**{**fields, **changes})


ROWS = (
    TableRow(case="one", name="anygauge", figures={"tokens/s": 1234.5, "MFU": 0.25},
        predicted={"tokens/s": 2000.0}),
    TableRow(case="one", name="trainer | x", figures={"tokens/s": 1000.0}, note="slow\nvery"),
    TableRow(case="two", name="trl", note="missing"),
)  # fmt: skip


def test_predictions_stand_beside_figures() -> None:
    lines = table(ROWS)
    assert lines[0] == "| case | contender | tokens/s | planned | MFU | note |"
    assert lines[2] == "| one | anygauge | 1,234 | 2,000 | 25.0% |  |"
    assert lines[3] == "|  | trainer \\| x | 1,000 | - | - | slow very |"
    assert lines[4] == "| two | trl | - | - | - | missing |"
    assert table(()) == ["Nothing was found."]


def test_the_page_names_what_failed_with_its_error(tmp_path: Path) -> None:
    results = [
        result(rows=ROWS, notes=("so it is",)),
        result(part="b", title="B", status="failed", problem="ended with status 1\nTraceback"),
    ]
    write(tmp_path, {"card": "NVIDIA X", "cards": 1}, results)
    text = (tmp_path / "page.md").read_text()
    assert text == page({"card": "NVIDIA X", "cards": 1}, results)
    assert "| B | **failed**: ended with status 1 | 1 of 2 |" in text
    assert "```\nended with status 1\nTraceback\n```" in text
    assert "- so it is" in text


def test_a_report_is_whole_after_every_row(tmp_path: Path) -> None:
    report = Report(tmp_path / "report.json")
    assert read_report(tmp_path / "report.json") == ((), ())
    for row in ROWS:
        report.add(row)
        assert read_report(tmp_path / "report.json")[0][-1] == row
    report.note("once")
    report.note("once")
    assert read_report(tmp_path / "report.json")[1] == ("once",)


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
    for name, said in (("none", "lists no machine"), ("absent", "cannot be read")):
        with pytest.raises(typer.BadParameter, match=said):
            hosts_of(tmp_path / name)


@pytest.mark.parametrize(
    ("found", "gpus", "said"),
    [
        ({"torch": "2.13.0+cpu", "cuda": None, "cards": []}, 1, "is built without CUDA"),
        ({"torch": "2.13.0", "cuda": "13.0", "cards": []}, 1, "sees no usable card"),
        ({"torch": "2.9.1", "cuda": "12.8", "cards": [["X", 1, [8, 0]]]}, 1, "2.11 or newer"),
        ({"torch": "2.13.0", "cuda": "13.0", "cards": [["X", 1, [8, 0]]]}, 2, "GPUS=2, but torch"),
    ],
)
def test_machines_that_cannot_be_measured(
    found: dict[str, Any], gpus: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "look", lambda: found)
    with pytest.raises(machine.NoCardError, match=said):
        machine.described("cuda", gpus)


def test_a_card_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    card = ["NVIDIA H200", 2**37, [9, 0]]
    found = {"torch": "2.13.0+cu130", "cuda": "13.0", "cards": [card, card]}
    monkeypatch.setattr(machine, "look", lambda: found)
    described = machine.described("cuda", 2)
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
    asked: list[list[str]] = []

    def run(argv: list[str], **_: Any) -> Any:
        asked.append(argv)
        return SimpleNamespace(stdout="", stderr="no\nplan", returncode=2)

    monkeypatch.setattr("benchmarks.gpu.predict.subprocess.run", run)
    found = predict(context(tmp_path, card=card, gpus=2), {"name": "x"})
    if named is None:
        assert not asked and "no description of NVIDIA Unheard 1" in found.problem
    else:
        assert asked[0][asked[0].index("--json") + 1 :] == named
        assert found.problem == "anygauge plan ended with 2: plan"


def test_results_of_tests_are_counted_by_function(tmp_path: Path) -> None:
    (tmp_path / "x.xml").write_text(
        '<testsuites><testsuite><testcase name="test_a[1]"/><testcase name="test_a[2]">'
        '<failure/></testcase><testcase name="test_b"><skipped/></testcase></testsuite>'
        "</testsuites>"
    )
    counts = {name: dict(count) for name, count in outcomes(tmp_path / "x.xml").items()}
    assert counts == {"test_a": {"passed": 1, "failed": 1}, "test_b": {"skipped": 1}}


def test_several_machines_are_planned_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Mapping[str, Any]] = []

    def planned(context: Context, run: Mapping[str, Any]) -> Any:
        seen.append(run)
        return prediction({"ranks": 4, "device": {}, "time": None})

    module: ModuleType = sys.modules["benchmarks.gpu.training"]
    monkeypatch.setattr(module, "predict", planned)
    where = context(tmp_path, device="cuda", gpus=2, nodes=2, machine="dgx-h100")
    plan = plan_of(where, TINY, ranks=4)
    foresee(where, Report(tmp_path / "report.json"), {"DDP": ["anygauge-ddp", "ddp"]}, plan)
    (run,) = seen
    assert (run["backend"], run["strategy"]) == ("cuda", {"name": "ddp"})
    assert run["launch"] == {"nodes": 2, "devices": 2}
