"""The command: choices, run files, missing packages, and two small contenders for real."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from anygauge.config.load import load_run_file
from benchmarks.entrants import ENTRANTS, chosen, processes
from benchmarks.plan import ContenderPlan
from benchmarks.processes import ROOT, shared_environment
from benchmarks.train_vs_peers import chosen_workloads, named
from tests.benchmarks.test_measure import plan


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
    with pytest.raises(typer.BadParameter, match="choose from"):
        chosen("torchtune")


def test_a_plan_is_read_back_as_written(tmp_path: Path) -> None:
    written = plan(tmp_path, layout="packed", dtype="bfloat16")
    written.save(tmp_path / "plan.json")
    assert ContenderPlan.load(tmp_path / "plan.json") == written
    assert dataclasses.replace(written, accumulation=3).global_batch == 6


@pytest.mark.parametrize("name", [n for n, e in ENTRANTS.items() if e.module is None])
def test_run_files_say_what_the_plan_says(tmp_path: Path, name: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    given = plan(
        tmp_path, layout=ENTRANTS[name].layout, rows=str(tmp_path / "rows.jsonl"), accumulation=3
    )
    processes(ENTRANTS[name], given, {})
    run = load_run_file(tmp_path / "run.yaml").run
    assert run.data.packing == (given.layout == "packed")
    assert run.data.group_by_length == (given.layout == "grouped")
    assert run.train.global_batch_size == 6
    assert run.train.optimizer.lr == given.lr
    assert run.adapter is not None
    assert (run.adapter.r, run.adapter.alpha) == (16, 32)


def test_several_machines_are_those_of_the_host_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    given = plan(
        tmp_path, has_prompts=False, rows=str(tmp_path / "rows.jsonl"), hostfile="/hosts", nodes=2,
        ranks=4, watched=2,
    )  # fmt: skip
    processes(ENTRANTS["anygauge-ddp"], given, {})
    launch = load_run_file(tmp_path / "run.yaml").run.launch
    assert (launch.launcher, launch.nodes, launch.devices) == ("ssh", 2, 2)
    assert launch.options == {"hostfile": "/hosts"}
    # By which the ranks there are measured.
    passed = shared_environment(given)
    assert set(launch.pass_environment) <= set(passed)
    assert passed["ANYGAUGE_BENCHMARK_WATCH"] == "2:1"


def test_ranks_of_peers_are_told_who_they_are(tmp_path: Path) -> None:
    started = processes(ENTRANTS["trainer"], plan(tmp_path), {"OMP_NUM_THREADS": "1"})
    assert [environment["RANK"] for environment in started.environments] == ["0", "1"]
    assert all(environment["OMP_NUM_THREADS"] == "1" for environment in started.environments)
    assert ContenderPlan.load(started.argv[-2]) == plan(tmp_path)
    assert started.argv[-1] == "trainer"


def test_a_package_that_is_not_there_is_named() -> None:
    lacking = dataclasses.replace(ENTRANTS["trl"], needs=("json", "no_such_package"))
    assert lacking.missing == ["no_such_package"]


def command(*arguments: Any) -> subprocess.CompletedProcess[str]:
    environment = {name: v for name, v in os.environ.items() if name != "ANYGAUGE_DATA"}
    return subprocess.run(
        [sys.executable, "benchmarks/train_vs_peers.py", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        env=environment,
        stdin=subprocess.DEVNULL,
    )


def test_an_output_that_is_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "table.md").write_text("mine")
    done = command("--output", tmp_path)
    assert done.returncode == 2
    # Where its box breaks a line depends on how long the path is.
    assert "not empty" in " ".join(done.stderr.replace("│", " ").split())
    assert (tmp_path / "table.md").read_text() == "mine"


@pytest.mark.slow
def test_two_contenders_in_two_rounds(tmp_path: Path) -> None:
    done = command(
        *("--workload", "generated", "--contenders", "anygauge,unsharded", "--rounds", 2),
        *("--steps", 3, "--warmup", 1, "--layers", 1, "--hidden", 32, "--heads", 2),
        *("--vocabulary", 400, "--max-length", 96, "--micro-batch", 1, "--accumulation", 2),
        *("--output", tmp_path / "out"),
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    record = json.loads((tmp_path / "out" / "results.json").read_text())["workloads"]["generated"]
    order = [(run["round"], run["name"]) for run in record["runs"]]
    assert order == [(1, "anygauge"), (1, "unsharded"), (2, "unsharded"), (2, "anygauge")]
    for run in record["runs"]:
        assert run["tokens"] == record["runs"][0]["tokens"]
        assert len(run["losses"]) == 3
        assert run["peak_memory"] > 2**27
    ours, bound = record["runs"][:2]
    assert ours["sent"]["reduce_scatter"] > 0
    assert bound["sent"] == {}
    ratio = record["summary"][1]["figures"]["anygauge / this"]
    assert ratio["low"] <= ratio["median"] <= ratio["high"]
    assert "unsharded" in (tmp_path / "out" / "table.md").read_text()
