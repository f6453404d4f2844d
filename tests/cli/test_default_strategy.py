"""The strategy of a run file that names none, without DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from anygauge.cli.intent import read_intent
from anygauge.interface import NotAvailableError
from anygauge.registry import registry as module
from tests.helpers.runs import run_file

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
    """What there is otherwise: tests/cli/test_memory_check.py."""
    flags = {"launch.devices": 2}
    intent = read_intent(unnamed(tmp_path), [], flags, need_device=False)
    assert [each.strategy.name for each in intent.forms] == ["ddp", "fsdp", "fsdp"]


@pytest.mark.usefixtures("without_deepspeed")
@pytest.mark.parametrize("named", ["strategy=fsdp", "strategy.name=fsdp"])
def test_one_that_is_named_needs_no_reason(named: str, tmp_path: Path) -> None:
    job = read_intent(unnamed(tmp_path), [named], {}, need_device=False).job
    assert (job.strategy, job.strategy_why) == ("fsdp", "")


@pytest.mark.usefixtures("without_deepspeed")
def test_zero_is_refused_without_its_engine(tmp_path: Path) -> None:
    with pytest.raises(NotAvailableError) as caught:
        read_intent(unnamed(tmp_path), ["strategy=zero"], {}, need_device=False)
    assert str(caught.value) == (
        f"strategy.name: 'zero' needs deepspeed, which this machine lacks: {INSTALL}. "
        "Or use another: fsdp, ddp, auto, single"
    )
