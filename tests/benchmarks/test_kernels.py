"""Benchmarks of single operations run, count memory, and say what failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.kernel_timing import chosen_kernel, compare, copy_bandwidth, peak_bytes
from tests.docs.pages import ROOT

HOST = torch.device("cpu")


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

    found = compare(
        {"ours": lambda: x * 2, "theirs": lambda: x.exp(), "broken": broken},
        torch.ones_like,
        [x],
        rounds=3,
        device=HOST,
    )
    ours, theirs, failed = found
    assert ours.ratio == 1.0 and theirs.ratio is not None and theirs.ratio > 0
    assert ours.forward is not None and ours.forward > 0
    assert failed.forward is None and failed.problem == "no such row"
    assert x.grad is None


def test_the_kernel_is_the_one_that_runs_have() -> None:
    name, kernel = chosen_kernel("linear_cross_entropy", HOST)
    assert name == "chunked" and callable(kernel)
    assert copy_bandwidth(HOST, 1000, torch.float32, 2) > 0


@pytest.mark.parametrize(
    ("operation", "arguments", "cases", "contenders"),
    [
        pytest.param(
            "softmax",
            ("--columns", "64,300", "--elements", "6000"),
            4,
            ["anygauge", "torch", None, "torch.compile"],
            marks=pytest.mark.slow,
        ),
        (
            "loss",
            ("--classes", "90", "--tokens", "32", "--width", "16"),
            3,
            ["anygauge", "torch", "torch.compile"],
        ),
        pytest.param(
            "attention",
            ("--lengths", "64", "--dtype", "float32"),
            2,
            ["sdpa", "eager", "softmax"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "lora",
            ("--tokens", "32", "--dtype", "float32"),
            8,
            ["anygauge", "peft", "frozen layer alone"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_benchmark_runs(
    operation: str,
    arguments: tuple[str, ...],
    cases: int,
    contenders: list[str | None],
    tmp_path: Path,
) -> None:
    output = tmp_path / "out" / "figures.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.kernels", operation, *arguments, "--rounds", "2"),
            *("--output", str(output), "--device", "cpu"),
        ],
        cwd=ROOT,
        # What compiled code's speed is nobody asks here, and compiling takes ten seconds.
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_COMPILE_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(output.read_text())["cases"]
    assert len(measured) == cases
    for row in measured:
        names = [each["name"] for each in row["timed"]]
        assert len(names) == len(contenders)
        assert all(name == wanted for name, wanted in zip(names, contenders, strict=True) if wanted)
        assert all(each["forward"] for each in row["timed"]), row
    assert str(contenders[0]) in done.stdout
