"""A run's memory is planned before its ranks start, and what cannot fit is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from anygauge.cli import run as command
from anygauge.config.load import load_run_file
from anygauge.config.resolved import parse_run
from anygauge.config.schema import RunFile
from anygauge.interface import AnygaugeError, Precision, RunFileError
from anygauge.launch import memory_check as launch_memory
from anygauge.launch.decision import DECISION, UNDECIDED, Decision
from anygauge.launch.memory_check import plan_memory
from anygauge.launch.outcome import read_record
from anygauge.launch.prepare import prepare_run
from anygauge.launch.prepare_request import PrepareAnswer, PrepareRequest
from anygauge.launch.request import read_request
from anygauge.planning.forecast import PHASES, Peak, RunMemory, Work
from anygauge.registry import installed_plugins
from anygauge.training.auto import candidates, decided_before, forms_of, in_words
from anygauge.training.checks import Findings
from anygauge_cpu.probe import this_machine
from tests.helpers.gaudi import without_driver
from tests.helpers.jobs import make_job
from tests.helpers.runs import TINY, run_file, trained
from tests.planning import standins

MIB = 2**20
WIDE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 8000}


class StandIn:
    """In the place of the process that prepares: checks nothing, and plans in this one.

    Attributes:
        found: what a plan finds, for all forms or for each by its words.
        requests: those with a plan.
    """

    def __init__(self) -> None:
        self.found: RunMemory | AnygaugeError | Mapping[str, RunMemory | AnygaugeError]
        self.found = takes(MIB)
        self.requests: list[PrepareRequest] = []

    def prepare(self, request: PrepareRequest, *_: Any, **__: Any) -> PrepareAnswer:
        answer = PrepareAnswer(found=Findings(settings=[]))
        if "plan" not in request.stages:
            return answer
        self.requests.append(request)
        registry, run = installed_plugins(), parse_run(request.run)
        every = forms_of(run, registry, run.launch.devices)
        forms = [every[number] for number in request.forms]
        cards, force = request.cards or (), request.force
        decided = plan_memory(run, forms, registry, request.backend, cards, force=force)
        return answer.model_copy(update={"decided": decided})

    def plan(self, run: RunFile, registry: Any, backend: Any, world_size: int) -> RunMemory:
        found = self.found
        answer = found[in_words(run)] if isinstance(found, Mapping) else found
        if isinstance(answer, AnygaugeError):
            raise answer
        return answer


def takes(count: int) -> RunMemory:
    peak = Peak(total=count, kinds={"weights": count})
    return RunMemory(
        work=Work(),
        model_flops=(0.0, 0.0),
        device={"load": peak},
        host={},
        strategy="single",
        precision=Precision(param_dtype="bfloat16", reduce_dtype="float32"),
        numbers=(1, 1),
        per_layer=0,
        kernels={},
    )


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr("anygauge.launch.prepare.prepare", stand_in.prepare)
    monkeypatch.setattr("anygauge.planning.memory_plan.plan_run", stand_in.plan)
    return stand_in


def wide(folder: Path, capacity: int, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Path:
    """A run on a simulated card of so many bytes, which arithmetic alone does not let through."""
    monkeypatch.setenv("ANYGAUGE_SIM_CAPACITY", str(capacity))
    return run_file(
        folder,
        model={"config": {**TINY, **WIDE}, "tokenizer": str(folder / "tokenizer")},
        backend="sim",
        adapter=None,
        **{"strategy": {"name": "single"}, **changes},
    )


def expected(path: Path, *, plan: bool | None = None, **options: Any) -> Decision:
    request = read_request(path, [], options, need_device=False)
    return prepare_run(request, plan=plan)[2]


def test_what_cannot_fit_is_refused_and_leaves_no_folder(
    tmp_path: Path,
    planner: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    planner.found = takes(200 * MIB)
    line = ["train", str(wide(tmp_path, 100 * MIB, monkeypatch))]
    for options in ([], ["--dry-run"]):
        with pytest.raises(RunFileError) as refused:
            command([*line, *options])
        assert refused.value.exit_status == 2
        assert (
            "cannot fit: each rank needs 210.0 MiB in phase 'load' (200.0 MiB weights; 10.0 MiB on "
            "top of tensors), and sim has 100.0 MiB per rank. `anygauge plan RUN.yaml` says what "
            "to change"
        ) in str(refused.value)
        assert not (tmp_path / "out").exists() and capsys.readouterr().out == ""
    assert command([*line, "--dry-run", "--force"]) == 0
    assert "note: the run cannot fit: each rank needs 210.0 MiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("found", "note"),
    [
        (80 * MIB, ""),
        (99 * MIB, "the run may not fit: each rank needs 103.9 MiB"),  # by an estimate alone
        (AnygaugeError("it broke\nthere"), "memory was not planned: it broke"),
    ],
    ids=["fits", "may not fit", "fails"],
)
def test_a_plan_stops_no_run_that_may_fit(
    found: int | AnygaugeError,
    note: str,
    tmp_path: Path,
    planner: StandIn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner.found = takes(found) if isinstance(found, int) else found
    expectation = expected(wide(tmp_path, 100 * MIB, monkeypatch))
    assert expectation.note.startswith(note) and bool(expectation.note) is bool(note)
    if not note:
        (line,) = expectation.lines
        assert (
            line == "memory: needs 80.0 MiB of tensors, 4.0 MiB on top; sim has 100.0 MiB per rank"
        )
        assert expectation.memory == {"load": 80 * MIB}
    assert len(planner.requests) == 1


def test_a_small_run_starts_no_process(
    tmp_path: Path, planner: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = expected(run_file(tmp_path))
    (line,) = found.lines
    assert line.startswith("memory: needs at most ") and line.endswith(", so no plan was made")
    assert planner.requests == []
    assert expected(run_file(tmp_path), plan=True).memory == {"load": MIB}
    assert len(planner.requests) == 1
    path = wide(tmp_path, 100 * MIB, monkeypatch)
    assert expected(path, plan=False) == Decision() and len(planner.requests) == 1


def test_ranks_of_one_host_share_its_memory(
    tmp_path: Path, planner: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The package's `probe` is the function, not the module.
    monkeypatch.setattr(sys.modules[this_machine.__module__], "memory_limit", lambda: 200 * MIB)
    planner.found = takes(150 * MIB)
    path = run_file(tmp_path, model={"config": {**TINY, **WIDE}, "tokenizer": "none"})
    assert expected(path).note.startswith("the run may not fit")
    with pytest.raises(RunFileError, match=r"cpu has 100\.0 MiB per rank"):
        expected(path, **{"launch.devices": 2})


@without_driver
def test_devices_that_nobody_describes_are_left_alone(
    tmp_path: Path, planner: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = wide(tmp_path, 100 * MIB, monkeypatch)
    found = expected(path, backend="hpu")
    (line,) = found.lines
    assert line.startswith("memory: not planned, since no description covers the devices of hpu;")
    assert planner.requests == []


@pytest.mark.slow
def test_what_was_planned_is_kept_beside_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYGAUGE_SIM_LOCKS", str(tmp_path / "locks"))
    path = wide(tmp_path, 2**30, monkeypatch, train={"steps": 2})
    run = trained(path, "--plan")
    memory = json.loads((run.folder / "report.json").read_text())["memory"]
    assert memory["counted"] == "allocator"
    assert set(memory["predicted"]) == set(PHASES)
    measured, predicted = max(memory["measured"].values()), max(memory["predicted"].values())
    # The numbers of the step before, a few bytes, are read once the next step has begun.
    assert measured == max(run.steps("peak_memory")) <= predicted + 64
    assert " MiB (peak of rank 0)" in run.out and "memory: needs " in run.out


# -- strategy: auto --------------------------------------------------------------------------------


def auto(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Path:
    changes = {"strategy": {"name": "auto"}, "launch": {"devices": 2}, **changes}
    return wide(folder, 5 * 2**30, monkeypatch, **changes)


def test_auto_becomes_the_first_that_fits_and_says_why(
    tmp_path: Path, planner: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_memory, "SMALL_PART", 0.0)
    planner.found = {"ddp": takes(4096 * MIB), "fsdp": AnygaugeError("no\nway")}
    planner.found |= {"zero": takes(2048 * MIB)}
    request = read_request(auto(tmp_path, monkeypatch), [], {}, need_device=False)
    chosen, _, found = prepare_run(request)
    why = "ddp would need 6.2 GiB of 5.0 GiB; fsdp cannot: no"
    assert found.lines == (
        f"strategy: zero (auto: {why})",
        "memory: needs 2.0 GiB of tensors, 2.1 GiB on top; sim has 5.0 GiB per rank",
    )
    assert found.strategy == "zero", "the process then checks it as that form, too"
    assert chosen.run.strategy.name == chosen.job.strategy == "zero"
    assert chosen.job.strategy_why == f"auto: {why}"
    assert chosen.job.expected_memory == {"load": 2048 * MIB}


def test_auto_that_fits_nowhere_is_refused_with_what_needs_least(
    tmp_path: Path, planner: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloaded = "fsdp with offload: both"
    planner.found = {name: takes(7 * 2**30) for name in NAMES} | {offloaded: takes(6 * 2**30)}
    monkeypatch.setattr(launch_memory, "SMALL_PART", 0.0)
    with pytest.raises(RunFileError, match=f"cannot fit, with strategy {offloaded}, which needs"):
        expected(auto(tmp_path, monkeypatch))


NAMES = (
    *("ddp", "fsdp", "zero", "zero with offload: optimizer"),
    *("fsdp with offload: both", "zero with offload: both"),
)


def test_auto_tries_what_the_run_can_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def names(path: Path, ranks: int) -> tuple[str, ...]:
        request = read_request(path, [], {"launch.devices": ranks}, need_device=False)
        backend = request.registry.create_backend("cpu")
        found = candidates(request.run, request.registry, backend, ranks, ranks_run_here=True)
        return tuple(map(in_words, found))

    assert names(auto(tmp_path, monkeypatch), 2) == NAMES
    assert names(auto(tmp_path, monkeypatch), 1)[0] == "single"
    matrices = {"train": {"optimizer": {"name": "adafactor"}}}
    assert names(auto(tmp_path, monkeypatch, **matrices), 2)[0] == "ddp"
    assert "fsdp" not in names(auto(tmp_path, monkeypatch, **matrices), 2)


def test_auto_that_fits_whole_is_checked_once(
    tmp_path: Path, planner: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_memory, "SMALL_PART", 0.0)
    request = read_request(auto(tmp_path, monkeypatch), [], {}, need_device=False)
    chosen, _, found = prepare_run(request)
    assert found.strategy == "ddp" and len(planner.requests) == 1
    assert chosen.job.strategy_why == "auto: the whole model fits each device"


@pytest.mark.slow
def test_a_run_keeps_what_auto_became_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYGAUGE_SIM_LOCKS", str(tmp_path / "locks"))
    run = trained(auto(tmp_path, monkeypatch, train={"steps": 1}), "--plan")
    line = "strategy ddp (auto: the whole model fits each device)\n"
    assert line in run.out
    report = json.loads((run.folder / "report.json").read_text())
    assert report["choices"]["strategy"] == line[9:-1]
    assert report["strategy"] == "ddp"
    assert load_run_file(run.folder / "run.yaml", [], {}).strategy.name == "ddp"


def test_auto_of_a_small_run_starts_no_process(tmp_path: Path, planner: StandIn) -> None:
    for ranks, name in ((1, "single"), (2, "ddp")):
        path = run_file(tmp_path, launch={"devices": ranks})
        request = read_request(path, [], {}, need_device=False)
        chosen, _, found = prepare_run(request)
        assert chosen.run.strategy.name == chosen.job.strategy == name
        assert found.strategy == name and planner.requests == []


@without_driver
def test_the_ranks_decide_where_the_command_cannot(
    tmp_path: Path, planner: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_memory, "SMALL_PART", 0.0)
    path = auto(tmp_path, monkeypatch)
    request = read_request(path, [], {"backend": "hpu"}, need_device=False)
    assert request.run.strategy.name == "auto" and request.job.strategy_why == UNDECIDED
    alone = read_request(path, [], {"backend": "hpu", "launch.devices": 1}, need_device=False)
    assert (alone.job.strategy, alone.job.strategy_why) == ("single", "auto: there is one rank")
    ssh = {"launcher": "ssh", "devices": 2, "options": {"hosts": ["a"]}}
    path = auto(tmp_path, monkeypatch, launch=ssh)
    assert read_request(path, [], {}, need_device=False).run.strategy.name == "auto"
    path = auto(tmp_path, monkeypatch)
    planner.found = AnygaugeError("no plan")
    request = read_request(path, [], {}, need_device=False)
    for plan in (None, False):
        chosen, _, _ = prepare_run(request, plan=plan)
        assert chosen.run.strategy.name == chosen.job.strategy == "auto"
        assert chosen.job.strategy_why == UNDECIDED


@pytest.mark.parametrize(("small", "name"), [(0.25, "ddp"), (0.0, "auto")])
def test_a_rendered_plan_takes_nothing_for_granted(
    small: float, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_memory, "SMALL_PART", small)
    path = run_file(tmp_path, launch={"devices": 2})
    assert command(["launch", str(path), "--render", str(tmp_path / "plan")]) == 0
    assert json.loads((tmp_path / "plan/run.json").read_text())["strategy"]["name"] == name


# -- decisions of another machine ------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{"form": -1}, {"form": "0"}, {"strategy": 7}, {"memory": {"load": 1.5}}, {"offload": "both"}],
    ids=str,
)
def test_a_decision_that_arrives_is_plain_values_or_nothing(changes: dict[str, Any]) -> None:
    sent = asdict(Decision(form=0, strategy="ddp", memory={"load": 7}, step_s=0.5, lines=("x",)))
    assert read_record(DECISION, json.loads(json.dumps(sent))).step_s == 0.5
    with pytest.raises(ValueError, match=next(iter(changes))):
        read_record(DECISION, {**sent, **changes})


def test_a_rank_obeys_what_means_the_same_here() -> None:
    registry, job = installed_plugins(), make_job(run_directory="/nowhere", devices=2)
    run = standins.run(launch={"devices": 2}, strategy={"name": "auto"})
    names = [form.strategy.name for form in forms_of(run, registry, 2)]
    decided = Decision(form=names.index("zero"), strategy="zero")
    assert decided_before(run, decided.applied_to(job), registry).strategy.name == "zero"
    for other in (replace(decided, strategy="fsdp"), replace(decided, form=99)):
        with pytest.raises(AnygaugeError, match="which is not the same here"):
            decided_before(run, other.applied_to(job), registry)
    assert decided_before(run, Decision().applied_to(job), registry) is run
