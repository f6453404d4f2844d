"""Plans against what the allocator of simulated cards counted in real runs (``measured.yaml``).

Run as a script, it prints all cases; docs/planning-measured.md has the worst.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from anygauge.config.load import load_run_file
from tests.helpers.forked import RunPart, finished
from tests.helpers.runs import TINY, merged, run_file
from tests.planning.standins import planned

CONFIG = {**TINY, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
CASES: Mapping[str, Mapping[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "measured.yaml").read_text(encoding="utf-8")
)["cases"]


def compared(folder: Path) -> dict[str, tuple[int, int]]:
    """Train each case on simulated cards, and plan it: bytes that are planned, and measured."""
    rows = folder / "rows.jsonl"
    text = "a row of plain words, each of which is learned, and no place is left over " * 40
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(8)))
    usual = {
        "backend": "sim",
        "launch": {"devices": 2},
        "data": {"train": {"path": str(rows)}, "packing": True},
        "train": {"steps": 3},
    }
    files = []
    for name, case in CASES.items():
        sections = {**case}
        config = {**CONFIG, "vocab_size": sections.pop("words", 2000)}
        model = {"config": config, "tokenizer": str(folder / "tokenizer")}
        files.append(run_file(folder, name=name, model=model, **merged(usual, sections)))
    runs = finished([RunPart(file=str(file)) for file in files], timeout_s=1800)
    found: dict[str, tuple[int, int]] = {}
    for name, file, done in zip(CASES, files, runs, strict=True):
        memory = json.loads((done.folder / "report.json").read_text())["memory"]
        assert memory["counted"] == "allocator"
        plan = planned(load_run_file(file, [], {}), "sim")
        found[name] = plan.worst_phase[1].total, max(memory["measured"].values())
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, float]:
    """Planned over measured bytes at most, of all cases."""
    both = compared(tmp_path_factory.mktemp("measured"))
    return {name: planned / measured for name, (planned, measured) in both.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_within_a_tenth_and_hardly_under(name: str, found: Mapping[str, float]) -> None:
    assert 0.97 <= found[name] <= 1.1


@pytest.mark.slow
def test_the_median_is_within_a_twentieth(found: Mapping[str, float]) -> None:
    assert statistics.median(abs(ratio - 1) for ratio in found.values()) <= 0.05


if __name__ == "__main__":
    with TemporaryDirectory() as work:
        print("| case | planned, MB | measured | over |\n|---|---:|---:|---:|")
        for case, (plan, real) in compared(Path(work)).items():
            print(f"| `{case}` | {plan / 1e6:.2f} | {real / 1e6:.2f} | {plan / real - 1:+.1%} |")
