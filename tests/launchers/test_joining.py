"""What docs/joining.md has SkyPilot, dstack and Ray Train start on each machine joins as ranks.

The tools are not here: two emulated machines get the variables that their sources set, and run the
commands on the page.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import blocks
from tests.helpers.child_processes import end, until
from tests.helpers.runs import Run, run_file, trained
from tests.launchers.emulated import Machines, why_not
from tests.launchers.targets import NODES, losses

PATIENCE_S = 600.0
BLOCKS = {block.option("joining"): block.text for block in blocks() if block.option("joining")}
TOOLS = ("skypilot", "dstack", "ray")


def command_of(tool: str, shared: Path) -> list[str]:
    """What the tool executes on a machine, with the tests' device and folder."""
    text = BLOCKS[tool].replace("cuda", "cpu").replace("/shared/runs", str(shared))
    if tool == "ray":
        group = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
        return [sys.executable, "-c", f"{text}\n{group}train_loop()"]
    task = yaml.safe_load(text)
    lines = task["run"].splitlines() if tool == "skypilot" else task["commands"][1:]
    return ["bash", "-c", "\n".join(lines)]


def variables(tool: str, rank: int, addresses: list[str]) -> dict[str, str]:
    """One rank on each machine, as the tool tells it.

    Sources: skypilot docs/source/running-jobs/environment-variables.rst; dstack
    runner/internal/runner/executor/executor.go, execJob; ray python/ray/train/torch/config.py,
    _set_torch_distributed_env_vars and on_start.
    """
    nodes = str(len(addresses))
    return {
        "skypilot": {
            "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "\n".join(addresses),
            "SKYPILOT_NUM_NODES": nodes, "SKYPILOT_NUM_GPUS_PER_NODE": "1",
            "SKYPILOT_TASK_ID": "sky-2026-01-01-00-00-00-000000_train_1",
        },
        "dstack": {
            "DSTACK_NODE_RANK": str(rank), "DSTACK_NODES_NUM": nodes,
            "DSTACK_NODES_IPS": "\n".join(addresses), "DSTACK_MASTER_NODE_IP": addresses[0],
            "DSTACK_GPUS_PER_NODE": "1", "DSTACK_GPUS_NUM": nodes, "DSTACK_RUN_NAME": "train",
        },
        "ray": {
            "RANK": str(rank), "WORLD_SIZE": nodes, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "NODE_RANK": str(rank), "MASTER_ADDR": addresses[0], "MASTER_PORT": "29500",
            "ACCELERATE_TORCH_DEVICE": "cpu",
        },
    }[tool]  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS[:2])
def test_each_machine_becomes_its_part_of_the_job(tool: str, tmp_path: Path) -> None:
    program = tmp_path / "torchrun"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    given = variables(tool, 1, ["10.0.0.1", "10.0.0.2"])
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = command_of(tool, tmp_path / "runs")
    words = subprocess.check_output(command, text=True, env={**given, "PATH": path}).split("\n")
    assert words[:-1] == [
        *("--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "1"),
        *("--master-addr", "10.0.0.1", "--master-port", "29500"),
        *("-m", "anygauge", "train", "run.yaml", "--backend", "cpu"),
        *("--output", str(tmp_path / "runs"), "--resume", "auto"),
    ]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    why = why_not()
    if why is not None:
        pytest.skip(why)
    with Machines(tmp_path_factory.mktemp("joining")) as made:
        yield made


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks of this machine, by anygauge's own means."""
    return trained(run_file(tmp_path_factory.mktemp("here")), "--devices", "2")


@pytest.mark.launchers
@pytest.mark.parametrize("tool", TOOLS)
def test_the_losses_are_those_of_devices_2(tool: str, machines: Machines, here: Run) -> None:
    (folder := machines.folder / tool).mkdir()
    run_file(folder).rename(folder / "run.yaml")
    addresses = [machines.addresses[name] for name in NODES]
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    started = [
        subprocess.Popen(
            machines.command(name, command_of(tool, folder / "out")),
            env={**variables(tool, rank, addresses), "PATH": programs, "OMP_NUM_THREADS": "1"},
            cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )
        for rank, name in enumerate(NODES)
    ]  # fmt: skip
    try:
        ends = [process.communicate(timeout=PATIENCE_S) for process in started]
    finally:
        end(*started)
    assert [process.returncode for process in started] == [0, 0], ends
    assert losses(folder / "out" / "tiny") == pytest.approx(here.steps("loss"), rel=1e-6)
    (out, err), (other, _) = ends
    assert "note: started by" in err and "on 2 ranks" in out and "final loss" not in other
    until(lambda: not any(machines.of_job(name) for name in NODES), "the end of all ranks", 30)
