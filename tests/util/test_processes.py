"""How processes end: programs of others with who started them, and ranks at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.helpers.child_processes import printed, until

RUNNING = (sys.executable, "-m", "anygauge.util.processes")
PARENT = """
import os, subprocess, sys, time
from pathlib import Path
from anygauge.util.processes import parent_environment
subprocess.Popen(sys.argv[1:], env={**os.environ, **parent_environment()})
while not Path("ready").exists():
    time.sleep(0.02)
"""
PROGRAM = "trap 'env > told; exit' USR1; touch ready; while :; do sleep 0.1; done"


def test_a_program_is_told_that_its_parent_has_ended(tmp_path: Path) -> None:
    argv = (sys.executable, "-c", PARENT, *RUNNING, "sh", "-c", PROGRAM)
    subprocess.run(argv, cwd=tmp_path, check=True, timeout=60)
    told = tmp_path / "told"
    until(lambda: told.exists() and told.read_text(), "SIGUSR1 comes")
    assert "ANYGAUGE_PARENT_PID" not in told.read_text()  # its own children have another parent


def test_a_program_that_is_not_there_is_named() -> None:
    done = subprocess.run((*RUNNING, "no-such-program"), capture_output=True, text=True)
    told = "no-such-program cannot be started: No such file or directory\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_what_a_rank_has_printed_last_is_written() -> None:
    code = "from anygauge.util.processes import end_rank; print('the end'); end_rank(0)"
    # Empty: what is printed is kept back, as it is by default.
    assert printed(code, environment={"PYTHONUNBUFFERED": ""}) == ["the end"]
