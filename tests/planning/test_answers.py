"""Answers of ``anygauge plan`` for runs whose memory is a formula: verdict, tables, JSON, layouts,
the largest that fits, what to change; most of them stand in ``answers.yaml``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from anygauge.cli import lines
from anygauge.config.schema import RunFile
from anygauge.interface import AnygaugeError, Card, RunFileError, UnsupportedError
from anygauge.planning.fit import GIB
from anygauge.planning.memory import RunMemory, Traffic, Work
from anygauge.planning.trials import Target, Trials, changed
from anygauge.registry import Registry
from tests.docs.pages import ROOT, section, table_names
from tests.helpers.runs import TINY
from tests.planning.standins import CARD, Formula, PlanCommand, in_words, machine, names, run

REGISTRY = Registry.load()
TARGET = Target(backend="cpu", card=CARD)
CASES: Mapping[str, dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "answers.yaml").read_text(encoding="utf-8")
)["cases"]
EVERYTHING = ("--suggest", "--strategies", "--compare", "small:8")


@pytest.fixture
def plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> PlanCommand:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(TINY))
    return PlanCommand(tmp_path, monkeypatch, capsys)


def at(record: Any, path: str) -> Any:
    """What stands there."""
    name, _, rest = path.partition(".")
    if name == "*":
        return [at(one, rest) for one in record]
    found = record[int(name)] if isinstance(record, list) else record[name]
    return at(found, rest) if rest else found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_answer(
    case: dict[str, Any], plan: PlanCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    formula = Formula.of(case.get("needs", "GIB"), case.get("host", "0"), **case.get("of", {}))
    options, sections = case.get("options", "").split(), case.get("run", {})
    if "missing" in case:
        monkeypatch.setattr("anygauge.training.strategy.missing_of", lambda spec: case["missing"])
    if "raises" in case:
        with pytest.raises(AnygaugeError, match=case["raises"]):
            plan.text(formula, *options, **sections)
        return
    found = plan.record(formula, *options, **sections)
    assert len(formula.runs) < 60
    for path, value in case.get("json", {}).items():
        assert at(found, path) == value, path
    for path, words in case.get("has", {}).items():
        assert [word for word in words if word not in at(found, path)] == []
    for path, words in case.get("lacks", {}).items():
        assert [word for word in words if word in at(found, path)] == []
    if "tried" in case:
        own = names(formula.runs[0])["strategy"], formula.runs[0].strategy
        others = [one for one in formula.runs if one.strategy != own[1]]
        assert [in_words(one) for one in others] == case["tried"]
    flat = " ".join(plan.text(formula, *options, **sections).split())
    assert [text for text in case.get("says", []) if text not in flat] == []


# -- trials ----------------------------------------------------------------------------------------


def test_what_is_alike_is_planned_once(plan: PlanCommand) -> None:
    formula = Formula.of("11 * GIB * batch")
    found = plan.record(formula, *EVERYTHING)
    alike = [one.model_dump_json(exclude={"launch", "name", "output"}) for one in formula.runs]
    assert len(alike) == len(set(alike))
    assert [one["fit"]["fits"] for one in found["machines"]] == [False, False]
    refused = Formula.of("refuse('unlucky')")
    trials = Trials(REGISTRY, plan=refused)
    for launch in ({"devices": 8}, {"nodes": 2, "devices": 4}):
        with pytest.raises(UnsupportedError, match="unlucky"):
            trials(run(launch=launch), TARGET)
    assert len(refused.runs) == 1, "a refusal, too"


@pytest.mark.parametrize(
    ("gib", "name", "fits", "before"),
    [(99, "ddp", True, []), (40, "zero", True, ["ddp", "fsdp"]), (1, "zero", False, [])],
)
def test_a_run_that_names_no_strategy_is_planned_as_it_would_train(
    gib: int, name: str, fits: bool, before: list[str]
) -> None:
    sizes = "{'ddp': 90, 'fsdp': 50, 'zero': 20}[strategy] * GIB"
    formula = Formula.of(f"refuse('unlucky') if offload != 'none' else {sizes}")
    target = Target(backend="cpu", card=Card(name="card", memory=gib * GIB))
    found = Trials(REGISTRY, plan=formula)(run(strategy={"name": "auto"}), target)
    assert (found.run.strategy.name, found.fits) == (name, fits)
    others = [form.strategy.name for form, _ in found.passed_over]
    assert others == before if fits else {"ddp", "fsdp", "zero"} <= set(others)
    refused = [error for _, error in found.passed_over if isinstance(error, UnsupportedError)]
    assert bool(refused) is not fits


def test_an_optimizer_on_a_disk_is_planned_in_memory() -> None:
    formula = Formula.of("20 * GIB")
    nvme = {"name": "zero", "offload": "optimizer", "nvme": "/disk"}
    target = Target(backend="cpu", card=CARD, machine=machine(disk=1))
    found = Trials(REGISTRY, plan=formula)(run(strategy=nvme), target)
    assert found.fit is not None and list(found.fit.lacking) == ["disk"]
    assert formula.runs == [run(strategy={"name": "zero", "offload": "optimizer"})]


def test_lines_that_no_run_file_can_have() -> None:
    with pytest.raises(RunFileError, match="exactly one of 'name'"):
        changed(run(), {"model.name": "a/b"})


# -- text and JSON ---------------------------------------------------------------------------------


def test_text_on_eighty_columns(plan: PlanCommand) -> None:
    sections = {"strategy": {"name": "ddp"}, "train": {"optimizer": {"name": "adafactor"}}}
    shown = plan.text(Formula.of("11 * GIB * batch"), *EVERYTHING, **sections)
    assert "…" not in shown, "nothing is cut"
    long = [line for line in shown.splitlines() if len(line) > 80]
    assert all(line.startswith("     --set ") for line in long), "but what is copied"
    for line in (r"GiB .*backward", r"on top .*7\.4", r"needed .*95\.4", r"left .*-55\.4"):
        assert re.search(rf"^ {line}\b", shown, re.M), line
    assert re.search(r"^ *eight +8 +no +95\.4 +-55\.4 +backward +\? +\? *$", shown, re.M)
    flat = " ".join(shown.split())
    for text in (
        "Kernels assumed: attention fused, linear_cross_entropy chunked",
        "No backend here drives square; planned with ",
        "no description has a machine of 8 small",
        "Largest micro-batch on this card: train.micro_batch_size: 3, train.global_batch_size: 24 ",
        "Longest rows on this card: none fits",
        "refused: fsdp: ",
        "What to change, cheapest first: 1. fits: needs 26.1 GiB: more, smaller forwards --set ",
    ):
        assert text in flat, text
    assert "\n     --set train.micro_batch_size=2\n" in shown


def test_the_keys_of_json_are_documented_and_always_there(plan: PlanCommand) -> None:
    documented = table_names(section(ROOT / "docs/planning.md", "## For programs"))
    asked, bare = (
        plan.record(Formula.of(size, host="GIB"), *options)
        for size, options in (("11 * GIB * batch", EVERYTHING), ("20 * GIB", ()))
    )
    assert set(asked) == set(bare) == documented
    assert {key for key, value in bare.items() if value is None} == {
        *("time", "positions"),
        *("changes", "machines", "strategies"),
    }
    for path, value in {
        "fits": False,
        "fit.shared.host memory.1": 64 * GIB,
        "changes.0.set": ["train.micro_batch_size=2"],
        "changes.0.lines": {"train.micro_batch_size": 2},
        "largest.batch.lines": {"train.micro_batch_size": 3, "train.global_batch_size": 24},
        "largest.rows.lines": {},
        "machines.*.name": ["eight", "small:8"],
        "machines.0.phase": "backward",
    }.items():
        assert at(asked, path) == value, path


# -- time ------------------------------------------------------------------------------------------


def by_second(nodes: int = 1) -> Formula:
    """Each rank multiplies for a second, and gathers."""
    group = tuple(range(8 * nodes))
    gather = Traffic(operation="all_gather", group=group, waited=False, times=9, bytes=80e9)
    work = Work(flops={"bfloat16": 80e12}, traffic=(gather,))
    return Formula.of("20 * GIB", work=work, model_flops=(400e12 / 65_536, 0.0))


@pytest.mark.parametrize(("nodes", "link"), [(1, "in a machine"), (2, "between machines")])
def test_a_step_its_parts_and_the_run(nodes: int, link: str, plan: PlanCommand) -> None:
    options = ("--nodes", str(nodes), "--machine", "quick")
    found, shown = plan.record(by_second(nodes), *options), plan.text(by_second(nodes), *options)
    time, ranks = found["time"], 8 * nodes
    assert time["mfu"] == pytest.approx(400e12 / ranks / 1e14 / time["step"])
    for text in (
        f"({time['tokens_per_s'] / ranks:,.0f} each); MFU {time['mfu']:.0%}",
        "matrix products 1.00 s",
        f"sends {link}",
    ):
        assert text in " ".join(shown.split()), text
    assert "  the run: 100 steps, " in shown


def test_faster_ways_come_first(plan: PlanCommand) -> None:
    def by_strategy(run: RunFile, *where: Any) -> RunMemory:
        flops = {"ddp": 90e12, "fsdp": 8e12}.get(run.strategy.name, 900e12)
        return replace(by_second()(run, *where), work=Work(flops={"bfloat16": flops}))

    options = ("--machine", "fast:8", "--strategies")
    found = plan.record(by_strategy, *options)["strategies"]
    steps = [one["time"]["step"] for one in found if one["time"]]
    assert steps == sorted(steps) and len(set(steps)) > 2


def test_without_a_rate_it_says_so(plan: PlanCommand) -> None:
    assert "\nTime: not known: " in plan.text(by_second())


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0123, "12.3 ms"), (1.5, "1.50 s"), (600, "10.0 min"), (90_000, "25.0 h")],
)
def test_times_in_words(value: float, expected: str) -> None:
    assert lines.seconds(value) == expected


# -- the largest that fits -------------------------------------------------------------------------

LINEAR = "5 * GIB + 3 * MIB * batch * length // 8"
BENT = "max(5 * GIB + MIB * batch * length // 40, 3 * MIB * batch * length // 8)"
"""Another phase is the largest from some size on."""
SQUARED = "5 * GIB + 200 * batch**2 * length**2"


@pytest.mark.parametrize("needs", [LINEAR, BENT, SQUARED])
@pytest.mark.parametrize("first", [1, 8, 64])
def test_the_largest_batch_is_exact(needs: str, first: int, plan: PlanCommand) -> None:
    formula = Formula.of(needs)
    batch = {"micro_batch_size": first, "global_batch_size": 16 * first}
    found = plan.record(formula, train=batch)["largest"]["batch"]
    sizes = {one.train.micro_batch_size for one in formula.runs if one.data.max_length == 1024}
    assert needs != LINEAR or first == 64 or len(sizes) == 4, "three plans more"
    number = found["lines"]["train.micro_batch_size"]
    # A step has as many forwards.
    wanted = {"train.micro_batch_size": number, "train.global_batch_size": 16 * number}
    assert found["lines"] == wanted and found["fit"]["fits"]
    beyond = {"micro_batch_size": number + 1, "global_batch_size": 16 * (number + 1)}
    assert not plan.record(formula, train=beyond)["fits"], "one more does not fit"


@pytest.mark.parametrize("length", [100, 1024, 4096])
def test_the_longest_rows_are_a_multiple(length: int, plan: PlanCommand) -> None:
    found = plan.record(Formula.of(LINEAR), data={"max_length": length})["largest"]["rows"]
    number = found["lines"]["data.max_length"]
    assert found["fit"]["fits"] and number % 64 == 0
    longer = {"max_length": number + 64}
    assert not plan.record(Formula.of(LINEAR), data=longer)["fits"]


# -- what to change --------------------------------------------------------------------------------

WHOLE: dict[str, Any] = {
    "model": {"name": "./model", "tokenizer": "none"},
    "train": {"gradient_checkpointing": False},
    "strategy": {"name": "ddp"},
}


def halved(**more: Any) -> Formula:
    """Whatever is proposed halves it."""

    def needed(run: RunFile) -> int:
        has = names(run)
        halves = (
            run.kernels.get("linear_cross_entropy") == "chunked",
            has["strategy"] != "ddp",
            has["batch"] < 8,
            has["recomputes"],
            has["offload"] in ("optimizer", "both"),
            has["offload"] == "both",
            run.model.quantise is not None,
            getattr(run.model.quantise, "double_quantisation", False),
            run.adapter is not None,
            has["length"] < 1024,
        )
        return 4000 * GIB // 2 ** sum(halves)

    return Formula(needed, **more)


def test_changes_come_in_the_order_of_their_cost(plan: PlanCommand) -> None:
    formula = halved(kernels={"linear_cross_entropy": "reference"})
    single = plan.record(formula, **WHOLE, adapter={"r": 8})["changes"]
    assert [" ".join(one["lines"]) for one in single] == [
        "kernels.linear_cross_entropy",
        "strategy",
        "train.micro_batch_size",
        "train.gradient_checkpointing",
        "strategy",
        "strategy",
        "model.quantise",
        "data.max_length",
    ]
    assert single[0]["lines"] == {"kernels.linear_cross_entropy": "chunked"}
    assert single[6]["lines"]["model.quantise"]["double_quantisation"] is True
    assert not any(one["fit"]["fits"] for one in single)
    found = plan.record(halved(), **WHOLE, adapter=None)["changes"]
    assert {"adapter": {"r": 16}} in [one["lines"] for one in found]


@pytest.mark.parametrize(("quantise", "left"), [("int8", []), ("nf4", [["model.quantise"]])])
def test_what_a_run_has_already_is_not_proposed(
    quantise: str, left: list[list[str]], plan: PlanCommand
) -> None:
    found = plan.record(
        halved(),
        "--suggest",
        model={**WHOLE["model"], "quantise": quantise},
        adapter={"r": 8},
        train={"micro_batch_size": 1},
        strategy={"name": "fsdp", "offload": "both"},
        data={"max_length": 200},
    )
    assert [list(one["lines"]) for one in found["changes"]] == left


@pytest.mark.parametrize("sections", [{}, {"adapter": {"r": 32}, "strategy": {"name": "fsdp"}}])
def test_lines_can_be_set(sections: dict[str, Any], plan: PlanCommand) -> None:
    sections = {**WHOLE, **sections}
    found = plan.record(halved(), **sections)["changes"]
    assert len(found) >= 5
    for one in found:
        options = [word for option in one["set"] for word in ("--set", option)]
        assert plan.record(halved(), *options, **sections)["fit"] == one["fit"]
