"""The exit status of a rank, and that nothing follows its report.

One is a process that imports all by itself, the others are forks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from anygauge.interface import STOPPED
from anygauge.launch.request import read_request
from anygauge.launch.run_directory import lock_folder, write_run
from anygauge.util.files import write_text
from tests.helpers.runs import run_file
from tests.helpers.zygote import Fork, run_forks

RANK = "tests.training.ending_rank"


@pytest.mark.parametrize(
    ("end", "status"), [("finished", 0), ("refused", 2), ("crashed", 1), ("stopped", STOPPED)]
)
def test_a_rank_ends_at_once_with_its_status(tmp_path: Path, end: str, status: int) -> None:
    path = run_file(
        tmp_path,
        strategy={"name": "single"},
        train={"steps": 2 if end == "finished" else 100_000},
        **({"data": {"max_length": 4}} if end == "refused" else {}),
    )
    request = read_request(path, [], {}, need_device=True)
    folder = Path(request.job.run_directory)
    numbers = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    with lock_folder(folder):
        write_run(Path(request.job.run_file), request.run)
        write_text(folder / "job.json", request.job.dump())
        if end == "crashed":
            (folder / "metrics.jsonl").mkdir()
        asked = str(folder / "metrics.jsonl") if end == "stopped" else "-"
        arguments = [asked, "--job", str(folder / "job.json")]
        out, err = tmp_path / "out.log", tmp_path / "err.log"
        if end == "finished":
            with out.open("w") as stdout, err.open("w") as stderr:
                code = subprocess.run(
                    [sys.executable, "-m", RANK, *arguments],
                    stdout=stdout,
                    stderr=stderr,
                    env={**os.environ, **numbers, "OMP_NUM_THREADS": "1"},
                    timeout=300,
                ).returncode
        else:
            fork = Fork(
                module=RANK,
                arguments=arguments,
                log=str(out),
                errors=str(err),
                environment=numbers,
            )
            (code,) = run_forks([fork], timeout_s=300)
    said = err.read_text()
    assert code == status, said
    assert out.read_text().startswith("not flushed")
    assert ("Traceback" in said) == (end in ("refused", "crashed")), said
    assert (folder / "report.json").is_file() == (end == "finished")
