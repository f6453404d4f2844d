"""A command that claims its folder, over fake ranks: `fake_cli.py SCRIPT FOLDER RANKS GRACE`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from anygauge.cli.terminal import follow
from anygauge.interface import Plan
from anygauge.launch.run_directory import claim
from anygauge_launchers.local import Local
from tests.helpers.jobs import make_job
from tests.helpers.options import render

FAKE_AGENT = str(Path(__file__).with_name("fake_agent.py"))


def fake_plan(script: str, run_directory: str, ranks: int, grace_s: float) -> Plan:
    """What the local launcher plans, but for a fake agent."""
    job = make_job(run_directory=run_directory, devices=ranks)
    plan = render("local", job, {"grace_s": grace_s})
    (process,) = plan.processes
    assert process.argv[:3] == (sys.executable, "-m", "anygauge.launch.agent")
    argv = (sys.executable, FAKE_AGENT, script, *process.argv[3:])
    return replace(plan, processes=(replace(process, argv=argv),))


if __name__ == "__main__":
    plan = fake_plan(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    with claim(Path(sys.argv[2])) as lock:
        running = Local().submit(replace(plan, held=(lock,)))
        (Path(sys.argv[1]).parent / "agent_pid").write_text(str(running._agent.pid))
        sys.exit(follow(running, run_directory=sys.argv[2]))
