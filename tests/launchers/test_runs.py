"""The same fine-tuning on two machines by every launcher, and on one: the same losses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from anygauge.interface import LOST, STOPPED
from tests.helpers.child_processes import until
from tests.helpers.runs import Run, run_file, trained
from tests.launchers.emulated import LOGIN
from tests.launchers.targets import PROGRAMS, LaunchTarget, brought_up, gsm8k, losses

pytestmark = pytest.mark.launchers

PATIENCE_S = 180.0


@pytest.fixture(scope="module", params=sorted(PROGRAMS))
def up(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LaunchTarget]:
    yield from brought_up(request, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks of this machine."""
    folder = tmp_path_factory.mktemp("here")
    path = run_file(folder, strategy={"name": "zero"}, data=gsm8k(folder))
    return trained(path, "--devices", "2")


def ended(
    up: LaunchTarget, path: Path, *options: str, prefix: tuple[object, ...] = ()
) -> tuple[int, str, str]:
    process = up.start(*prefix, sys.executable, "-m", "anygauge.cli", "train", path, *options)
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def test_the_losses_are_those_of_one_machine(up: LaunchTarget, here: Run) -> None:
    folder = up.machines.folder
    path = run_file(folder, strategy={"name": "zero"}, data=gsm8k(folder), launch=up.launch())
    before = {name: up.machines.bytes_sent(name) for name in ("node1", "node2")}
    status, out, err = ended(up, path)
    assert status == 0, f"{out}\n{err}"
    assert losses(folder / "out" / "tiny") == pytest.approx(here.steps("loss"), rel=1e-6)
    for name, count in before.items():
        assert up.machines.bytes_sent(name) > count + 100_000  # the ranks met over the cable
    assert not any(up.of_job().values())


def test_two_machines_with_two_ranks_each(up: LaunchTarget) -> None:
    folder = up.machines.folder
    path = run_file(folder, name="four", strategy={"name": "zero"}, launch=up.launch(devices=2),
                    train={"global_batch_size": 8})  # fmt: skip
    status, out, err = ended(up, path)
    assert status == 0, f"{out}\n{err}"
    results = [
        json.loads((folder / "out" / "four" / "ranks" / f"rank{r}.json").read_text())
        for r in range(4)
    ]
    assert [(r["host"], r["local_rank"], r["state"]) for r in results] == [
        ("node1", 0, "ok"), ("node1", 1, "ok"), ("node2", 0, "ok"), ("node2", 1, "ok"),
    ]  # fmt: skip


def test_an_error_of_the_user_is_told_once_and_whole(up: LaunchTarget) -> None:
    folder = up.machines.folder
    path = run_file(folder, name="wrong", strategy={"name": "zero"}, launch=up.launch(),
                    kernels={"lora_linear": "addmm"}, adapter={"dora": True})  # fmt: skip
    status, out, err = ended(up, path)
    assert status != 0 and "Traceback" not in out + err
    assert err.count("kernels.lora_linear: 'addmm' cannot serve this run") == 1, err


def test_the_first_machine_decides_for_all(up: LaunchTarget) -> None:
    """Its cards count, not those of the machine of the command; the others hear it and obey."""
    if up.name != "ssh":
        pytest.skip("alike for all launchers")
    folder, launch = up.machines.folder, up.launch()
    path = run_file(folder, name="auto", strategy={"name": "auto"}, launch=launch)
    status, out, err = ended(up, path, "--plan")
    assert status == 0, f"{out}\n{err}"
    assert "strategy ddp (auto: the whole model fits each device)" in out
    report = json.loads((folder / "out" / "auto" / "report.json").read_text())
    assert report["choices"]["strategy"].endswith("(auto: the whole model fits each device)")
    assert report["memory"]["predicted"]
    small = {"ANYGAUGE_SIM_CAPACITY": str(2**16), "ANYGAUGE_SIM_LOCKS": str(folder / "locks")}
    path = run_file(
        folder, name="full", backend="sim", strategy={"name": "auto"}, launch=launch,
        environment=small,
    )  # fmt: skip
    status, out, err = ended(up, path)
    assert status == 2 and "node node1: the run cannot fit, with strategy " in err, f"{out}\n{err}"
    assert not (folder / "out" / "full" / "metrics.jsonl").exists()


def test_a_machine_that_cannot_be_reached_is_named(up: LaunchTarget) -> None:
    if up.name == "slurm":
        pytest.skip("Slurm chooses the machines")
    options = {**up.options, "hosts": ["node1", "node7"]}
    path = run_file(up.machines.folder, name="away", launch=up.launch(options=options))
    began = time.monotonic()
    status, out, err = ended(up, path)
    assert status == 1, f"{out}\n{err}"
    assert "node7" in err, err
    assert time.monotonic() - began < 60
    assert not any(up.of_job().values())


