"""A command that claims its folder, over fake ranks: `fake_cli.py SCRIPT FOLDER RANKS GRACE`."""

from __future__ import annotations

import sys
from pathlib import Path

from anygauge.launch.follow import follow
from anygauge.launch.local_run import LocalRun
from anygauge.launch.run_directory import claim
from tests.helpers.jobs import make_job

FAKE_RANK = str(Path(__file__).with_name("fake_rank.py"))

if __name__ == "__main__":
    script, folder, ranks, grace_s = sys.argv[1:]
    argv = (sys.executable, FAKE_RANK, script)
    job = make_job(run_directory=folder, devices=int(ranks))
    with claim(Path(folder)) as lock:
        running = LocalRun(job, lock=lock, grace_s=float(grace_s), argv_of_rank=lambda *_: argv)
        sys.exit(follow(running, run_directory=folder))
