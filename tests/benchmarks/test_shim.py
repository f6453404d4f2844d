"""What is counted of collectives, and that nothing happens outside ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.processes import SHIM


@pytest.fixture(scope="module")
def shim() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_shim", SHIM / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bytes_are_those_of_a_ring(shim: ModuleType) -> None:
    def call(self: Any, *args: Any, **kwargs: Any) -> str:
        return "work"

    names = ("allreduce", "all_gather_single", "reduce_scatter_single", "broadcast")
    group = type("Group", (), {"size": lambda self: 4, **dict.fromkeys(names, call)})
    calls: list[Any] = []
    shim.count_calls(group, calls)
    ranks: Any = group()
    whole, part = torch.empty(400), torch.empty(100)
    assert ranks.allreduce([whole]) == "work"
    ranks.all_gather_single(whole, part)
    ranks.reduce_scatter_single(output=part, input=whole)
    ranks.broadcast([whole])
    assert [(operation, sent) for _, operation, sent in calls] == [
        ("all_reduce", 2400.0),
        ("all_gather", 1200.0),
        ("reduce_scatter", 1200.0),
        ("broadcast", 1200.0),
    ]


def start(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "RANK"}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**clean, "PYTHONPATH": str(SHIM), **variables},
    )


def test_a_rank_leaves_its_peak_memory(tmp_path: Path) -> None:
    done = start("b = bytearray(2**25)", RANK="1", ANYGAUGE_BENCHMARK_TRACE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "traffic-rank1.json").read_text())
    assert record["calls"] == []
    if record["peak_memory"] is None:
        pytest.skip("this kernel does not tell a process's peak memory")
    assert record["peak_memory"] > 2**25


def test_a_process_that_is_no_rank_is_left_alone(tmp_path: Path) -> None:
    done = start("import sys; print(len(sys.meta_path))", ANYGAUGE_BENCHMARK_TRACE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


NEXT = """
import importlib.util, sys
print("next")
spec = importlib.util.spec_from_file_location("first", {shim!r})
spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""


def test_what_it_hides_runs_once_though_it_runs_the_first_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NEXT.format(shim=str(SHIM / "sitecustomize.py")))
    done = start("", PYTHONPATH=f"{SHIM}{os.pathsep}{tmp_path}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "next\n", "")


def test_a_module_is_seen_after_its_own_code_has_run(shim: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "late_module.py").write_text("VALUE = 3\n")
    seen: list[int] = []
    finder = shim.AfterImport({"late_module": lambda module: seen.append(module.VALUE)})
    spec = finder.find_spec("late_module", [str(tmp_path)])
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert seen == [3]
    assert finder.find_spec("late_module", [str(tmp_path)]) is None
