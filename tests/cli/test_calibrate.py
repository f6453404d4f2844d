"""``anygauge plan --calibrate``: measured by real ranks, kept, and taken by plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anygauge import cli
from anygauge.cli.calibrate import write_measured
from anygauge.interface import Card, UsageError, read_cards
from anygauge.launch import calibration
from anygauge.planning.machines import Hardware, measured_file, measured_files
from anygauge.registry import Registry
from tests.helpers.runs import run_file

FIGURES: dict[str, Any] = {"matmul": {"float32": 50e9}, "copy": 5e9, "exchange": 1e9, "call": 1e-4}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks that were asked to measure."""
    asked: list[int] = []

    def measure(backend: str, ranks: int) -> dict[str, Any]:
        asked.append(ranks)
        return dict(FIGURES)

    monkeypatch.setattr(calibration, "measure", measure)
    return asked


def test_what_ranks_of_a_host_reach_is_kept_by_their_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = measured(monkeypatch)
    assert cli.run(["plan", "--calibrate", "--backend", "cpu", "--devices", "4"]) == 0
    shown = capsys.readouterr().out
    assert asked == [1, 4]
    assert "1 rank " in shown and "4 ranks" in shown
    assert str(measured_file()) in shown
    card = Hardware.load(Registry.load(), measured_files()).card("cpu")
    assert set(card.ranks) == {1, 4} and card.copy is None
    rates = card.ranks[4]
    assert (rates.matmul, rates.copy) == ({"float32": 50e9}, 5e9)
    assert (rates.exchange, rates.call) == (1e9, pytest.approx(1e-4))
    assert "4 ranks" in card.sources["ranks.4.matmul.float32"]
    assert card.memory is not None, "what was described stays"


def test_a_plan_takes_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(run_file(tmp_path, train={"steps": 40}))
    assert cli.run(["plan", path]) == 0
    assert "Time: not known: the description of cpu" in capsys.readouterr().out
    measured(monkeypatch)
    assert cli.run(["plan", "--calibrate", "--backend", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["card"] == "cpu"
    assert cli.run(["plan", path]) == 0
    assert "\n  a rough estimate: a processor reaches other rates" in capsys.readouterr().out
    assert cli.run(["plan", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    time = found["time"]
    assert time["tokens_per_s"] == pytest.approx(4 * 96 / time["step"])
    assert time["step"] == time["multiplying"] + time["moving"] + time["issuing"]


def test_an_undescribed_card_is_described_by_it() -> None:
    card = Card(name="new-one", names=('Maker "New" One',), backend="cuda")
    file = write_measured(card, {8: FIGURES}, "measured")
    [found] = read_cards(file.read_text(), "it", sourced=False)
    assert (found.name, found.names, found.backend) == (card.name, card.names, card.backend)
    assert found.matmul == FIGURES["matmul"] and found.copy == FIGURES["copy"]
    assert found.sources["copy"] == "measured, 8 ranks" and not found.ranks


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = measured(monkeypatch)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="cannot be written: Not a directory"):
        cli.run(["plan", "--calibrate", "--backend", "cpu"])
    assert asked == []


def test_a_broken_file_says_how_to_mend_it(tmp_path: Path) -> None:
    measured_file().parent.mkdir(parents=True)
    measured_file().write_text("garbage")
    with pytest.raises(UsageError, match="Remove the file, or write it anew: anygauge plan --cal"):
        cli.run(["plan", str(run_file(tmp_path))])


@pytest.mark.slow
def test_real_ranks_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "--calibrate", "--backend", "cpu", "--devices", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == 2 and set(found["measured"]) == {"1", "2"}
    for rates in found["measured"].values():
        assert {"float32", "bfloat16"} <= set(rates["matmul"])
        assert all(rate > 1e8 for rate in rates["matmul"].values())
        assert rates["copy"] > 1e8
    assert "call" not in found["measured"]["1"]
    assert 0 < found["measured"]["2"]["call"] < 1 and found["measured"]["2"]["exchange"] > 1e6
