"""Files as users have them: three lines of the run file change, nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import run_file, trained_here

FORMS: dict[str, dict[str, Any]] = {
    "gsm8k_train.jsonl": {"prompt": "question", "completion": "answer"},
    "alpaca_en_demo.json": {},
    "wiki_demo.txt": {},
}


@pytest.mark.parametrize("file", FORMS)
def test_trains_on(file: str, tmp_path: Path) -> None:
    folder = os.environ.get("ANYGAUGE_DATA")
    if folder is None:
        pytest.skip("ANYGAUGE_DATA names no folder with real files")
    source = {"path": "${ANYGAUGE_DATA}/" + file, "limit": 40, **FORMS[file]}
    path = run_file(
        tmp_path,
        data={"train": source, "max_length": 256, "packing": True},
        strategy={"name": "single"},
        train={"steps": 3, "optimizer": {"lr": 2.0e-2}},
    )
    run = trained_here(path)
    assert run.steps("loss")[-1] < run.steps("loss")[0]
    assert str(folder) in (run.folder / "run.yaml").read_text(), "the resolved file stands alone"
