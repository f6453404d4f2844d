"""Memory does not grow with the data: neither while rows are prepared nor while they are streamed.

The size of the streamed file is ANYGAUGE_LARGE_GB gigabytes (1 if unset). Each measurement is a
process of its own, and its peak is what the kernel says (VmHWM), mapped files included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.load import load_run_file
from tests.helpers.runs import run_file

MIB = 2**20
ROW_BYTES = 1000
NOTE = ROW_BYTES - 80

PREPARE = """
import json, sys
from tests.helpers.memory import peak
from transformers import AutoTokenizer
from anygauge.config.schema import DataSection
from anygauge.data import prepare
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
data = DataSection(train={"path": sys.argv[2]}, max_length=64, cache=sys.argv[3])
rows = prepare(data, tokenizer, 0).train
print(json.dumps({"peak": peak(), "rows": len(rows)}))
"""

TRAIN = """
import json, sys
from pathlib import Path
from tests.helpers.memory import peak
from tests.helpers.runs import trained_here
run = trained_here(Path(sys.argv[1]))
print(json.dumps({"peak": peak(), "losses": run.steps("loss")}))
"""


def big_file(path: Path, size: int) -> Path:
    """Rows of about `ROW_BYTES`, most of them in a column that is not trained on."""
    rows = [
        {"prompt": f"Number {number}:", "completion": f"it is {number * 7}", "note": "x" * NOTE}
        for number in range(4096)
    ]
    block = "".join(json.dumps(row) + "\n" for row in rows).encode()
    with path.open("wb") as file:
        while file.tell() < size:
            file.write(block)
    return path


def measured(script: str, *arguments: Path | str) -> dict[str, Any]:
    """What a script prints last, as JSON, run in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
        capture_output=True,
        text=True,
        timeout=7200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_preparing_takes_no_memory_for_the_size_of_the_file(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    peaks = {}
    for size in (10 * MIB, 200 * MIB):
        path = big_file(tmp_path / f"{size}.jsonl", size)
        found = measured(PREPARE, tmp_path / "tokenizer", path, tmp_path / "cache")
        assert found["rows"] >= size // ROW_BYTES // 2
        peaks[size] = found["peak"]
        path.unlink()
    assert peaks[200 * MIB] - peaks[10 * MIB] < 40 * MIB, peaks


@pytest.mark.slow
def test_streaming_takes_no_memory_for_the_size_of_the_file(tmp_path):
    large = int(float(os.environ.get("ANYGAUGE_LARGE_GB", "1")) * 1e9)
    found = {}
    for size in (MIB, large):
        path = big_file(tmp_path / f"{size}.jsonl", size)
        run = run_file(
            tmp_path,
            name=f"of-{size}",
            strategy={"name": "single"},
            data={"train": {"path": str(path)}, "streaming": True, "shuffle_buffer": 2000},
            train={"steps": 4},
        )
        assert load_run_file(run).run.data.streaming
        found[size] = measured(TRAIN, run)
        assert len(found[size]["losses"]) == 4
        path.unlink()
    assert found[large]["peak"] - found[MIB]["peak"] < 48 * MIB, found
