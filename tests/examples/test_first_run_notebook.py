"""The notebook of `examples`: whole in a kernel, and each of its runs without one."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import anygauge
from anygauge.cli.from_python import set_options
from anygauge.config.load import load_run_file
from tests.architecture.repository import ROOT

NOTEBOOK = ROOT / "examples/first-run.ipynb"
CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def test_no_output_is_kept() -> None:
    assert len(CODE) == 6
    assert not any(cell["outputs"] for cell in CELLS if cell["cell_type"] == "code")


def test_its_runs_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def train(run: dict[str, Any], **set: Any) -> mock.Mock:
        runs.append(load_run_file(run, set_options(set)))
        step = {"loss": 1.0}
        return mock.Mock(model=tmp_path / "model", losses=[1.0], metrics=[step])

    def plan(run: dict[str, Any], *, machine: str) -> mock.Mock:
        runs.append(load_run_file(run))
        return mock.Mock(fits=True, time={"step": 1.0})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: mock.Mock(stdout=""))
    monkeypatch.setattr(anygauge, "train", train, raising=False)
    monkeypatch.setattr(anygauge, "plan", plan, raising=False)
    tokenizer = mock.MagicMock()
    monkeypatch.setattr(anygauge, "load", lambda _: (mock.MagicMock(), tokenizer), raising=False)
    names: dict[str, Any] = {}
    for number, cell in enumerate(CODE):
        exec(compile(cell, f"cell {number}", "exec"), names)
    assert [run.name for run in runs] == ["base", "tuned", "tuned"]
    assert runs[1].model.name == str(tmp_path / "model")
    assert (runs[1].train.seed, runs[2].train.seed) == (runs[0].train.seed, 7)


@pytest.mark.slow
def test_it_runs_in_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    shutil.copytree(ROOT / "examples/demo", tmp_path / "demo")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    # A cell that fails raises, with what it said.
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()
    shown = ["\n".join(map(text_of, cell.get("outputs", ()))) for cell in notebook.cells]
    code = [text for cell, text in zip(CELLS, shown, strict=True) if cell["cell_type"] == "code"]
    base, tuned = code[1], code[3]
    assert "step 60/60" in base and "model=PosixPath" in base
    assert "step 30/30" in tuned and "stopped_by='steps'" in tuned
    first, last = json.loads(f"[{code[4].splitlines()[0].replace('] [', '], [')}]")
    assert first[0] > last[-1] > 0
    assert "What does json.dumps(obj) do?" in code[5]
    assert (tmp_path / "runs/first-run/tuned/adapter/adapter_config.json").is_file()


def text_of(output: Any) -> str:
    """An output of a cell as text."""
    return str(output.get("text") or output.get("data", {}).get("text/plain", ""))
