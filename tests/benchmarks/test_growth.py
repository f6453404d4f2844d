"""Benchmarks of growth at a tiny size: what they count is there, and tables show it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.growth import growth_table, usage_of
from benchmarks.growth_agents import measured
from benchmarks.growth_cards import exchanged, trained
from benchmarks.launching import rows_and_tokenizer
from benchmarks.open_rows import COLUMNS, growth


def test_usage_is_of_the_process() -> None:
    before = usage_of()
    spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(5)]
    sum(range(10**6))
    after = usage_of(os.getpid())
    for each in spare:
        os.close(each)
    assert after.cpu_s > before.cpu_s
    assert after.descriptors == before.descriptors + 5
    assert after.memory > 2**20 and after.threads >= 1
    with pytest.raises(OSError, match="No such file"):
        usage_of(2**30)


def test_a_table_has_a_line_for_each_row() -> None:
    columns = {"name": ("who", 1, ""), "size": ("KiB", 2**-10, ",.1f")}
    rows = [{"name": "a", "size": 2048}, {"name": "b", "size": None}]
    assert growth_table(columns, rows).splitlines() == [
        "| who | KiB |", "| ---: | ---: |", "| a | 2.0 |", "| b |  |",
    ]  # fmt: skip


def test_simulated_agents_join_a_real_coordinator_and_end_with_it() -> None:
    one, four = (measured(agents, 1.5, 64) for agents in (1, 4))
    assert one.status == four.status == 128 + 15
    assert four.descriptors - one.descriptors == 3
    for found in (one, four):
        # A beat each second, in both directions.
        assert 50 < found.sent < 300 and 50 < found.received < 300
        assert found.join_cpu_s > 0 and found.memory > 2**20


def test_opening_rows_counts_the_index(tmp_path: Path) -> None:
    (found,) = growth(tmp_path / "rows", 5000, ["jsonl"], steps=2)
    assert found["rows"] == 5000
    assert found["cache_mb"] == pytest.approx(5001 * 8 / 1e6, rel=0.05)
    assert growth_table(COLUMNS, [found]).count("\n") == 2
    assert not (tmp_path / "rows").exists()


def test_collectives_are_read_from_a_rank_s_log(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_text("text\n0 aten::add\n0 simccl::all_reduce 96\n0 simccl::broadcast 4\n")
    assert exchanged(log) == (2, 100)


def test_a_run_on_a_simulated_card_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYGAUGE_BLOCK_PLUGINS", "")
    found = trained(tmp_path, "ddp", 1, 2, rows_and_tokenizer(tmp_path))
    assert found.calls >= 2 and found.sent > 2 * 10**5  # the adapter's gradients
    assert found.peak > 2**20 and found.cpu_s > 0.1
