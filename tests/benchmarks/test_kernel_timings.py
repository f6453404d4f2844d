"""Benchmarks of single operations run, count memory, and say what failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import kernel_timings
from benchmarks.kernel_timings import Timing, chosen_kernel, peak_bytes

HOST = torch.device("cpu")
TIMING = Timing(HOST, torch.float32, rounds=3)


def test_peak_bytes_are_those_of_tensors_that_lived_together() -> None:
    given = torch.ones(1000)
    with peak_bytes(HOST) as peak:
        one = given * 2  # 4000 bytes
        two = one + 1  # 8000
        del one
        three = two.view(10, 100) + 0  # 8000 again
        del two
        three.sum()
    assert peak[0] == 8000
    with peak_bytes(HOST) as peak:
        given.view(10, 100)
        given.to("meta") * 2
    assert peak[0] == 0


def test_contenders_are_compared_and_failures_named() -> None:
    x = torch.randn(64, 64, requires_grad=True)

    def broken() -> torch.Tensor:
        raise RuntimeError("no such row\nsecond line")

    ours, theirs, failed = TIMING.compare(
        "case",
        {"ours": lambda: x * 2, "theirs": lambda: x.exp(), "broken": broken},
        [x],
        copied=(1.0, 3.0),
    )
    for row in (ours, theirs):
        forward, backward, both, memory, ratio, *shares = (
            float(str(f)) for f in row.figures.values()
        )
        assert both == pytest.approx(forward + backward) and forward > 0 and memory > 0
        assert ratio == 1 if row is ours else ratio > 0
        assert shares == pytest.approx([1e3 / forward, 3e3 / backward])
    assert (failed.figures, failed.note) == ({}, "no such row")
    assert x.grad is None


def test_the_kernel_is_the_one_that_runs_have() -> None:
    name, kernel = chosen_kernel("linear_cross_entropy", HOST)
    assert name == "chunked" and callable(kernel)
    assert TIMING.copy_bandwidth(1000) > 0


LOSS = ["anygauge, chunked", "torch", "torch.compile"]


@pytest.mark.parametrize(
    ("operation", "settings", "cases", "contenders"),
    [
        (
            *("softmax", {"columns": "64,300", "elements": 6000}, 4),
            ["anygauge", "torch", None, "torch.compile"],
        ),
        ("loss", {"classes": "90", "tokens": 32, "width": 16}, 3, LOSS),
        ("attention", {"lengths": "64", "dtype": "float32"}, 2, ["sdpa", "eager", "softmax"]),
        (
            *("lora", {"tokens": 32, "dtype": "float32"}, 8),
            ["anygauge", "peft", "frozen layer alone"],
        ),
    ],
)
def test_a_benchmark_runs(
    operation: Any,
    settings: dict[str, Any],
    cases: int,
    contenders: list[str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # What compiled code's speed is nobody asks here, and compiling takes ten seconds.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    output = tmp_path / "out" / "figures.json"
    kernel_timings.main(operation, device="cpu", rounds=2, output=output, **settings)
    rows = json.loads(output.read_text())["rows"]
    assert len(rows) == cases * len(contenders)
    assert len({row["case"] for row in rows}) == cases
    for row, wanted in zip(rows, contenders * cases, strict=True):
        assert row["name"] == wanted or wanted is None
        assert row["figures"]["forward, ms"] > 0, row
    assert str(contenders[0]) in capsys.readouterr().out
