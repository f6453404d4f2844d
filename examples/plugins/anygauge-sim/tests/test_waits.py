"""How often a step copies to the host, and how often the host waits for the card, by strategy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from children import SIM, patched

from anygauge.testing.loop_checks import MODEL, train

STEPS = 8
WARM = 3
"""Steps that are not counted: an optimizer makes its state, and DeepSpeed learns what to fetch."""
BEGINS = "        self._began = self._time_event()\n"
NOTES = """
        import json, os
        from anygauge_sim import _C
        found = _C.counters(self._placement.device.index)
        with open(os.environ["WAITS"] + os.environ["RANK"], "a") as file:
            file.write(json.dumps([found["card_to_host_copies"], found["host_waits"]]) + "\\n")
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """Of each step but the first: copies to the host, and those that it waits for, the most on a
    rank."""

    copies: int
    waits: int


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package that notes the card's counters when a step begins."""
    folder = tmp_path_factory.mktemp("noting")
    return patched(folder, "anygauge/training/step_results.py", BEGINS, BEGINS + NOTES)


def counted(
    folder: Path,
    site: Path,
    patch: pytest.MonkeyPatch,
    strategy: Mapping[str, Any],
    ranks: int,
    *,
    dtype: str = "float32",
    rows: int = 1,
    **changes: Any,
) -> Counted:
    said = {**strategy, "dtype": dtype, "rows": rows, "more": len(changes)}
    name = "-".join(f"{key}-{value}" for key, value in said.items())
    notes = folder / f"{name}-notes"
    patch.setenv("PYTHONPATH", str(site))
    patch.setenv("WAITS", str(notes))
    changes = {
        **changes,
        "strategy": dict(strategy),
        # Nothing but steps: what an evaluation or a checkpoint reads is counted nowhere here.
        "data": {"eval": None},
        "train": {
            "steps": STEPS,
            "micro_batch_size": rows,
            "eval_every": None,
            "eval_at_start": False,
        },
    }
    train(SIM, folder, name, strategy="", ranks=ranks, dtype=dtype, changes=changes)
    copies, waits = [], []
    for rank in range(ranks):
        lines = [json.loads(line) for line in notes.with_name(f"{notes.name}{rank}").open()]
        assert len(lines) == STEPS
        steps = [
            [later[at] - now[at] for at in (0, 1)]
            for now, later in zip(lines[WARM:], lines[WARM + 1 :], strict=False)
        ]
        copies += [step[0] for step in steps]
        waits += [step[1] for step in steps]
    return Counted(copies=max(copies), waits=max(waits))


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ({"name": "single"}, 1),
        slow({"name": "ddp"}, 2),
        ({"name": "fsdp"}, 2),
        slow({"name": "fsdp", "gather": "step"}, 2),
        slow({"name": "ddp", "tp": 2}, 2),
        slow({"name": "ddp", "cp": 2}, 2),
        slow({"name": "ddp", "pp": 2}, 2),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_one_copy_a_step_for_which_the_host_does_not_wait(
    strategy: Mapping[str, Any],
    ranks: int,
    folder: Path,
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = counted(folder, site, monkeypatch, strategy, ranks)
    assert found == Counted(copies=1, waits=0)


@pytest.mark.parametrize("rows", [1, 2], ids=["full rows", "padded rows"])
def test_fused_attention_does_not_ask_the_card_for_padding(
    rows: int, folder: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {
        "config": dict(MODEL),
        "tokenizer": str(folder / "tokenizer"),
        "attention": "sdpa",
    }
    found = counted(folder, site, monkeypatch, {"name": "single"}, 1, model=model, rows=rows)
    assert found == Counted(copies=1, waits=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "dtype", "reads"),
    [
        ({"stage": 0}, "float32", 0),
        ({"stage": 1}, "float32", 2),
        ({"stage": 1}, "bfloat16", 2),
        ({"stage": 2}, "bfloat16", 3),
        # What stays whole beside flat layers is DeepSpeed's stage 1.
        ({"stage": 3, "gather": "flat"}, "bfloat16", 2),
        ({"stage": 3, "gather": "layer"}, "float32", 1),
        ({"stage": 3, "gather": "layer"}, "bfloat16", 1),
    ],
)
def test_what_deepspeed_reads_of_a_step(
    stage: dict[str, int | str],
    dtype: str,
    reads: int,
    folder: Path,
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy = {"name": "zero", **stage}
    found = counted(folder, site, monkeypatch, strategy, 2, dtype=dtype)
    assert found == Counted(copies=1 + reads, waits=reads)
