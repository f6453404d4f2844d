"""A run's folder is kept while a process lives that leads to its ranks, without the command too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from anygauge.interface import AnygaugeError, Plan, PlannedFile, PlannedProcess
from anygauge.launch.run_directory import lock_folder
from anygauge_launchers.remote_job import RemoteJob

TIMEOUT_S = 60

# As ssh: closes what it inherits, and lives until its standard input ends and is told to end.
SSH = """\
import os, sys
os.closerange(3, 1000)
{told}
"""
COMMAND = """\
import sys, time
from pathlib import Path
from anygauge.launch.run_directory import lock_folder
from tests.launchers.test_folder_lock import plan, started
folder = Path(sys.argv[1])
with lock_folder(folder) as lock:
    job = started(plan(folder, "open(sys.argv[1]).read()", str(folder / "told"), lock))
    print(job._connections[0]._process.pid, flush=True)
    time.sleep(600)
"""


def plan(folder: Path, told: str, argument: str, lock: int) -> Plan:
    argv = (sys.executable, "-I", "-S", "-c", SSH.format(told=told), argument)
    return Plan(
        files=(PlannedFile(path=str(folder / "job.json"), text="{}"),),
        processes=(PlannedProcess(node_rank=0, host="x", argv=argv, arguments=("--node-rank",)),),
        held=(lock,),
    )


def started(plan: Plan) -> RemoteJob:
    return RemoteJob.start(plan)


def test_after_a_kill_the_folder_is_kept_until_the_connection_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    os.mkfifo(folder / "told")
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert command.stdout is not None
    connection = os.pidfd_open(int(command.stdout.readline()))
    try:
        command.send_signal(signal.SIGKILL)
        command.wait(TIMEOUT_S)
        with pytest.raises(AnygaugeError, match="a run is writing to"), lock_folder(folder):
            pass
    finally:
        signal.pidfd_send_signal(connection, signal.SIGKILL)
        os.close(connection)
        command.stdout.close()
    # The process that holds the lock ends soon after: this claim waits for that.
    waiting = ["flock", "--timeout", str(TIMEOUT_S), str(folder / ".lock"), "true"]
    assert subprocess.run(waiting, timeout=2 * TIMEOUT_S, check=False).returncode == 0
    with lock_folder(folder):
        pass


def test_a_job_that_has_ended_leaves_the_folder_free(tmp_path: Path) -> None:
    for _ in range(2):
        with lock_folder(tmp_path) as lock:
            job = started(plan(tmp_path, "", "", lock))
            assert [event["state"] for event in job.events()] == ["failed"]
