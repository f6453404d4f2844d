"""What may go wrong on a cluster: the job ends everywhere, the cause is named, nothing stays.

A real fine-tuning over two nodes is hit once it has done some steps. With ANYGAUGE_FAULTS=FILE, the
seconds until each node was empty are added to a file, for the table in docs/launchers-measured.md.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from anygauge.interface import LOST, STOPPED
from tests.helpers.child_processes import until
from tests.helpers.faults import TOLD_TO_FAIL, keep
from tests.helpers.runs import run_file
from tests.launchers.emulated import LOGIN
from tests.launchers.targets import NODES, PROGRAMS, LaunchTarget, brought_up

pytestmark = pytest.mark.launchers

LOST_AFTER_S = 8.0
ENDS_WITHIN_S = 60.0
LOST_NODE2 = ("node 1 (node2) is lost: its agent ended without a report",)


@pytest.fixture(scope="module", params=sorted(PROGRAMS))
def up(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LaunchTarget]:
    yield from brought_up(request, tmp_path_factory.mktemp("faults"))


@pytest.fixture(autouse=True)
def _tidy(up: LaunchTarget) -> Iterator[None]:
    """A test that failed leaves nothing to the next one."""
    yield
    up.tidy()


class Hit:
    """A run that has done some steps."""

    def __init__(self, up: LaunchTarget, name: str) -> None:
        self.up = up
        path = run_file(
            up.machines.folder,
            name=name,
            strategy={"name": "zero"},
            train={"steps": 100_000},
            checkpoint={"grace_s": 20},
            launch=up.launch(lost_after_s=LOST_AFTER_S, collective_timeout_s=40),
        )
        self.folder = up.machines.folder / "out" / name
        (up.machines.folder / "sitecustomize.py").write_text(TOLD_TO_FAIL)
        self.command = up.train(path)
        until(lambda: self.steps() >= 2, f"steps of {name}: {self.trouble()}")
        assert all(self.of(node, "anygauge.launch.agent") for node in NODES)

    def steps(self) -> int:
        """Steps done."""
        metrics = self.folder / "metrics.jsonl"
        assert self.command.poll() is None, self.command.communicate()
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def trouble(self) -> str:
        """What the agents say, for a failing test."""
        return "".join(p.read_text()[-500:] for p in self.folder.glob("logs/agent*.log"))

    def of(self, machine: str, what: str) -> list[int]:
        """Processes of the job on a machine."""
        return [pid for pid, text in self.up.machines.of_job(machine).items() if what in text]

    def rank(self, node: str) -> int:
        """The process of a node's rank: the one whose parent is the agent."""
        (found,) = self.of(node, "anygauge.launch.rank")[:1]
        return found

    def agent(self, node: str) -> int:
        """The process of a node's agent."""
        return self.of(node, "anygauge.launch.agent")[-1]

    def ends(self, *, own: bool = False) -> dict[str, float]:
        """Seconds until nothing of the job was left, machine by machine."""
        began = time.monotonic()
        found: dict[str, float] = {}
        while len(found) < len(NODES):
            for node in NODES:
                if node not in found and not self.up.machines.of_job(node, own=own):
                    found[node] = round(time.monotonic() - began, 1)
            assert time.monotonic() - began < ENDS_WITHIN_S, self.up.of_job()
            time.sleep(0.05)
        return found

    def ended(self, fault: str, *, own: bool = False) -> tuple[int, str]:
        """Exit status and standard error of the command, once nothing is left; for the table."""
        seconds = self.ends(own=own)
        _, err = self.command.communicate(timeout=ENDS_WITHIN_S)
        assert "Traceback" not in err
        keep(self.up.name, fault, seconds, err)
        return self.command.returncode, err


HURT = [
    *((f"worker exits on {node}", node, "worker", signal.SIGRTMIN) for node in NODES),
    *((f"worker killed on {node}", node, "worker", signal.SIGKILL) for node in NODES),
    *((f"agent killed on {node}", node, "agent", signal.SIGKILL) for node in NODES),
]


