"""The table of what `anygauge import` takes of a tool's own files."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.imported import count, main

FILE = """\
base_model: owner/model
adapter: lora
lora_target_linear: true
learning_rate: 1e-4
datasets: [{path: owner/rows, type: alpaca}]
"""


def test_files_are_counted_by_the_keys_that_keep_them_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, more in {
        "whole.yml": "",
        "one.yaml": "rl: grpo",
        "two.yaml": "rl: grpo\nqat: {group_size: 32}",
        "refused.yaml": "lora_r: -1",
        "other.yaml": None,
    }.items():
        (tmp_path / name).write_text("a: 1" if more is None else f"{FILE}{more}\n")
    counts = count(tmp_path)["Axolotl"]
    assert (counts.files, counts.imported) == (4, 1)
    assert counts.blocked == {"rl": 2, "qat": 1}
    assert counts.alone == {"rl": 1}
    assert counts.refused.keys() == {"refused.yaml"}
    main(tmp_path)
    printed = capsys.readouterr().out
    assert "Axolotl: 1 of 4 files imported (25%)" in printed
    assert "| `rl` | 2 | 1 |" in printed
