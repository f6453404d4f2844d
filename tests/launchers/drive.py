"""Render, submit and follow a job without the command line: `drive.py LAUNCHER JOB OPTIONS`.

Prints each event as a line; the exit status is the job's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from anygauge.interface import Job
from anygauge.registry import Registry
from tests.helpers.plans_from_options import render


def main() -> int:
    name, job_file, options_file = sys.argv[1:]
    launcher = Registry.load().launcher(name)()
    plan = render(name, Job.load(job_file), json.loads(Path(options_file).read_text()))
    running = launcher.submit(plan)
    for event in running.events():
        print(json.dumps(event), flush=True)
    return int(event["exit_status"])


if __name__ == "__main__":
    sys.exit(main())
