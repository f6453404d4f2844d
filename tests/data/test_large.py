"""Memory does not grow with the data: neither while rows are prepared nor while they are streamed.

The size of the streamed file is ANYGAUGE_LARGE_GB gigabytes (1 if unset). Each measurement is a
process of its own, and its peak is what the kernel says (VmHWM), mapped files included.
"""

from __future__ import annotations

import json
import os

import pytest

from tests.helpers.child_processes import printed
from tests.helpers.runs import run_file

MIB = 2**20
ROW_BYTES = 1000

PREPARE = """
import sys
from tests.helpers.resident_memory import peak
from transformers import AutoTokenizer
from anygauge.config.schema import DataSection
from anygauge.data import prepare
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
data = DataSection(train={"path": sys.argv[2]}, max_length=64, cache=sys.argv[3])
rows = prepare(data, tokenizer, 0).train
print([peak(), len(rows)])
"""
TRAIN = """
import sys
from pathlib import Path
from tests.helpers.resident_memory import peak
from tests.helpers.runs import trained_here
run = trained_here(Path(sys.argv[1]))
print([peak(), len(run.steps("loss"))])
"""


def big_file(path, size):
    """Rows of about `ROW_BYTES`, most of them in a column that is not trained on."""
    note = "x" * (ROW_BYTES - 80)
    rows = [
        {"prompt": f"Number {number}:", "completion": f"it is {number * 7}", "note": note}
        for number in range(4096)
    ]
    block = "".join(json.dumps(row) + "\n" for row in rows).encode()
    with path.open("wb") as file:
        while file.tell() < size:
            file.write(block)
    return path


def measured(script, *arguments):
    """The most memory that a script took, and the number that it prints with it."""
    environment = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    return json.loads(printed(script, *arguments, environment=environment, timeout_s=7200)[-1])


@pytest.mark.slow
def test_preparing_takes_no_memory_for_the_size_of_the_file(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    peaks = []
    for size in (10 * MIB, 200 * MIB):
        path = big_file(tmp_path / f"{size}.jsonl", size)
        peak, rows = measured(PREPARE, tmp_path / "tokenizer", path, tmp_path / "cache")
        assert rows >= size // ROW_BYTES // 2
        peaks.append(peak)
        path.unlink()
    assert peaks[1] - peaks[0] < 40 * MIB, peaks


@pytest.mark.slow
def test_streaming_takes_no_memory_for_the_size_of_the_file(tmp_path):
    peaks = []
    for size in (MIB, int(float(os.environ.get("ANYGAUGE_LARGE_GB", "1")) * 1e9)):
        path = big_file(tmp_path / f"{size}.jsonl", size)
        data = {"train": {"path": str(path)}, "streaming": True, "shuffle_buffer": 2000}
        run = run_file(
            tmp_path, name=f"of-{size}", strategy={"name": "single"}, data=data, train={"steps": 4}
        )
        peak, steps = measured(TRAIN, run)
        assert steps == 4
        peaks.append(peak)
        path.unlink()
    assert peaks[1] - peaks[0] < 48 * MIB, peaks
