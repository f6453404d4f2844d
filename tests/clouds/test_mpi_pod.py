"""The launcher and the workers of an MPIJob; here mpirun is a script, in test_container_runs.py the
real one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from anygauge_clouds import mpi_pod
from anygauge_clouds.mpi_pod import HOSTFILE, coordinator_of

POD = (sys.executable, "-m", "anygauge_clouds.mpi_pod")
MPIRUN = """#!/bin/sh
echo "$ANYGAUGE_COORDINATOR" "$@"
trap 'echo asked; exit 75' USR1
trap 'echo hurried; exit 1' TERM
echo ready
while :; do sleep 0.1; done
"""
# Ends at SIGUSR1, as agents do, and leaves a word; the last argument makes it look like one.
AGENT = "import signal, sys, time; signal.signal(10, lambda *_: sys.exit(75)); time.sleep(100)"


@pytest.mark.parametrize(
    ("text", "coordinator"),
    [
        ("j-worker-0.j.ns.svc slots=1\nj-worker-1.j.ns.svc slots=1\n", "j-worker-0.j.ns.svc"),
        ("# ours\n\nj-worker-0:1\n", "j-worker-0"),
    ],
)
def test_the_coordinator_is_the_first_host(text: str, coordinator: str, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text(text)
    assert coordinator_of(tmp_path / "hostfile") == coordinator


@pytest.mark.parametrize(
    ("hostfile", "said"),
    [(None, "this is not the launcher of an MPIJob"), ("", "names no host"), ("absent", "No such")],
)
def test_what_is_not_a_launcher_says_so(hostfile: str | None, said: str, tmp_path: Path) -> None:
    environ = dict(os.environ)
    if hostfile is not None:
        environ[HOSTFILE] = str(tmp_path / "hostfile")
        if hostfile != "absent":
            (tmp_path / "hostfile").write_text(hostfile)
    done = subprocess.run(
        [*POD, "2", "x"], env=environ, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr


def test_the_clusters_request_reaches_agents_as_the_signal_that_mpirun_passes_on(
    tmp_path: Path,
) -> None:
    (tmp_path / "mpirun").write_text(MPIRUN)
    (tmp_path / "mpirun").chmod(0o755)
    (tmp_path / "hostfile").write_text("worker-0 slots=1\nworker-1 slots=1\n")
    process = subprocess.Popen(
        [*POD, "2", "agent", "a b $HOME"],
        env={
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            HOSTFILE: str(tmp_path / "hostfile"),
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first.startswith(
        "worker-0 --allow-run-as-root -np 2 --map-by ppr:1:node --bind-to none "
    )
    assert "-x ANYGAUGE_COORDINATOR -x PATH" in first and first.endswith("agent a b $HOME\n")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert (out, process.returncode) == ("asked\n", 75)


def test_a_request_before_mpirun_is_known_waits_until_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostfile").write_text("worker-0\n")
    monkeypatch.setenv(HOSTFILE, str(tmp_path / "hostfile"))
    sent: list[int] = []

    class Started:
        """An mpirun that runs, and ends by what it is sent, before its starter knows of it."""

        def __init__(self, *_: object, **__: object) -> None:
            signal.raise_signal(signal.SIGTERM)

        def send_signal(self, signum: int) -> None:
            sent.append(signum)

        def wait(self) -> int:
            return 75

    monkeypatch.setattr(mpi_pod.subprocess, "Popen", Started)
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert mpi_pod.main(["1", "agent"]) == 75
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    assert sent == [signal.SIGUSR1]


def test_a_worker_that_must_end_waits_for_its_agent() -> None:
    # In a container of its own, so that no other agent of this machine is asked.
    inside = [
        *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"),
        '"$0" -c "$1" anygauge.agent & agent=$!; sleep 1; '
        '"$0" -m anygauge_clouds.mpi_pod end; wait $agent; echo ended $?',
        *(sys.executable, AGENT),
    ]
    if os.geteuid() != 0 or subprocess.run(["unshare", "--pid", "true"], check=False).returncode:
        pytest.skip("a process namespace needs root")
    done = subprocess.run(inside, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "ended 75\n", done.stderr
