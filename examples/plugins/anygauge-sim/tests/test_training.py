"""The unchanged loop on several cards: ZeRO-3 with LoRA, bit for bit; and what must not work."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from children import SIM, patched

from anygauge.testing.loop_checks import RunFailed, TrainRun, train


def zero(folder: Path, name: str, ranks: int, **settings: Any) -> TrainRun:
    return train(SIM, folder, name, strategy="zero", ranks=ranks, **settings)


def records(run: TrainRun) -> list[tuple[float, float]]:
    return [(r["loss"], r["grad_norm"]) for r in run.metrics if "loss" in r]


def test_zero_on_cards_is_zero_on_the_host_bit_for_bit(folder: Path) -> None:
    here = zero(folder, "host2", 2, dtype="bfloat16", host=True)
    trace = folder / "trace"
    os.environ["ANYGAUGE_SIM_TRACE"] = str(trace)
    try:
        there = zero(folder, "cards2", 2, dtype="bfloat16")
    finally:
        del os.environ["ANYGAUGE_SIM_TRACE"]
    assert records(there) == records(here)
    seen = {tuple(line.split()[:2]) for line in trace.read_text().splitlines()}
    for card in "01":
        assert (card, "aten::mm") in seen, "the cards did the arithmetic"
        assert (card, "simccl::all_gather_into_tensor") in seen, "and gathered the weights"
    memory = [r["peak_memory"] for r in there.metrics if "loss" in r]
    assert 0 < max(memory) < 2**26, "bytes of the card's allocator, not of the process"


@pytest.mark.slow
def test_eight_cards(folder: Path) -> None:
    batch = {"train": {"steps": 4, "global_batch_size": 8, "micro_batch_size": 1}}
    eight = zero(folder, "eight", 8, dtype="float32", changes=batch)
    one = train(SIM, folder, "one", strategy="single", ranks=1, dtype="float32", changes=batch)
    assert eight.losses == pytest.approx(one.losses, rel=1e-4)


@pytest.mark.slow
def test_a_checkpoint_goes_from_cards_to_the_host_and_back(folder: Path) -> None:
    often = {"checkpoint": {"every": 2, "keep_last": 5}}
    whole = zero(folder, "often", 2, dtype="float32", changes=often)
    first, second = sorted((whole.folder / "checkpoints").iterdir())[:2]
    for name, checkpoint, host in (("to-host", first, True), ("to-cards", second, False)):
        rest = train(
            SIM,
            folder,
            name,
            strategy="single",
            ranks=1,
            dtype="float32",
            host=host,
            changes={"checkpoint": {"resume": str(checkpoint)}},
        )
        assert rest.losses == pytest.approx(whole.losses[-len(rest.losses) :], rel=1e-4)


CALL = "run_step(self.engine, index, batches, self.loss_function, normalizer)"


@pytest.mark.parametrize(
    ("stray", "message"),
    [
        ("lambda o: self.loss_function(o) + o.loss.detach().cpu().reshape(1)", "same device"),
        pytest.param("lambda o: self.loss_function(o).cuda()", "CUDA", marks=pytest.mark.slow),
        pytest.param(
            "lambda o: self.loss_function(o) + __import__('torch').ones(3)",
            "same device",
            marks=pytest.mark.slow,
        ),
    ],
    ids=[".cpu()", ".cuda()", "a tensor of the host"],
)
def test_what_strays_to_the_host_in_the_loop_fails(
    stray: str, message: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = f"run_step(self.engine, index, batches, {stray}, normalizer)"
    site = patched(tmp_path, "anygauge/training/loop.py", CALL, changed)
    monkeypatch.setenv("PYTHONPATH", str(site))
    with pytest.raises(RunFailed) as failed:
        train(SIM, folder, "stray", strategy="single", ranks=1, dtype="float32")
    assert message in str(failed.value), json.dumps(str(failed.value))
