"""Real runs through the `cuda` backend on the stand-in for CUDA and NCCL: what a job of several
machines sets, opens and calls. Of a card's arithmetic and speed it can say nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.load import load_run_file
from anygauge.interface import LaunchSettings
from anygauge.launch.run_directory import write_run
from tests.helpers.child_processes import begin_agents, end, printed
from tests.helpers.gaudi import calls
from tests.helpers.jobs import make_job
from tests.helpers.nvidia import NAME, needs_cards, standin_environment, standin_site
from tests.helpers.runs import anygauge, run_file, train

pytestmark = needs_cards

STEPS, NODES, DEVICES = 2, 2, 2
WORLD = NODES * DEVICES


def fields(**changes: Any) -> dict[str, Any]:
    return {
        "backend": "cuda",
        "adapter": {"r": 4, "dropout": 0.0},
        "train": {"steps": STEPS, "global_batch_size": WORLD, "micro_batch_size": 1},
        **changes,
    }


class EndedJob:
    """A job of two machines that ended well: its steps, and what each rank called."""

    def __init__(self, folder: Path, strategy: str) -> None:
        site, self._record = standin_site(folder), folder / f"{strategy}-record"
        path = run_file(folder, **fields(name=strategy, strategy={"name": strategy}))
        self.run = folder / strategy
        self.run.mkdir()
        write_run(self.run / "run.json", load_run_file(path))
        job = make_job(
            name=strategy, run_directory=str(self.run), run_file=str(self.run / "run.json"),
            backend="cuda", strategy=strategy, nodes=NODES, devices=DEVICES, token="of this job",
            rendezvous="file:///nowhere", environment={"GLOO_SOCKET_IFNAME": "lo"},
        )  # fmt: skip
        (self.run / "job.json").write_text(job.dump())
        environment = standin_environment(site, self._record)
        agents = begin_agents(self.run / "job.json", NODES, environment)
        try:
            out, err = agents[0].communicate(timeout=400)
            logs = "".join(log.read_text()[-800:] for log in self.run.glob("logs/rank*.log"))
            assert agents[0].returncode == 0, f"{out}\n{err}\n{logs}"
            assert agents[1].wait(timeout=60) == 0
        finally:
            end(*agents)

    def steps(self) -> list[dict[str, Any]]:
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if "loss" in record]

    def calls(self, *names: str) -> list[list[Any]]:
        """Of each rank in order: its calls of these names."""
        return [
            [call for call in calls(self._record, rank) if call[0] in names]
            for rank in range(WORLD)
        ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nvidia")


@pytest.fixture(scope="module")
def job(folder: Path) -> EndedJob:
    return EndedJob(folder, "ddp")


def test_all_ranks_train_as_one_process_does_on_the_host(job: EndedJob, folder: Path) -> None:
    path = run_file(folder, **fields(name="host", backend="cpu", strategy={"name": "single"},
                                     precision={"param_dtype": "bfloat16"}))  # fmt: skip
    host = train(path)
    assert host.status == 0, host.err
    losses = [record["loss"] for record in job.steps()]
    assert losses == pytest.approx(host.steps("loss"), rel=2e-3)
    assert all(record["mfu"] > 0 and record["peak_memory"] > 0 for record in job.steps())


def test_a_rank_takes_the_card_of_its_number_on_its_machine(job: EndedJob) -> None:
    found = job.calls("init", "set_device")
    for rank, (first, *others) in enumerate(found):
        assert first[0] == "init"
        # Whoever records an event there goes to its card, and back.
        assert {tuple(call) for call in others} == {("set_device", rank % DEVICES)}


def test_variables_are_set_before_cuda_is_opened(job: EndedJob) -> None:
    for (init,) in job.calls("init"):
        variables = init[1]
        assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert variables["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
        assert variables["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
        assert variables["GLOO_SOCKET_IFNAME"] == "lo"
        # A rank sees all cards and takes its own by number; what NCCL finds by itself is not set.
        assert "CUDA_VISIBLE_DEVICES" not in variables
        assert not {name for name in variables if name.startswith("NCCL_IB")}


def test_nccl_joins_all_ranks_on_the_card_that_is_open(job: EndedJob) -> None:
    for rank, each in enumerate(job.calls("set_device", "nccl", "connect")):
        device = rank % DEVICES
        opened, made, connected = each[:3]
        assert opened == ["set_device", device]
        assert made[:3] == ["nccl", rank, WORLD] and made[-1] == "new"
        assert made[3] == LaunchSettings().collective_timeout_s
        # Named when the group is made: NCCL connects at once, and to this card.
        assert connected == ["connect", f"cuda:{device}"]


def test_a_wait_for_a_step_blocks(job: EndedJob) -> None:
    """One that spins takes a core, and the agent takes it for work."""
    for each in job.calls("event"):
        timed = [blocking for _, timing, blocking in each if timing]
        assert timed and all(timed)


def test_messages_of_the_host_do_not_go_through_nccl(job: EndedJob) -> None:
    for each in job.calls("nccl"):
        assert len(each) == 1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero", "fsdp"])
def test_sharded_strategies_open_and_join_alike(folder: Path, job: EndedJob, strategy: str) -> None:
    other = EndedJob(folder, strategy)
    assert [s["loss"] for s in other.steps()] == pytest.approx(
        [s["loss"] for s in job.steps()], rel=2e-3
    )
    names = ("set_device", "nccl", "connect")
    for mine, its in zip(other.calls(*names), job.calls(*names), strict=True):
        assert mine[:3] == its[:3]


def test_the_probe_finds_the_cards_and_auto_takes_them(folder: Path) -> None:
    site = standin_site(folder)
    done = anygauge(["backends"], environment=standin_environment(site, folder / "asked"))
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "2 NVIDIA GPUs (nvidia0, nvidia1)" in text and "NVIDIA driver 580.65.06" in text
    assert "torch is built for CUDA 13.0" in text
    # Finding them opens none.
    assert not list(folder.glob("asked.*"))


def printed_on_standin(folder: Path, code: str, name: str) -> list[str]:
    """What Python code prints on the stand-in; its argument is the machine's root."""
    site = standin_site(folder)
    environment = standin_environment(site, folder / name)
    return printed(code, site / "machine", environment=environment)


def test_all_checks_of_the_doctor_pass(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from anygauge_cuda.diagnostics import checks; "
        "machine = Path(sys.argv[1]); found = checks(machine, machine / 'torch'); "
        "print(*(f'{c.name}: {c.outcome} {c.seen}' for c in found), sep='\\n')"
    )
    lines = printed_on_standin(folder, code, "doctor")
    assert len(lines) == 6 and all(": pass " in line for line in lines), lines
    assert lines[-1] == f"usable GPUs: pass 2 usable ({NAME})"


OLD = """
import cuda_standin
cuda_standin.CAPABILITY = (7, 0)
from pathlib import Path
import sys
from anygauge.interface import NotAvailableError
from anygauge_cuda.backend import CudaBackend
from anygauge_cuda.diagnostics import checks
machine = Path(sys.argv[1])
print(checks(machine, machine / "torch")[-1])
try:
    CudaBackend().open(0)
except NotAvailableError as error:
    print(error)
"""


def test_a_card_without_kernels_is_refused_before_it_is_used(folder: Path) -> None:
    doctor, refused = printed_on_standin(folder, OLD, "old")
    assert "outcome='fail'" in doctor
    for line in (doctor, refused):
        assert "compute capability 7.0" in line and "kernels for sm_80 sm_90 alone" in line
        assert "https://download.pytorch.org/whl/cu126" in line
