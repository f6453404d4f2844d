"""The command alone reads YAML: ranks, agents and the checks before a run read what it resolved."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from anygauge.cli.intent import read_intent
from anygauge.cli.run_folder import write_run
from tests.helpers.runs import run_file

# Whatever imports a module that stands as None in this table gets an ImportError.
WITHOUT_THE_READER = """
import sys
for name in ("document", "load"):
    sys.modules[f"anygauge.config.{name}"] = None
"""


def python(text: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_READER + text, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **environment},
    )


def test_a_rank_trains_and_saves_without_the_reader_of_yaml(tmp_path: Path) -> None:
    path = run_file(tmp_path, strategy={"name": "single"}, checkpoint={"every": 2})
    intent = read_intent(path, [], {}, need_device=True)
    job = intent.job
    write_run(Path(job.run_file), intent.run)
    job_file = Path(job.run_file).with_name("job.json")
    job_file.write_text(job.dump())
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    text = "from anygauge.training.worker import main\nsys.exit(main())"
    done = python(text, "--job", str(job_file), **rank)
    assert done.returncode == 0, done.stderr
    assert (Path(job.run_directory) / "report.json").is_file()


def test_agents_and_the_checks_import_no_reader_of_yaml() -> None:
    done = python(
        "import anygauge.agent.__main__, anygauge.agent.startup, anygauge.training.preflight\n"
        "from anygauge.config.resolved import dump_run, parse_run, read_run"
    )
    assert done.returncode == 0, done.stderr