@pytest.mark.parametrize(("fault", "node", "what", "signum"), HURT)
def test_a_process_fails(up: LaunchTarget, fault: str, node: str, what: str, signum: int) -> None:
    hit = Hit(up, fault.replace(" ", "-"))
    os.kill(hit.rank(node) if what == "worker" else hit.agent(node), signum)
    status, err = hit.ended(fault)
    if what == "worker":
        how = "was killed (signal 9, SIGKILL)"
        if signum != signal.SIGKILL:
            how = "failed with RuntimeError: told to fail"
        assert status == 1 and f"rank {NODES.index(node)} on {node} {how}" in err
    elif node == "node2":
        assert status == LOST and "node 1 (node2) is lost" in err
    else:
        assert status == LOST, err
        assert "coordinator is lost" in err or "node 0 (node1)" in err, err
    if fault != "agent killed on node1":
        assert not up.machines.of_job(LOGIN)


@pytest.mark.parametrize("node", NODES)
def test_a_host_is_powered_off(up: LaunchTarget, node: str) -> None:
    hit = Hit(up, f"power-{node}")
    up.machines.power_off(node)
    try:
        status, err = hit.ended(f"{node} powered off")
    finally:
        up.power_on(node)
    assert status == LOST, err
    # ssh itself may tell of the first machine before the second one does.
    known = {"node1": ("the coordinator is lost", "node 0 (node1): ssh ended"), "node2": LOST_NODE2}
    assert any(text in err for text in known[node]), err


@pytest.mark.parametrize("node", NODES)
def test_a_link_is_cut(up: LaunchTarget, node: str) -> None:
    hit = Hit(up, f"cut-{node}")
    up.machines.cut(node)
    try:
        # Slurm's own processes on the first machine wait for its controller while it is cut off.
        status, err = hit.ended(f"cable of {node} cut", own=up.name == "slurm")
    finally:
        up.machines.reconnect(node)
    assert status == LOST, err
    who = {"node1": ("the coordinator is lost",), "node2": ("node 1 (node2) is lost",)}
    # The storage of emulated machines is on no cable: under Slurm both sides write their view.
    allowed = who["node1"] + who["node2"] if up.name == "slurm" else who[node]
    ways = [f"{text}: nothing was heard from it for {LOST_AFTER_S:g} s" for text in allowed]
    assert any(way in err for way in ways), err
    until(lambda: not any(up.of_job().values()), "empty machines")


@pytest.mark.parametrize(
    ("fault", "signum"), [("launcher killed", signal.SIGKILL), ("terminal closed", signal.SIGHUP)]
)
def test_the_command_line_ends(up: LaunchTarget, fault: str, signum: int) -> None:
    hit = Hit(up, fault.replace(" ", "-"))
    os.killpg(hit.command.pid, signum)
    if up.name == "slurm":
        # The job is Slurm's: it continues, and can be ended.
        hit.command.communicate(timeout=ENDS_WITHIN_S)
        before = len((hit.folder / "metrics.jsonl").read_text().splitlines())
        until(
            lambda: len((hit.folder / "metrics.jsonl").read_text().splitlines()) > before + 2,
            "further steps",
        )
        number = squeue(up)
        subprocess.run(
            up.machines.command(LOGIN, ["scancel", number]),
            env={**os.environ, **up.environment},
            check=True,
        )
        seconds = hit.ends()
        keep(up.name, f"{fault}, then scancel", seconds, "")
    else:
        seconds = hit.ends()
        hit.command.communicate(timeout=ENDS_WITHIN_S)
        keep(up.name, fault, seconds, "")
        assert list(hit.folder.glob("checkpoints/*")), "no checkpoint was written"
    until(lambda: not up.machines.of_job(LOGIN), "an empty login machine")


def test_ctrl_c_writes_a_checkpoint_from_which_the_job_goes_on(up: LaunchTarget) -> None:
    hit = Hit(up, "ctrl-c")
    hit.command.send_signal(signal.SIGINT)
    status, err = hit.ended("Ctrl-C")
    assert status == STOPPED, err
    assert "stopped at request after step" in err


def squeue(up: LaunchTarget) -> str:
    """The number of the only job."""
    done = subprocess.run(
        up.machines.command(LOGIN, ["squeue", "-h", "-o", "%i"]),
        env={**os.environ, **up.environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()[0]