class TestSlurm:
    """What Slurm alone can do."""

    @pytest.fixture(autouse=True)
    def _only(self, up: LaunchTarget) -> None:
        if up.name != "slurm":
            pytest.skip("not Slurm")

    def test_inside_an_allocation(self, up: LaunchTarget, here: Run) -> None:
        folder = up.machines.folder
        path = run_file(folder, name="inside", strategy={"name": "zero"}, data=gsm8k(folder),
                        launch=up.launch())  # fmt: skip
        status, out, err = ended(up, path, prefix=("salloc", "-N2"))
        assert status == 0, f"{out}\n{err}"
        assert losses(folder / "out" / "inside") == pytest.approx(here.steps("loss"), rel=1e-6)

    def test_a_rendered_plan_is_handed_to_sbatch(self, up: LaunchTarget, here: Run) -> None:
        folder = up.machines.folder
        path = run_file(folder, name="rendered", strategy={"name": "zero"}, data=gsm8k(folder),
                        launch=up.launch())  # fmt: skip
        plan = folder / "a plan's folder"
        argv = (sys.executable, "-m", "anygauge.cli", "launch", path, "--render", plan)
        out, err = up.start(*argv).communicate(timeout=PATIENCE_S)
        assert "to submit it: sbatch " in out, f"{out}\n{err}"
        out, err = up.start("sbatch", plan / "job.sbatch").communicate(timeout=30)
        assert out.startswith("Submitted batch job "), f"{out}\n{err}"
        number = out.split()[-1]
        until(lambda: number not in self.ask(up, "squeue", "-h", "-o", "%i"), "its end")
        run = folder / "out" / "rendered"
        assert losses(run) == pytest.approx(here.steps("loss"), rel=1e-6), (
            plan / "slurm.log"
        ).read_text()
        assert (run / "adapter" / "adapter_model.safetensors").is_file()
        assert not any(up.of_job().values())

    def test_a_warned_job_goes_on_in_a_new_one(self, up: LaunchTarget) -> None:
        folder = up.machines.folder
        options = {"requeue": True}
        path = run_file(folder, name="again", strategy={"name": "zero"},
                        train={"steps": 40}, launch=up.launch(options=options))  # fmt: skip
        process = up.train(path)
        metrics = folder / "out" / "again" / "metrics.jsonl"
        until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3, "steps")
        self.ask(up, "scancel", "--signal=USR1", self.ask(up, "squeue", "-h", "-o", "%i"))
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, f"{out}\n{err}"
        assert "resumed: " in out and re.search(r"^steps +40$", out, re.MULTILINE)
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        steps = [record["step"] for record in records if "loss" in record]
        assert steps == list(range(1, 41))

    def test_a_job_that_lost_a_machine_goes_on_when_it_is_back(self, up: LaunchTarget) -> None:
        folder = up.machines.folder
        path = run_file(folder, name="back", strategy={"name": "zero"},
                        train={"steps": 60}, checkpoint={"every": 5},
                        launch=up.launch(options={"requeue": True}, lost_after_s=8))  # fmt: skip
        process = up.train(path)
        metrics = folder / "out" / "back" / "metrics.jsonl"
        until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 12, "steps")
        up.machines.power_off("node2")
        time.sleep(1)
        up.power_on("node2")
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, f"{out}\n{err}"
        assert "resumed: " in out and re.search(r"^steps +60$", out, re.MULTILINE)

    def test_a_cancelled_job_is_not_started_again(self, up: LaunchTarget) -> None:
        folder = up.machines.folder
        path = run_file(folder, name="ended", strategy={"name": "zero"}, train={"steps": 100_000},
                        launch=up.launch(options={"requeue": True}))  # fmt: skip
        process = up.train(path)
        metrics = folder / "out" / "ended" / "metrics.jsonl"
        until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, "steps")
        process.terminate()  # leaves the job to itself
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 0 and "anygauge job follow" in out
        run = folder / "out" / "ended"
        done = up.start(sys.executable, "-m", "anygauge.cli", "job", "cancel", run)
        done.communicate(timeout=60)
        seen = up.start(sys.executable, "-m", "anygauge.cli", "job", "follow", run)
        out, err = seen.communicate(timeout=PATIENCE_S)
        assert seen.returncode in (STOPPED, LOST) and "stopped at request" in err, f"{out}\n{err}"
        until(lambda: self.ask(up, "squeue", "-h", "-o", "%i") == "", "an empty queue")

    def ask(self, up: LaunchTarget, *argv: str) -> str:
        done = subprocess.run(
            up.machines.command(LOGIN, argv),
            env={**os.environ, **up.environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()
