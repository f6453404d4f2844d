"""srun and mpirun as a user types them start the ranks; `anygauge train` joins as each of them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.child_processes import until
from tests.helpers.runs import Run, run_file, trained
from tests.launchers.targets import NODES, LaunchTarget, brought_up, losses

pytestmark = pytest.mark.launchers

PATIENCE_S = 180.0
TRAIN = (sys.executable, "-m", "anygauge", "train")


@pytest.fixture(scope="module", params=["mpi", "slurm"])
def up(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LaunchTarget]:
    yield from brought_up(request, tmp_path_factory.mktemp("foreign"))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks of this machine, by anygauge's own means."""
    return trained(run_file(tmp_path_factory.mktemp("here")), "--devices", "2")


def starter(up: LaunchTarget, *, tasks: int = 2, nodes: int = 2) -> tuple[object, ...]:
    """What a user types before the command."""
    if up.name == "slurm":
        each = f"--ntasks-per-node={tasks // nodes}"
        return ("srun", f"--nodes={nodes}", f"--ntasks={tasks}", each, "--kill-on-bad-exit=1")
    return (
        *("mpirun", "--allow-run-as-root", "-np", tasks, "--oversubscribe"),
        *("--host", ",".join(f"{name}:{tasks // nodes}" for name in NODES[:nodes])),
        *("--map-by", f"ppr:{tasks // nodes}:node", "--bind-to", "none"),
        *("--mca", "plm_rsh_args", f"-F {up.options['config']}"),
        *("--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0"),
        *("-x", "OMP_NUM_THREADS", "-x", "PYTHONPATH"),
        *(() if nodes == 1 else ("-x", "MASTER_ADDR=node1")),
    )


def joined(up: LaunchTarget) -> dict[int, str]:
    """Ranks on all machines: process id -> command."""
    return {
        pid: text
        for name in NODES
        for pid, text in up.machines.commands(name).items()
        if "anygauge.launch.rank" in text and "python" in text.split(" ")[0]
    }


def ended(up: LaunchTarget, *argv: object) -> tuple[int, str, str]:
    process = up.start(*argv, cwd=up.machines.folder)
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_losses_are_those_of_devices_2(up: LaunchTarget, here: Run, nodes: int) -> None:
    folder = up.machines.folder
    path = run_file(folder, name=f"on{nodes}")
    before = {name: up.machines.bytes_sent(name) for name in NODES}
    status, out, err = ended(up, *starter(up, nodes=nodes), *TRAIN, path)
    assert status == 0, f"{out}\n{err}"
    assert losses(folder / "out" / f"on{nodes}") == pytest.approx(here.steps("loss"), rel=1e-6)
    assert out.count("final loss") == 1
    if nodes == 2:
        for name, count in before.items():
            assert up.machines.bytes_sent(name) > count + 50_000  # the ranks met over the cable
    assert not joined(up)


def test_two_machines_with_two_ranks_each(up: LaunchTarget) -> None:
    folder = up.machines.folder
    path = run_file(folder, name="four", train={"global_batch_size": 8})
    status, out, err = ended(up, *starter(up, tasks=4), *TRAIN, path)
    assert status == 0, f"{out}\n{err}"
    assert "on 4 ranks" in out
    records = {f"environment-node{node}.json": {"0", "1"} for node in range(2)}
    for name, local_ranks in records.items():
        assert set(json.loads((folder / "out" / "four" / name).read_text())) == local_ranks


def test_a_killed_rank_ends_the_others_and_is_named(up: LaunchTarget) -> None:
    folder = up.machines.folder
    path = run_file(folder, name="killed", train={"steps": 5000})
    process = up.start(*starter(up), *TRAIN, path, cwd=folder)
    metrics = folder / "out" / "killed" / "metrics.jsonl"
    until(lambda: metrics.exists() and len(losses(metrics.parent)) > 3, "steps")
    found = {
        pid
        for pid in joined(up)
        if b"\0RANK=1\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    }
    assert len(found) == 1
    os.kill(found.pop(), signal.SIGKILL)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0
    named = {"slurm": "task 1: Killed", "mpi": "process rank 1 "}[up.name]
    assert named in out + err, f"{out}\n{err}"
    until(lambda: not joined(up), "the end of all ranks", 30)


@pytest.mark.parametrize("up", ["slurm"], indirect=True)
def test_unlike_numbers_of_tasks_are_refused(up: LaunchTarget) -> None:
    path = run_file(up.machines.folder, name="unlike")
    uneven = ("srun", "--nodes=2", "--ntasks=4", "--kill-on-bad-exit=1", "--distribution=cyclic")
    status, _, err = ended(up, *uneven, *TRAIN, path)
    assert status != 0 and "Place neighbouring ranks on the same machine" in err, err


@pytest.mark.parametrize("up", ["slurm"], indirect=True)
def test_a_batch_script_without_srun_starts_ranks_as_ever(up: LaunchTarget) -> None:
    folder = up.machines.folder
    path = run_file(folder, name="batch")
    script, log = folder / "batch.sh", folder / "batch.log"
    command = shlex.join(map(str, (*TRAIN, path, "--devices", "2")))
    script.write_text(f"#!/bin/bash\n{command}\necho ended $?\n")
    asked = ("sbatch", "--nodes=1", "--ntasks=2", f"--output={log}", "--export=ALL", script)
    status, out, err = ended(up, *asked)
    assert status == 0, f"{out}\n{err}"
    until(lambda: log.exists() and "\nended " in log.read_text(), "the end of the job", PATIENCE_S)
    assert "ended 0" in log.read_text(), log.read_text()
    assert (folder / "out" / "batch" / "logs" / "supervisor.log").exists()
