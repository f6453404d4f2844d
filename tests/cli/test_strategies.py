"""Strategies on the command line: listed, chosen by a word alone, and without DeepSpeed.

What is refused stands in `messages.txt`, what `auto` takes in `tests/launch/test_memory_check.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from anygauge.interface import NotAvailableError
from anygauge.launch.request import read_request
from anygauge.registry import registry as module
from anygauge.strategies import anygauge_provide_strategies
from tests.helpers.gaudi import standin_environment, standin_site
from tests.helpers.runs import anygauge, called, run_file


def test_every_strategy_is_listed_with_what_it_needs() -> None:
    listed = json.loads(called(["strategies", "--backend", "cpu", "--json"]).stdout)
    found = {one["name"]: one for one in listed["strategies"]}
    assert listed["backend"] == "cpu"
    assert {spec.name for spec in anygauge_provide_strategies()} <= found.keys()
    assert [name for name, one in found.items() if one["default"]] == ["auto"]
    assert found["single"]["ranks"] == "1" and not found["single"]["needs"]
    shared = {"tp", "sequence_parallel", "cp", "cp_method", "pp", "schedule"}
    assert shared <= {*found["ddp"]["fields"]}
    assert shared | {"dp_replicate"} <= {*found["fsdp"]["fields"]}
    assert (
        found["zero"]["packages"].keys() == {"deepspeed"} and found["zero"]["packages"]["deepspeed"]
    )
    assert not any(one["refused"] for one in found.values())


def test_what_a_backend_cannot_do_is_told_with_its_reason() -> None:
    pytest.importorskip("anygauge_lazy", reason="needs `make plugins`")
    shown = called(["strategies", "--backend", "lazy"]).stdout
    assert "single\n    One process, one device, plain torch.\n    ranks: 1\n    lazy: yes" in shown
    assert (
        "lazy: no. backend 'lazy' lacks 'collectives', needed because DDP sums gradients" in shown
    )
    assert "torch has no process group for lazy tensors" in shown


COMPILED = "backend_options.mode=compile"  # lazy mode refuses what FSDP2 runs

WORDS = {
    "zero": ("zero", "strategy.reentrant=true"),  # DeepSpeed from 0.19.6 on has another
    "ddp": ("tensor",),
    "fsdp": ("mics", COMPILED),
    "auto (the ranks decide once their devices are open)": ("auto",),
}
"""Strategy -> the word that chooses it, and what else it takes there."""


@pytest.mark.parametrize(
    "named", [pytest.param(w, marks=[pytest.mark.slow] * (w != "ddp")) for w in WORDS]
)
def test_a_dry_run_on_the_stand_in_for_gaudi(named: str, tmp_path: Path) -> None:
    site = standin_site(tmp_path)
    word, *more = WORDS[named]
    done = anygauge(
        [
            *("train", run_file(tmp_path, train={"micro_batch_size": 1}), "--dry-run"),
            *("--backend", "hpu", "--devices", "2"),
            *(part for option in (f"strategy={word}", *more) for part in ("--set", option)),
        ],
        environment=standin_environment(site, tmp_path / "record"),
    )
    assert done.returncode == 0, done.stderr
    assert f"strategy {named}, 1 x 2 ranks" in done.stdout
    assert "PT_HPU_LAZY_MODE" in done.stdout
    assert ("\n  auto is not decided yet\n" in done.stdout) == (word == "auto")
    assert not (tmp_path / "out").exists()


INSTALL = "pip install 'anygauge[zero]'"


def unnamed(folder: Path) -> Path:
    """A run file without a strategy's section."""
    path = run_file(folder)
    values: dict[str, Any] = yaml.safe_load(path.read_text())
    values.pop("strategy", None)
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.installed_version

    def version(distribution: str) -> str | None:
        return None if distribution == "deepspeed" else real(distribution)

    monkeypatch.setattr(module, "installed_version", version)


@pytest.mark.usefixtures("without_deepspeed")
def test_forms_of_a_strategy_that_is_not_installed_are_left_out(tmp_path: Path) -> None:
    flags = {"launch.devices": 2}
    request = read_request(unnamed(tmp_path), [], flags, need_device=False)
    assert [each.strategy.name for each in request.forms] == ["ddp", "fsdp", "fsdp"]


@pytest.mark.usefixtures("without_deepspeed")
@pytest.mark.parametrize("named", ["strategy=fsdp", "strategy.name=fsdp"])
def test_one_that_is_named_needs_no_reason(named: str, tmp_path: Path) -> None:
    job = read_request(unnamed(tmp_path), [named], {}, need_device=False).job
    assert (job.strategy, job.strategy_why) == ("fsdp", "")


@pytest.mark.usefixtures("without_deepspeed")
def test_zero_is_refused_without_its_engine(tmp_path: Path) -> None:
    with pytest.raises(NotAvailableError) as caught:
        read_request(unnamed(tmp_path), ["strategy=zero"], {}, need_device=False)
    assert str(caught.value) == (
        f"strategy.name: 'zero' needs deepspeed, which this machine lacks: {INSTALL}. "
        "Or use another: fsdp, ddp, auto, single"
    )
