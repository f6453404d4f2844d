"""What is shown of a plan: layouts of ranks, trials made once, verdict, tables, JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from anygauge.cli import planned
from anygauge.cli.planned import Page, verdict
from anygauge.interface import (
    AnygaugeError,
    Card,
    NotAvailableError,
    RunFileError,
    UnsupportedError,
)
from anygauge.planning.changes import (
    Choice,
    _in_words,
    largest_batch,
    layouts,
    longest_rows,
    try_strategies,
    what_to_change,
)
from anygauge.planning.fit import GIB
from anygauge.planning.memory import RunMemory
from anygauge.planning.trials import Target, Trial, Trials, changed
from anygauge.registry import Registry
from tests.docs.pages import ROOT, section, table_names
from tests.planning.standins import CARD, TARGET, Tried, machine, memory, run

REGISTRY = Registry.load()
MACHINE = Target(backend="cpu", card=CARD, machine=machine(host_memory=64 * GIB))


def trial(step: int = 20 * GIB) -> Trial:
    return Tried(lambda run: step, host=lambda run: GIB)(run(), MACHINE)


# -- layouts ---------------------------------------------------------------------------------------


def test_every_strategy_and_mesh_of_eight_ranks() -> None:
    found = [_in_words(one) for one in layouts(REGISTRY, 8, 8)]
    assert {"ddp", "ddp, tp 8", "ddp, pp 2", "fsdp", "fsdp, dp_replicate 4"} <= set(found)
    assert {"fsdp, cp 2", "fsdp, offload both", "zero", "zero, stage 2"} <= set(found)
    assert "fsdp, offload optimizer" not in found, "no such value"
    assert not {"single", "auto", "zero, stage 3", "fsdp, dp_replicate 8"} & set(found)
    assert len(found) == len(set(found))


def test_layers_are_divided_within_a_machine_and_one_rank_has_no_meshes() -> None:
    found = [_in_words(one) for one in layouts(REGISTRY, 16, 4)]
    assert {"ddp, tp 4", "fsdp, dp_replicate 8"} <= set(found) and "ddp, tp 8" not in found
    alone = list(layouts(REGISTRY, 1, 1))
    assert {"name": "single"} in alone and not [one for one in alone if "tp" in one]


# -- trials ----------------------------------------------------------------------------------------


class CountingPlanner:
    """In the place of `plan_run`: counts what it plans; refuses rows of 13 tokens."""

    def __init__(self, **sizes: int) -> None:
        self.asked: list[int] = []
        self._sizes = sizes

    def __call__(self, run: Any, registry: Any, backend: Any, world_size: int) -> RunMemory:
        assert getattr(run.strategy, "nvme", None) is None, "what is on a disk is in memory"
        self.asked.append(world_size)
        offloaded = getattr(run.strategy, "offload", "none") != "none"
        if run.data.max_length == 13 or (self._sizes and offloaded):
            raise UnsupportedError("unlucky")
        return memory(self._sizes.get(run.strategy.name, 20) * GIB, host=GIB)


@pytest.fixture
def planner() -> CountingPlanner:
    return CountingPlanner()


@pytest.fixture
def trials(planner: CountingPlanner) -> Trials:
    return Trials(REGISTRY, plan=planner)


def test_what_is_alike_is_planned_once(trials: Trials, planner: CountingPlanner) -> None:
    first = trials(run(), TARGET)
    other = Target(backend="cpu", card=Card(name="small", memory=GIB))
    second = trials(run(name="another", launch={"nodes": 2, "devices": 4}), other)
    assert first.fits and not second.fits and first.memory == second.memory
    trials(run(launch={"devices": 4}), TARGET)
    assert planner.asked == [8, 4]
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="unlucky"):
            trials(run(data={"max_length": 13}), TARGET)
    assert planner.asked == [8, 4, 8], "a refusal, too"


@pytest.mark.parametrize(
    ("gib", "name", "fits", "before"),
    [(99, "ddp", True, []), (40, "zero", True, ["ddp", "fsdp"]), (1, "zero", False, [])],
)
def test_a_run_that_names_no_strategy_is_planned_as_it_would_train(
    gib: int, name: str, fits: bool, before: list[str]
) -> None:
    planner = CountingPlanner(ddp=90, fsdp=50, zero=20)
    target = Target(backend="cpu", card=Card(name="card", memory=gib * GIB))
    found = Trials(REGISTRY, plan=planner)(run(strategy={"name": "auto"}), target)
    assert (found.run.strategy.name, found.fits) == (name, fits)
    names = [form.strategy.name for form, _ in found.passed_over]
    assert names == before if fits else {"ddp", "fsdp", "zero"} <= set(names)
    refused = [error for _, error in found.passed_over if isinstance(error, UnsupportedError)]
    assert bool(refused) is not fits


def test_an_optimizer_on_a_disk_is_planned_in_memory(trials: Trials) -> None:
    nvme = {"name": "zero", "offload": "optimizer", "nvme": "/disk"}
    found = trials(run(strategy=nvme), Target(backend="cpu", card=CARD, machine=machine(disk=1)))
    assert found.fit is not None and list(found.fit.lacking) == ["disk"]


def test_a_card_that_computes_in_other_types_refuses_by_name(trials: Trials) -> None:
    old = Card(name="old", memory=40 * GIB, flops={"float16": 1e14, "float32": 1e13})
    target = Target(backend="cpu", card=old)
    with pytest.raises(UnsupportedError, match=r"bfloat16: .* old .* float16, float32 alone\. Set"):
        trials(run(precision={"param_dtype": "bfloat16"}), target)
    for dtype in ("float32", "auto"):
        assert trials(run(precision={"param_dtype": dtype}), target).fits


def test_what_is_refused_before_it_is_planned(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    adafactor = run(train={"optimizer": {"name": "adafactor"}}, strategy={"name": "fsdp"})
    with pytest.raises(UnsupportedError, match="unlucky"):
        trials.first_that_fits([run(data={"max_length": 13}), adafactor], TARGET)
    odd = run(train={"global_batch_size": 7}, strategy={"name": "ddp", "tp": 3})
    with pytest.raises(AnygaugeError, match=r"strategy\.tp"):
        trials(odd, TARGET)  # and its batch, which depends on that
    monkeypatch.setattr("anygauge.training.strategy.missing_of", lambda spec: "'some-package'")
    with pytest.raises(NotAvailableError, match="'ddp' needs 'some-package'"):
        trials(run(strategy={"name": "ddp"}), TARGET)


def test_strategies_that_are_refused_are_rows(trials: Trials) -> None:
    adafactor = run(train={"optimizer": {"name": "adafactor"}})
    rows = try_strategies(adafactor, TARGET, trials, REGISTRY)
    refused = {one.name: one.why for one in rows if one.trial is None}
    assert "adafactor keeps one number per row" in refused["fsdp"] and "ddp" not in refused
    assert [one.trial is None for one in rows] == sorted(one.trial is None for one in rows)


def test_lines_that_no_run_file_can_have() -> None:
    with pytest.raises(RunFileError, match="exactly one of 'name'"):
        changed(run(), {"model.name": "a/b"})


# -- text ------------------------------------------------------------------------------------------


def test_the_verdict_is_one_line() -> None:
    assert verdict(trial(), MACHINE) == (
        "Fits: each square needs 24.0 of 40.0 GiB (backward); host memory of a machine: 24.4 of "
        "64.0 GiB; 16.0 GiB of square stay free"
    )
    said = verdict(trial(80 * GIB), MACHINE)
    assert said.startswith("Does not fit: each square needs 87.0 of 40.0 GiB (backward); ")
    assert said.endswith("; missing: 47.0 GiB of square")
    blank = Target(backend="cpu", card=Card(name="mine", origin="mine.toml"))
    said = verdict(Tried(lambda run: GIB)(run(), blank), blank)
    assert "mine.toml) does not say how much memory it has. " in said and "[card.mine]" in said


def page_of(found: Trial, *, quiet: bool = False) -> Page:
    tried = Tried(lambda run: 11 * GIB * run.train.micro_batch_size)
    page = Page(quiet=quiet)
    page.trial(found, MACHINE, ["no description has such a machine"])
    asked = tried(run(), TARGET)
    batch, rows = largest_batch(asked, TARGET, tried, REGISTRY), longest_rows(asked, TARGET, tried)
    page.largest(batch, rows)
    odd = Choice("odd", why="not odd")
    eight = Choice("eight").tried(run(), TARGET, Tried(lambda run: 20 * GIB))
    page.rows("machine", "machines", [eight])
    page.rows("strategy", "strategies", [odd])
    page.changes(what_to_change(asked, TARGET, tried, REGISTRY, batch, rows))
    return page


def test_text_on_eighty_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page_of(trial(80 * GIB))
    shown = capsys.readouterr().out
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80, "nothing is cut"
    for line in (r"GiB .*backward", r"on top .*7\.0", r"needed .*87\.0", r"left .*-47\.0"):
        assert re.search(rf"^ {line}\b", shown, re.M)
    assert re.search(r"^ *eight +8 +yes +24\.0 +16\.0 +backward +\? +\? *$", shown, re.M)
    flat = " ".join(shown.split())
    for text in (
        "Kernels assumed: attention fused, linear_cross_entropy chunked",
        "No backend here drives square; planned with cpu instead",
        "no description has such a machine",
        "Largest micro-batch on this card: train.micro_batch_size: 3, train.global_batch_size: 24 ",
        "Longest rows on this card: none fits",
        "refused: odd: not odd",
        "What to change, cheapest first: 1. fits: needs 26.1 GiB: more, smaller forwards --set ",
    ):
        assert text in flat, text
    assert "     --set train.micro_batch_size=2\n" in shown


def test_nothing_that_helps_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    page = Page()
    page.changes(iter([]))
    assert page.record["changes"] == []
    assert capsys.readouterr().out.startswith("No single change that was tried makes it fit: ")


def test_what_a_graph_compiler_saves_is_said_with_its_source() -> None:
    plain = {"backward": memory(100 * GIB).device["backward"]}
    more = {"uncompiled": plain, "compiled": "fitted to one run"}
    found = Tried(lambda run: 20 * GIB, **more)(run(), TARGET)
    (said,) = [line for line in planned._about(found, TARGET) if "compiler" in line]
    assert said == "Without its graph compiler (fitted to one run): 108.0 GiB"


# -- JSON ------------------------------------------------------------------------------------------


def test_the_keys_of_json_are_documented_and_always_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = Page(quiet=True)
    page.trial(trial(), MACHINE, [])
    bare = json.loads(json.dumps(page.record))
    names = table_names(section(ROOT / "docs/planning.md", "## For programs"))
    assert names == set(bare)
    assert {key for key, value in bare.items() if value is None} == {
        *("time", "untimed", "positions", *planned.ASKED)
    }
    asked = json.loads(json.dumps(page_of(trial(), quiet=True).record))
    assert set(asked) == names and capsys.readouterr().out == ""
    assert asked["fits"] is True and asked["fit"]["shared"]["host memory"][1] == 64 * GIB
    assert asked["changes"][0]["set"] == ["train.micro_batch_size=2"]
    assert asked["changes"][0]["lines"] == {"train.micro_batch_size": 2}
    assert asked["largest"]["batch"]["lines"]["train.micro_batch_size"] == 3
    assert asked["largest"]["rows"]["fit"] is None
    assert asked["machines"][0]["fit"]["fits"] and asked["machines"][0]["phase"] == "backward"
    assert (asked["strategies"][0]["why"], asked["strategies"][0]["fit"]) == ("not odd", None)
