"""What is shown of a plan: layouts of ranks, trials made once, verdict, tables, JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from anygauge.cli import planned
from anygauge.interface import Card, RunFileError, UnsupportedError, UsageError
from anygauge.planning import trials as trials_module
from anygauge.planning.candidates import layouts, section_in_words
from anygauge.planning.changes import largest_batch, nearest
from anygauge.planning.fit import GIB
from anygauge.planning.memory import RunMemory
from anygauge.planning.trials import Target, Trials, changed
from anygauge.registry import Registry
from tests.docs.pages import ROOT, section, table_names
from tests.planning.standins import CARD, TARGET, Tried, machine, memory, run


def answers(step: int = 20 * GIB, **more: Any) -> planned.PlanAnswers:
    tried = Tried(lambda run: step, host=GIB)
    target = Target(backend="cpu", card=CARD, machine=machine(host_memory=64 * GIB))
    return planned.PlanAnswers(trial=tried(run(), target), target=target, **more)


# -- layouts ---------------------------------------------------------------------------------------


def test_every_strategy_and_mesh_of_eight_ranks() -> None:
    found = [section_in_words(one) for one in layouts(Registry.load(), 8, 8)]
    assert {"ddp", "ddp, tp 8", "ddp, pp 2", "fsdp", "fsdp, dp_replicate 4"} <= set(found)
    assert {"fsdp, cp 2", "fsdp, offload both", "zero", "zero, stage 2"} <= set(found)
    assert "fsdp, offload optimizer" not in found, "no such value"
    assert not {"single", "auto", "zero, stage 3", "fsdp, dp_replicate 8"} & set(found)
    assert len(found) == len(set(found))


def test_layers_are_divided_within_a_machine() -> None:
    found = [section_in_words(one) for one in layouts(Registry.load(), 16, 4)]
    assert "ddp, tp 4" in found and "ddp, tp 8" not in found
    assert "fsdp, dp_replicate 8" in found


def test_one_rank_has_no_meshes() -> None:
    found = list(layouts(Registry.load(), 1, 1))
    assert {"name": "single"} in found and not [one for one in found if "tp" in one]


# -- trials ----------------------------------------------------------------------------------------


class CountingPlanner:
    """Counts what it rehearses; refuses rows of 13 tokens."""

    made: list[CountingPlanner] = []

    def __init__(self, world_size: int) -> None:
        self.world_size, self.asked, self.ended = world_size, 0, False
        self.made.append(self)

    def __exit__(self, *error: object) -> None:
        self.ended = True

    def rehearse(self, run: Any, backend: str) -> RunMemory:
        assert getattr(run.strategy, "nvme", None) is None, "no disk is opened"
        self.asked += 1
        if run.data.max_length == 13:
            raise UnsupportedError("unlucky")
        return memory(20 * GIB, host=GIB)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    monkeypatch.setattr(CountingPlanner, "made", [])
    monkeypatch.setattr(trials_module, "Planner", CountingPlanner)
    return Trials(Registry.load())


def test_what_is_alike_is_rehearsed_once(trials: Trials) -> None:
    with trials:
        first = trials(run(), TARGET)
        other = Target(backend="cpu", card=Card(name="small", memory=GIB))
        second = trials(run(name="another", launch={"nodes": 2, "devices": 4}), other)
        assert first.fits and not second.fits
        (planner,) = CountingPlanner.made
        assert planner.asked == 1 and first.memory == second.memory
        trials(run(launch={"devices": 4}), TARGET)
        assert [p.world_size for p in CountingPlanner.made] == [8, 4] and planner.ended
    assert CountingPlanner.made[1].ended


def test_a_refusal_is_asked_for_once(trials: Trials) -> None:
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="unlucky"):
            trials(run(data={"max_length": 13}), TARGET)
    assert CountingPlanner.made[0].asked == 1


def test_a_run_that_names_no_strategy_is_planned_as_it_would_train(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"ddp": 90 * GIB, "fsdp": 50 * GIB, "zero": 20 * GIB}

    def rehearse(self: Any, run: Any, backend: str) -> RunMemory:
        if getattr(run.strategy, "offload", "none") != "none":
            raise UnsupportedError("unlucky")
        return memory(sizes[run.strategy.name])

    monkeypatch.setattr(CountingPlanner, "rehearse", rehearse)
    auto = run(strategy={"name": "auto"})
    assert trials(auto, TARGET).run.strategy.name == "zero"
    large = Target(backend="cpu", card=Card(name="large", memory=99 * GIB))
    assert trials(auto, large).run.strategy.name == "ddp"
    small = trials(auto, Target(backend="cpu", card=Card(name="small", memory=GIB)))
    assert small.run.strategy.name == "zero" and not small.fits
    assert trials(auto, Target(backend="cpu", card=None)).run.strategy.name == "ddp"


def test_an_optimizer_on_a_disk_is_rehearsed_in_memory(trials: Trials) -> None:
    nvme = {"name": "zero", "offload": "optimizer", "nvme": "/disk"}
    target = Target(backend="cpu", card=CARD, machine=machine(disk=1))
    found = trials(run(strategy=nvme), target)
    assert found.fit is not None and list(found.fit.lacking) == ["disk"]


def test_strategies_that_are_refused_are_rows(trials: Trials) -> None:
    rows = planned.try_strategies(run(train={"optimizer": {"name": "adafactor"}}), TARGET, trials)
    refused = {row.name: row.refused for row in rows if row.trial is None}
    assert "adafactor keeps one number per row" in refused["fsdp"] and "ddp" not in refused
    assert [row.trial is None for row in rows] == sorted(row.trial is None for row in rows)


def test_lines_that_no_run_file_can_have() -> None:
    with pytest.raises(RunFileError, match="exactly one of 'name'"):
        changed(run(), {"model.name": "a/b"})


# -- text ------------------------------------------------------------------------------------------


def test_the_verdict_is_one_line() -> None:
    found = answers()
    assert planned.verdict(found.trial, found.target) == (
        "Fits: each square needs 24.0 of 40.0 GiB (step); host memory of a machine: 24.4 of 64.0 "
        "GiB; 16.0 GiB of square stay free"
    )
    found = answers(80 * GIB)
    said = planned.verdict(found.trial, found.target)
    assert said.startswith("Does not fit: each square needs 87.0 of 40.0 GiB (step); ")
    assert said.endswith("; missing: 47.0 GiB of square")


def test_a_card_without_memory_is_told_how_to_add_it() -> None:
    target = Target(backend="cpu", card=Card(name="mine", origin="mine.toml"))
    trial = Tried(lambda run: GIB)(run(), target)
    said = planned.verdict(trial, target)
    assert "mine.toml) does not say how much memory it has. " in said and "[card.mine]" in said
    with pytest.raises(UsageError, match=r"--largest: the description of mine .*--machine h100:8"):
        planned.check_wanted(target, suggest=False, largest=True)
    with pytest.raises(UsageError, match=r"--suggest: no card was found here"):
        planned.check_wanted(Target(backend="cpu", card=None), suggest=True, largest=False)


def test_tables_on_eighty_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trials: Trials
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    tried = Tried(lambda run: 3 * GIB * run.train.micro_batch_size)
    found, page = answers(80 * GIB), planned.Shown()
    page.trial(found.trial, found.target)
    page.rows("machine", [planned.row(run(), TARGET, trials, "eight")])
    page.rows(
        "strategy", [planned.PlanRow(name="odd", card="", ranks=8, trial=None, refused="not odd")]
    )
    page.lines(planned.words_of_largest("batch", largest_batch(run(), TARGET, tried, 8)))
    page.changes(nearest(run(), TARGET, tried, Registry.load()))
    shown = capsys.readouterr().out
    assert "…" not in shown, "nothing is cut"
    for row in (r"GiB .*step", r"on top .*7\.0", r"needed .*87\.0", r"left .*-47\.0"):
        assert re.search(rf"^ {row}\b", shown, re.M)
    assert re.search(r"^ *eight +8 +yes +24\.0 +16\.0 +step +\? +\? *$", shown, re.M)
    assert "refused: odd: not odd" in shown
    assert "\nNo backend here drives square; planned with cpu instead\n" in shown
    flat = " ".join(shown.split())
    assert "Largest batch: train.micro_batch_size: 11, train.global_batch_size: 88; " in flat
    assert max(map(len, shown.splitlines())) <= 80
    assert "     strategy: {name: fsdp}\n     --set strategy=fsdp\n" in shown


def test_nothing_that_helps_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned.record(answers(80 * GIB, changes=[]))["changes"] == []
    planned.Shown().changes([])
    assert capsys.readouterr().out.startswith("None of the changes that were tried fits: ")
    planned.Shown(quiet=True).changes([])
    assert capsys.readouterr().out == ""


# -- JSON ------------------------------------------------------------------------------------------

PAGE = ROOT / "docs/planning.md"


def test_the_keys_of_json_are_documented_and_always_there() -> None:
    bare = planned.record(answers())
    assert table_names(section(PAGE, "## For programs")) == set(bare)
    assert [key for key, value in bare.items() if value is None] == [
        "time",
        "untimed",
        "changes",
        "machines",
        "strategies",
        "scaling",
        "largest",
    ]
    json.dumps(bare)


def test_answers_in_json(trials: Trials) -> None:
    tried = Tried(lambda run: 3 * GIB * run.train.micro_batch_size)
    found = answers()
    found.machines = [planned.row(run(), TARGET, trials, "eight")]
    found.strategies = [
        planned.PlanRow(name="odd", card="", ranks=8, trial=None, refused="not odd")
    ]
    found.largest = ("batch", largest_batch(run(), TARGET, tried, 8))
    found.changes = nearest(run(), TARGET, tried, Registry.load())
    record = json.loads(json.dumps(planned.record(found)))
    assert record["fits"] is True and record["fit"]["shared"]["host memory"]["has"] == 64 * GIB
    assert record["changes"][0]["set"] == ["strategy=fsdp"]
    assert record["changes"][0]["lines"] == {"strategy": {"name": "fsdp"}}
    assert record["largest"]["lines"]["train.micro_batch_size"] == 11
    assert record["largest"]["beyond"]["train.micro_batch_size"] == 12
    assert record["machines"][0]["fit"]["fits"] and record["machines"][0]["phase"] == "step"
    assert record["strategies"][0]["refused"] == "not odd"
    assert record["strategies"][0]["fit"] is None
