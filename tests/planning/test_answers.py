"""Answers of ``anygauge plan`` for runs whose memory is a formula: verdict, tables, JSON, layouts,
the largest that fits, what to change; most of them stand in ``answers.yaml``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from anygauge import cli
from anygauge.config.resolved import values_of
from anygauge.config.schema import RunFile
from anygauge.interface import AnygaugeError, RunFileError, UnsupportedError
from anygauge.planning.fit import GIB
from anygauge.planning.forecast import Peak, RunMemory, Traffic, Work
from anygauge.planning.trials import Plan, with_changes
from anygauge.util import text as lines
from tests.docs.pages import ROOT, section, table_names
from tests.helpers.runs import TINY
from tests.planning.standins import memory, run, values

_FILE = yaml.safe_load((Path(__file__).parent / "answers.yaml").read_text(encoding="utf-8"))
CASES: Mapping[str, dict[str, Any]] = _FILE["cases"]


class Formula:
    """In the place of `plan_run`: bytes of a rank's device and of its host, as expressions of the
    names in answers.yaml. `more` are fields of `RunMemory`; `runs` were planned."""

    def __init__(self, needed: str, host: str = "0", **more: Any) -> None:
        self.runs: list[RunFile] = []
        self._needed, self._host, self._more = needed, host, more
        if "compiled" in more:
            more["uncompiled"] = {"backward": Peak.of({"tensors": 100 * GIB})}

    def __call__(self, run: RunFile, registry: Any, backend: Any, world_size: int) -> RunMemory:
        self.runs.append(run)
        needed, host = (eval(text, names(run)) for text in (self._needed, self._host))
        return memory(needed, host, strategy=run.strategy.name, **self._more)


def refuse(words: str) -> int:
    raise UnsupportedError(words)


def names(run: RunFile) -> dict[str, Any]:
    """What formulas are written with."""
    return {
        **{"stage": 0, "offload": "none", "tp": 1, "nvme": None, **values_of(run)["strategy"]},
        "strategy": run.strategy.name,
        "batch": run.train.micro_batch_size,
        "length": run.data.max_length,
        "recomputes": run.train.activations.every == 1,
        "chunked": run.kernels.get("linear_cross_entropy") == "chunked",
        "adapts": run.adapter is not None,
        "quantized": run.model.quantize is not None,
        "double": getattr(run.model.quantize, "double_quantization", False),
        "refuse": refuse,
        "GIB": GIB,
        "MIB": GIB // 1024,
    }


def in_words(run: RunFile) -> str:
    """A strategy, with what of it is not as usual."""
    has = names(run)
    fields = [name for name in ("stage", "offload", "tp") if has[name] not in (0, 1, 3, "none")]
    return " ".join([has["strategy"], *(f"{name} {has[name]}" for name in fields)])


Command = Callable[..., str]


@pytest.fixture
def plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """What ``anygauge plan`` prints of a run, on eight square cards where no others are named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    Path("cards.toml").write_text(_FILE["hardware"])
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(TINY))

    def planned(formula: Plan, *options: str, **sections: Any) -> str:
        monkeypatch.setattr("anygauge.planning.memory_plan.plan_run", formula)
        Path("run.yaml").write_text(yaml.safe_dump(values(sections)))
        where = () if "--machine" in options else ("--machine", "eight")
        assert cli.run(["plan", "run.yaml", "--hardware", "cards.toml", *where, *options]) == 0
        shown = capsys.readouterr()
        assert shown.err == ""
        return shown.out

    return planned


def record(plan: Command, formula: Plan, *options: str, **sections: Any) -> dict[str, Any]:
    """What it prints for programs."""
    found: dict[str, Any] = json.loads(plan(formula, *options, "--json", **sections))
    return found


