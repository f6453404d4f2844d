"""What a plan says is held, against what the allocator of simulated cards counted in real runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.load import load_run_file
from anygauge.planning.planner import Planner
from tests.helpers.forked import RunPart, finished
from tests.helpers.runs import TINY, run_file

CONFIG = {**TINY, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
ALL: Mapping[str, Any] = {"adapter": None}
KEEPS: Mapping[str, Any] = {"train": {"gradient_checkpointing": False}}


def _case(strategy: str | Mapping[str, Any], ranks: int = 2, **changes: Any) -> dict[str, Any]:
    section = {"name": strategy} if isinstance(strategy, str) else dict(strategy)
    words = changes.pop("vocab_size", 2000)
    return {"strategy": section, "launch": {"devices": ranks}, "words": words, **changes}


CASES: Mapping[str, dict[str, Any]] = {
    **{
        "-".join((name, *suffix)): _case(name, 1 if name == "single" else 2, **more)
        for name in ("single", "ddp", "fsdp", "zero")
        for suffix, more in (
            ((), {}),
            (("keeps",), KEEPS),
            (("all",), ALL),
            (("all", "keeps"), {**ALL, **KEEPS}),
        )
    },
    **{f"zero{n}-all": _case({"name": "zero", "stage": n}, **ALL) for n in (1, 2)},
    **{f"zero{n}": _case({"name": "zero", "stage": n}) for n in (1, 2)},
    "zero0-all": _case(
        {"name": "zero", "stage": 0}, precision={"reduce_dtype": "param_dtype"}, **ALL
    ),
    "zero-offload": _case({"name": "zero", "offload": "optimizer"}, **ALL),
    "zero-4": _case("zero", 4),
    "fsdp-once": _case({"name": "fsdp", "gather": "step"}),
    "fsdp-offload": _case({"name": "fsdp", "offload": "both"}, **ALL),
    "hsdp": _case({"name": "fsdp", "dp_replicate": 2}, 4, **ALL),
    "tp": _case({"name": "ddp", "tp": 2}),
    "tp-all": _case({"name": "ddp", "tp": 2}, **ALL),
    "cp": _case({"name": "ddp", "cp": 2}),
    "single-wide": _case("single", 1, vocab_size=30_000),
    "single-long": _case("single", 1, data={"max_length": 256}, train={"micro_batch_size": 1}),
    "single-float32": _case("single", 1, precision={"param_dtype": "float32"}),
    "single-lion": _case("single", 1, train={"optimizer": {"name": "lion"}}, **ALL),
    "single-half": _case("single", 1, train={"gradient_checkpointing": {"every": 2}}),
    "single-sums": _case("single", 1, train={"micro_batch_size": 1}, **ALL),
}
SCALARS = 4096
"""Bytes of numbers that come and go, such as a norm."""

Found = Mapping[str, tuple[int, int]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Predicted and measured bytes at most, of all cases."""
    return compared(tmp_path_factory.mktemp("measured"))


def compared(folder: Path) -> dict[str, tuple[int, int]]:
    """Train each case on simulated cards, and rehearse it."""
    rows = folder / "rows.jsonl"
    text = "a row of plain words, each of which is learned, and no place is left over " * 40
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(8)))
    files = {name: _file(folder, rows, name, CASES[name]) for name in CASES}
    found: dict[str, tuple[int, int]] = {}
    runs = finished([RunPart(file=str(file)) for file in files.values()], timeout_s=1800)
    parsed = {name: load_run_file(file, [], {}).run for name, file in files.items()}
    for ranks in sorted({run.launch.devices for run in parsed.values()}):
        with Planner(ranks) as planner:
            for (name, run), done in zip(parsed.items(), runs, strict=True):
                if run.launch.devices == ranks:
                    memory = json.loads((done.folder / "report.json").read_text())["memory"]
                    assert memory["counted"] == "allocator"
                    peaks = planner.rehearse(run, "sim").device.values()
                    most = max(memory["measured"].values())
                    found[name] = max(peak.total for peak in peaks), most
    return found


def _file(folder: Path, rows: Path, name: str, case: Mapping[str, Any]) -> Path:
    changes = {key: value for key, value in case.items() if key != "words"}
    config = {**CONFIG, "vocab_size": case["words"]}
    return run_file(
        folder,
        name=name,
        backend="sim",
        model={"config": config, "tokenizer": str(folder / "tokenizer")},
        **{
            **changes,
            "data": {
                "train": {"path": str(rows)},
                "packing": True,
                **changes.get("data", {}),
            },
            "train": {"steps": 3, **changes.get("train", {})},
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_never_under_and_at_most_a_little_over(name: str, found: Found) -> None:
    predicted, measured = found[name]
    assert measured - SCALARS <= predicted <= 1.03 * measured
