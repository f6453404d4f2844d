"""The table of starts, an older checkout beside this one, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from benchmarks.entrants import ENTRANTS, chosen, processes
from benchmarks.measure import RunOutcome
from benchmarks.processes import SHIM, shared_environment
from benchmarks.start_up import table_rows
from benchmarks.table import table
from tests.benchmarks.test_measure import plan


def test_ratios_are_taken_within_a_round() -> None:
    def started(name: str, round_: int, seconds: float, cpu: float, modules: int) -> RunOutcome:
        return RunOutcome(
            name=name, round=round_, status="ok", first_step_s=seconds, cpu_seconds=cpu,
            modules=modules,
        )  # fmt: skip

    found = [
        started("anygauge", 1, 2.0, 1.0, 1000),
        started("trainer", 2, 4.0, 5.0, 2000),
        started("trainer", 1, 6.0, 5.0, 2000),
        started("anygauge", 2, 4.0, 3.0, 1000),
    ]
    ours, theirs = table(table_rows(found, [ENTRANTS["anygauge"], ENTRANTS["trainer"]]))[2:]
    assert ours == "| anygauge | 3.0 | 1.000 [1.000, 1.000] | 2.0 | 1,000 |"
    assert theirs.startswith("| HF Trainer + DeepSpeed | 5.0 | 2.000 [")
    assert theirs.endswith("] | 5.0 | 2,000 |")


def test_our_own_contenders_run_an_older_checkout_too(tmp_path: Path) -> None:
    found = chosen("anygauge-fsdp,trainer", tmp_path)
    assert [each.checkout for each in found] == [None, tmp_path, None]
    assert found[1].title == "before: anygauge, fsdp"
    given = plan(tmp_path)
    (variables,) = processes(found[1], given, shared_environment(given)).environments
    assert variables["PYTHONPATH"].startswith(f"{SHIM}:{tmp_path}:{tmp_path}/kernels:")


def test_an_unknown_contender_is_named() -> None:
    with pytest.raises(typer.BadParameter, match="'nobody': choose from anygauge, "):
        chosen("nobody")
