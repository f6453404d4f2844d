"""`auto` is one of the others, by what fits on the opened devices, and says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from anygauge.config.load import load_run_file
from anygauge.interface import MemoryStats
from anygauge.launch import memory_check
from anygauge.registry import Registry
from anygauge.training import auto
from anygauge.training.auto import decide_strategy
from tests.helpers.runs import run_file, trained_here

KIB = 2**10


@pytest.mark.parametrize(
    ("ranks", "memory", "name", "why"),
    [
        (1, None, "single", "auto: the devices do not report how much memory they have"),
        (2, None, "fsdp", "auto: the devices do not report how much memory they have"),
        (2, 2**30, "ddp", "auto: weights and optimizer take 0.00 GiB of the 1.0 GiB"),
        (1, 2**30, "single", "auto: weights and optimizer take 0.00 GiB of the 1.0 GiB"),
        # 55,456 numbers of 4 bytes are 217 KiB; an adapter's 4,096 take 16 more bytes each.
        (2, 500 * KIB, "fsdp", "auto: ddp would take 0.00 GiB of the 0.0 GiB that each rank has;"),
        (2, 200 * KIB, "fsdp with offload: both", "; zero would take"),
        (1, 200 * KIB, "fsdp with offload: both", "auto: single would take"),
    ],
)
def test_the_first_form_that_fits_is_taken(
    ranks: int, memory: int | None, name: str, why: str, tmp_path: Path
) -> None:
    run = load_run_file(run_file(tmp_path), [], {"launch.devices": ranks})
    assert run.strategy.name == "auto"
    registry = Registry.load()
    backend = registry.create_backend("cpu")
    backend.placement = Mock()
    backend.placement.memory.return_value = MemoryStats(
        in_use=0, peak=0, limit=memory, kind="allocator"
    )
    backend.collectives = Mock()
    backend.collectives.gather_objects.side_effect = lambda mine: [mine, 2**40]
    found, reason = decide_strategy(run, registry, backend, 0, ranks)
    assert auto.in_words(found) == name
    assert why in reason
    assert decide_strategy(found, registry, backend, 0, ranks) == (found, "")


def test_a_rank_decides_what_the_command_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_check, "forms_of_auto", lambda *_, **__: ((), "undecided"))
    run = trained_here(run_file(tmp_path, train={"steps": 2}))
    report: dict[str, Any] = json.loads((run.folder / "report.json").read_text())
    assert report["strategy"] == report["settings"]["strategy.name"] == "single"
    why = "auto: weights and optimizer take 0.00 GiB of the "
    assert report["choices"]["strategy"].startswith(f"single ({why}")
