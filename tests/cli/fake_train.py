"""A command with fake ranks that claims its folder: `fake_train.py SCRIPT RUN_DIRECTORY`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from anygauge.cli.run_folder import claimed
from anygauge.cli.terminal import follow
from anygauge_launchers.local import Local
from tests.agent.fake_cli import fake_plan

if __name__ == "__main__":
    script, directory = sys.argv[1:]
    plan = fake_plan(script, directory, 1, 0.5)
    with claimed(Path(directory)) as lock:
        running = Local().submit(replace(plan, held=(lock,)))
        (Path(script).parent / "agent_pid").write_text(str(running.pid))
        sys.exit(follow(running, run_directory=directory))
