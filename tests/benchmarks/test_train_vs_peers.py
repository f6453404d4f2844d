"""The command: choices, run files, missing packages, and two small contenders for real."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from anygauge.config.load import load_run_file
from benchmarks import session
from benchmarks.contender_plan import ContenderPlan
from benchmarks.contender_processes import Ended, Processes, shared_environment
from benchmarks.entrants import ENTRANTS, chosen, processes
from benchmarks.train_vs_peers import chosen_workloads, named
from benchmarks.workload_rows import WrittenRows
from tests.benchmarks.commands import run
from tests.benchmarks.test_measure import plan, two_ranks


def test_all_stands_for_what_there_is_data_for(tmp_path: Path) -> None:
    assert chosen_workloads("all", str(tmp_path)) == ["full", "gsm8k", "alpaca"]
    assert chosen_workloads("all", "") == ["full", "generated"]
    with pytest.raises(typer.BadParameter, match="'gsm'"):
        chosen_workloads("gsm", "")


def test_full_rows_need_no_grouping_and_no_packing() -> None:
    assert "anygauge-packed" not in named("all", "full").split(",")
    on_several = [entrant for entrant in ENTRANTS.values() if not entrant.alone]
    assert chosen(named("all", "gsm8k")) == on_several
    assert chosen(named("trainer-single", "gsm8k")) == [ENTRANTS["trainer-single"]]
    assert chosen("trl, anygauge,trl") == [ENTRANTS["trl"], ENTRANTS["anygauge"]]
    with pytest.raises(typer.BadParameter, match="'torchtune': choose from anygauge, "):
        chosen("torchtune")


@pytest.mark.parametrize("name", [n for n, e in ENTRANTS.items() if e.module is None])
def test_run_files_say_what_the_plan_says(tmp_path: Path, name: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    given = plan(
        tmp_path, layout=ENTRANTS[name].layout, rows=str(tmp_path / "rows.jsonl"), accumulation=3,
        hostfile="/hosts", nodes=2, ranks=4, watched=2, plans_memory=False,
    )  # fmt: skip
    assert processes(ENTRANTS[name], given, {}).argv[-1] == "--no-plan"
    read = load_run_file(tmp_path / "run.yaml")
    assert read.data.packing == (given.layout == "packed")
    assert read.data.group_by_length == (given.layout == "grouped")
    assert read.train.global_batch_size == given.global_batch == 12
    assert read.train.optimizer.lr == given.lr
    assert read.adapter is not None
    assert (read.adapter.r, read.adapter.alpha) == (16, 32)
    assert (read.launch.launcher, read.launch.nodes, read.launch.devices) == ("ssh", 2, 2)
    assert read.launch.options == {"hostfile": "/hosts"}
    # By which the ranks of another machine are measured.
    passed = shared_environment(given)
    assert set(read.launch.pass_environment) <= set(passed)
    assert passed["ANYGAUGE_BENCHMARK_WATCH"] == "2:1"
    assert "ANYGAUGE_BENCHMARK_PHASES" not in passed
    evaluated = dataclasses.replace(given, evaluates=True)
    assert "ANYGAUGE_BENCHMARK_PHASES" in shared_environment(evaluated)


def test_ranks_of_peers_are_told_who_they_are(tmp_path: Path) -> None:
    given = plan(tmp_path, layout="packed", dtype="bfloat16")
    started = processes(ENTRANTS["trainer"], given, {"OMP_NUM_THREADS": "1"})
    assert ContenderPlan.load(started.argv[-2]) == given
    assert started.argv[-1] == "trainer"
    first, second = started.environments
    assert (first["RANK"], second["RANK"], first["WORLD_SIZE"]) == ("0", "1", "2")
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert first["OMP_NUM_THREADS"] == "1"


def test_our_own_contenders_run_an_older_checkout_too(tmp_path: Path) -> None:
    found = chosen("anygauge-fsdp,trainer", tmp_path)
    assert [each.checkout for each in found] == [None, tmp_path, None]
    assert found[1].title == "before: anygauge, fsdp"
    given = plan(tmp_path)
    (variables,) = processes(found[1], given, shared_environment(given)).environments
    assert variables["PYTHONPATH"].startswith(f"{tmp_path}/benchmarks/shim:{tmp_path}:")


ROWS = WrittenRows(exact=Path("exact"), pool=Path("pool"), vocabulary=8, tokens=80, about="")


@pytest.mark.parametrize(
    ("trained", "last", "status"),
    [
        (True, "trl.Error: logits differ", "failed"),
        (False, "trl.Error: logits differ", "failed"),
        (False, "ModuleNotFoundError: No module named 'trl'", "missing"),
        (False, "error: strategy.name: 'zero' needs deepspeed: pip install it", "missing"),
    ],
)
def test_a_run_that_failed_says_why_and_keeps_its_figures(
    trained: bool, last: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(started: Processes, timeout_s: float) -> Ended:
        folder = started.logs[0].parent
        if trained:
            two_ranks(folder)
        started.logs[0].write_text(f"loading\n{last}\n  at x.py\n")
        return Ended(seconds=9.0, problem="process 0 ended with status 2", status=2)

    monkeypatch.setattr(session, "run", fail)
    given = plan(tmp_path)
    found = session.run_once(ENTRANTS["deepspeed"], given, ROWS, folder=tmp_path / "run", round_=1)
    assert found.status == status and found.wall_seconds == 9.0
    assert found.problem.startswith(f"process 0 ended with status 2: {last}")
    assert ("pip install 'anygauge[bench]'" in found.problem) is (status == "missing")
    assert (found.tokens_per_s is not None) == trained


def test_weights_that_are_alike_are_drawn_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []

    def draw(argv: list[str], **_: Any) -> Any:
        drawn.append(ContenderPlan.load(argv[3]).llama["max_position_embeddings"])
        folder = Path(argv[4])
        folder.mkdir()
        (folder / "model.safetensors").write_text(argv[4])
        (folder / session.PARAMETERS).write_text("7")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(session.subprocess, "run", draw)
    weights = []
    for workload, positions in (("a", 8), ("b", 8), ("c", 16)):
        (tmp_path / workload).mkdir()
        given = plan(tmp_path, model=str(tmp_path / workload), max_length=positions)
        assert session.make_model(given) == 7
        weights.append((tmp_path / workload / "model.safetensors").read_text())
    assert weights[0] == weights[1] != weights[2]
    assert drawn == [8, 16]


def test_an_output_that_is_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "table.md").write_text("mine")
    done = run("benchmarks.train_vs_peers", "--output", tmp_path)
    assert done.returncode == 2
    # Where its box breaks a line depends on how long the path is.
    assert "not empty" in " ".join(done.stderr.replace("│", " ").split())
    assert (tmp_path / "table.md").read_text() == "mine"


@pytest.mark.slow
def test_two_contenders_in_two_rounds(tmp_path: Path) -> None:
    done = run(
        "benchmarks.train_vs_peers",
        *("--workload", "generated", "--contenders", "anygauge,unsharded", "--rounds", 2),
        *("--steps", 3, "--warmup", 1, "--layers", 1, "--hidden", 32, "--heads", 2),
        *("--vocabulary", 400, "--max-length", 96, "--micro-batch", 1, "--accumulation", 2),
        *("--output", tmp_path / "out"),
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    record = json.loads((tmp_path / "out" / "results.json").read_text())["workloads"]["generated"]
    order = [(each["round"], each["name"]) for each in record["runs"]]
    assert order == [(1, "anygauge"), (1, "unsharded"), (2, "unsharded"), (2, "anygauge")]
    for each in record["runs"]:
        assert each["tokens"] == record["runs"][0]["tokens"]
        assert len(each["losses"]) == 3
        assert each["peak_memory"] > 2**27
    ours, bound = record["runs"][:2]
    assert ours["sent"]["reduce_scatter"] > 0
    assert bound["sent"] == {}
    ratio = record["summary"][1]["figures"]["anygauge / this"]
    assert ratio["low"] <= ratio["median"] <= ratio["high"]
    assert "unsharded" in (tmp_path / "out" / "table.md").read_text()