def at(record: Any, path: str) -> Any:
    """What stands there."""
    name, _, rest = path.partition(".")
    if name == "*":
        return [at(one, rest) for one in record]
    found = record[int(name)] if isinstance(record, list) else record[name]
    return at(found, rest) if rest else found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_answer(case: dict[str, Any], plan: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    formula = Formula(case.get("needs", "GIB"), case.get("host", "0"), **case.get("of", {}))
    options, sections = case.get("options", "").split(), case.get("run", {})
    if "missing" in case:
        monkeypatch.setattr(
            "anygauge.training.build_strategy.missing_of", lambda spec: case["missing"]
        )
    if "raises" in case:
        with pytest.raises(AnygaugeError, match=case["raises"]):
            plan(formula, *options, **sections)
        return
    found = record(plan, formula, *options, **sections)
    alike = [one.model_dump_json(exclude={"launch", "name", "output"}) for one in formula.runs]
    assert len(alike) == len(set(alike)) < 60, "what is alike is planned once"
    for path, value in case.get("json", {}).items():
        assert at(found, path) == value, path
    for path, words in case.get("has", {}).items():
        assert [word for word in words if word not in at(found, path)] == []
    for path, words in case.get("lacks", {}).items():
        assert [word for word in words if word in at(found, path)] == []
    if "tried" in case:
        assert [*dict.fromkeys(map(in_words, formula.runs))] == case["tried"]
    shown = plan(formula, *options, **sections)
    assert [text for text in case.get("says", []) if text not in " ".join(shown.split())] == []
    assert [line for line in case.get("lines", []) if not re.search(line, shown, re.M)] == []
    long = [line for line in shown.splitlines() if len(line) > 80 or "…" in line]
    assert [line for line in long if not line.startswith("     --set ")] == [], "what is copied"
    for one in found["changes"] or ():
        changed_by = [word for option in one["set"] for word in ("--set", option)]
        assert record(plan, formula, *options, *changed_by, **sections)["fit"] == one["fit"]


def test_the_keys_of_json_are_documented_and_always_there(plan: Command) -> None:
    documented = table_names(section(ROOT / "docs/planning.md", "## For programs"))
    everything = ("--suggest", "--strategies", "--compare", "small:8")
    assert set(record(plan, Formula("GIB", host="GIB"), *everything)) == documented
    bare = record(plan, Formula("20 * GIB"))
    assert set(bare) == documented
    missing = {"time", "positions", "changes", "machines", "strategies"}
    assert {key for key, value in bare.items() if value is None} == missing


def test_lines_that_no_run_file_can_have() -> None:
    with pytest.raises(RunFileError, match="exactly one of 'name'"):
        with_changes(run(), {"model.name": "a/b"})


# -- time ------------------------------------------------------------------------------------------


def by_second(nodes: int = 1) -> Formula:
    """Each rank multiplies for a second, and gathers."""
    group = tuple(range(8 * nodes))
    gather = Traffic(operation="all_gather", group=group, waited=False, times=9, bytes=80e9)
    work = Work(flops={"bfloat16": 80e12}, traffic=(gather,))
    return Formula("20 * GIB", work=work, model_flops=(400e12 / 65_536, 0.0))


@pytest.mark.parametrize(("nodes", "link"), [(1, "in a machine"), (2, "between machines")])
def test_a_step_its_parts_and_the_run(nodes: int, link: str, plan: Command) -> None:
    options = ("--nodes", str(nodes), "--machine", "quick")
    found, shown = record(plan, by_second(nodes), *options), plan(by_second(nodes), *options)
    time, ranks = found["time"], 8 * nodes
    assert time["tokens_per_s"] == pytest.approx(64 * 1024 / time["step"])
    assert time["mfu"] == pytest.approx(400e12 / ranks / 1e14 / time["step"])
    for text in (
        f"({time['tokens_per_s'] / ranks:,.0f} each); MFU {time['mfu']:.0%}",
        "matrix products 1.00 s",
        f"sends {link}",
    ):
        assert text in " ".join(shown.split()), text
    assert "  the run: 100 steps, " in shown


def test_faster_ways_come_first(plan: Command) -> None:
    def by_strategy(run: RunFile, *where: Any) -> RunMemory:
        flops = {"ddp": 90e12, "fsdp": 8e12}.get(run.strategy.name, 900e12)
        return replace(by_second()(run, *where), work=Work(flops={"bfloat16": flops}))

    options = ("--machine", "fast:8", "--strategies")
    found = record(plan, by_strategy, *options)["strategies"]
    steps = [one["time"]["step"] for one in found if one["time"]]
    assert steps == sorted(steps) and len(set(steps)) > 2


def test_times_in_words() -> None:
    found = [lines.format_time(value) for value in (0.0123, 1.5, 600, 90_000)]
    assert found == ["12.3 ms", "1.50 s", "10.0 min", "25.0 h"]


# -- the largest that fits -------------------------------------------------------------------------

LINEAR = "5 * GIB + 3 * MIB * batch * length // 8"
BENT = "max(5 * GIB + MIB * batch * length // 40, 3 * MIB * batch * length // 8)"
"""Another phase is the largest from some size on."""
SQUARED = "5 * GIB + 200 * batch**2 * length**2"


@pytest.mark.parametrize("needs", [LINEAR, BENT, SQUARED])
@pytest.mark.parametrize(
    ("kind", "first"),
    [*(("batch", n) for n in (1, 8, 64)), *(("rows", n) for n in (100, 1024, 4096))],
)
def test_the_largest_is_exact(kind: str, first: int, needs: str, plan: Command) -> None:
    def sized(size: int) -> dict[str, Any]:
        if kind == "rows":
            return {"data": {"max_length": size}}
        # A step has as many forwards.
        return {"train": {"micro_batch_size": size, "global_batch_size": 16 * size}}

    formula = Formula(needs)
    found = record(plan, formula, **sized(first))["largest"][kind]
    sizes = {one.train.micro_batch_size for one in formula.runs if one.data.max_length == 1024}
    assert kind == "rows" or needs != LINEAR or first == 64 or len(sizes) == 4, "three plans more"
    number, step = next(iter(found["lines"].values())), 64 if kind == "rows" else 1
    wanted = {f"{part}.{k}": v for part, of in sized(number).items() for k, v in of.items()}
    assert found["lines"] == wanted and found["fit"]["fits"] and number % step == 0
    assert not record(plan, formula, **sized(number + step))["fits"], "one more does not fit"
