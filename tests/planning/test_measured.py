"""Plans against what the allocator of simulated cards counted in real runs (``measured.yaml``).

Run as a script, it prints the table of docs/planning.md.
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
from anygauge.planning.plan import plan_run
from anygauge.registry import Registry
from tests.helpers.forked import RunPart, finished
from tests.helpers.runs import TINY, run_file

CONFIG = {**TINY, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
CASES: Mapping[str, Mapping[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "measured.yaml").read_text(encoding="utf-8")
)["cases"]
UNDER = 0.97
"""A plan is never lower than this part of what was measured."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, float]:
    """Planned over measured bytes at most, of all cases."""
    return {
        name: planned / measured
        for name, (planned, measured) in compared(tmp_path_factory.mktemp("measured")).items()
    }


def compared(folder: Path) -> dict[str, tuple[int, int]]:
    """Train each case on simulated cards, and plan it."""
    rows = folder / "rows.jsonl"
    text = "a row of plain words, each of which is learned, and no place is left over " * 40
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(8)))
    files = {name: _file(folder, rows, name, CASES[name]) for name in CASES}
    runs = finished([RunPart(file=str(file)) for file in files.values()], timeout_s=1800)
    registry = Registry.load()
    found: dict[str, tuple[int, int]] = {}
    for (name, file), done in zip(files.items(), runs, strict=True):
        memory = json.loads((done.folder / "report.json").read_text())["memory"]
        assert memory["counted"] == "allocator"
        run = load_run_file(file, [], {}).run
        plan = plan_run(run, registry, registry.create_backend("sim"), run.launch.devices)
        found[name] = plan.worst[1].total, max(memory["measured"].values())
    return found


def _file(folder: Path, rows: Path, name: str, case: Mapping[str, Any]) -> Path:
    sections = {"launch": {"devices": 2}, **case}
    config = {**CONFIG, "vocab_size": sections.pop("words", 2000)}
    data = {"train": {"path": str(rows)}, "packing": True, **sections.pop("data", {})}
    train = {"steps": 3, **sections.pop("train", {})}
    model = {"config": config, "tokenizer": str(folder / "tokenizer")}
    return run_file(
        folder, name=name, backend="sim", model=model, data=data, train=train, **sections
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_within_a_tenth_and_hardly_under(name: str, found: Mapping[str, float]) -> None:
    assert UNDER <= found[name] <= 1.1


@pytest.mark.slow
def test_the_median_is_within_a_twentieth(found: Mapping[str, float]) -> None:
    assert statistics.median(abs(ratio - 1) for ratio in found.values()) <= 0.05


def main() -> None:
    """Print the table of docs/planning.md."""
    with TemporaryDirectory() as folder:
        print("| case | planned, MB | measured | over |\n|---|---:|---:|---:|")
        for name, (planned, measured) in compared(Path(folder)).items():
            over = f"{planned / measured - 1:+.1%}"
            print(f"| `{name}` | {planned / 1e6:.2f} | {measured / 1e6:.2f} | {over} |", flush=True)


if __name__ == "__main__":
    main()
