"""A command that claims its folder, over fake ranks: `fake_cli.py SCRIPT FOLDER RANKS GRACE`."""

from __future__ import annotations

import sys
from pathlib import Path

from anygauge.launch.follow import follow
from anygauge.launch.local_run import LocalRun
from anygauge.launch.run_directory import lock_folder
from tests.helpers.jobs import make_job

FAKE_RANK = str(Path(__file__).with_name("fake_rank.py"))


def fake_run(script: str, run_directory: str, ranks: int, grace_s: float, lock: int) -> LocalRun:
    """What the command starts for the local launcher, but for the ranks."""
    job = make_job(run_directory=run_directory, devices=ranks)
    command = (sys.executable, FAKE_RANK, script)
    return LocalRun(job, lock=lock, grace_s=grace_s, argv_of_rank=lambda *_: command)


if __name__ == "__main__":
    with lock_folder(Path(sys.argv[2])) as lock:
        running = fake_run(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), lock)
        sys.exit(follow(running, run_directory=sys.argv[2]).show(sys.argv[2]))
