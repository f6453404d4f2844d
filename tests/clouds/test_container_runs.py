"""What Kubernetes, Azure ML and SageMaker start in their containers, run on two emulated machines.

The command line hands the job to a stand-in for the cluster's client; this file then does what the
cluster would: mounts, variables, host names, and the command of each container as it was rendered.
The folders of the containers are made at the root of this machine, and removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.clouds.helpers import Client
from tests.helpers.child_processes import until
from tests.helpers.runs import TINY, Run, anygauge, run_file, trained
from tests.launchers.emulated import Machines, SshServers, why_not
from tests.launchers.targets import gsm8k, losses

pytestmark = pytest.mark.launchers

PATIENCE_S = 180.0
ROOT = Path("/anygauge")
LEFT_BY_AGENTS = Path("/dev/termination-log")
NODES = ("node1", "node2")
PASSED = 'it\'s "$HOME" $(date)\n雪'


@dataclass(kw_only=True)
class ContainerCluster:
    """Two machines, and what a cluster does on them."""

    machines: Machines
    ssh: SshServers
    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def named(self, **aliases: str) -> None:
        """More names for machines, as a cluster's DNS has them."""
        lines = [f"{self.machines.addresses[node]} {name}\n" for name, node in aliases.items()]
        for name in self.machines.names:
            with (self.folder / "machines" / name / "hosts").open("a") as file:
                file.writelines(lines)

    def start(
        self, name: str, argv: Sequence[object], environ: Mapping[str, str], cwd: Path | None = None
    ) -> subprocess.Popen[str]:
        """A container's first process; nothing of this process's variables gets there."""
        needed = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            self.machines.command(name, argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**needed, **environ},
            cwd=cwd,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def tidy(self) -> None:
        """End what is left, and remove the folders of containers."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.communicate()
        self.started.clear()
        for name in self.machines.names:
            for pid in self.machines.of_job(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
        shutil.rmtree(ROOT, ignore_errors=True)
        LEFT_BY_AGENTS.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerCluster]:
    why = why_not("ssh", "sshd", "ssh-keygen", "mpirun")
    if why is None and (ROOT.exists() or Path("/opt/ml").exists()):
        why = f"{ROOT} or /opt/ml is there already"
    if why is not None:
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("clouds")
    with Machines(folder) as made:
        yield ContainerCluster(machines=made, ssh=SshServers(made, folder / "ssh"), folder=folder)


@pytest.fixture
def cluster(machines: ContainerCluster) -> Iterator[ContainerCluster]:
    yield machines
    machines.tidy()


def run_of(folder: Path, at: Path, launch: Mapping[str, Any] | None, **changes: Any) -> Path:
    """A run file whose data and model lie in `folder`, where machines have it as `at`."""
    section = {} if launch is None else {"launch": {"nodes": 2, "devices": 1, **launch}}
    return run_file(
        folder, strategy={"name": "zero"}, data={**gsm8k(folder, at), "cache": "off"},
        model={"config": TINY, "tokenizer": str(at / "tokenizer")}, **section, **changes,
    )  # fmt: skip


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks of this machine."""
    folder = tmp_path_factory.mktemp("here")
    return trained(run_of(folder, folder, None), "--devices", "2")


def submitted(path: Path, client: Client) -> Path:
    """Hand a job to the stand-in; returns the run's folder on this machine."""
    variables = {"PATH": client.path, "PASSED": PASSED}
    done = anygauge(["launch", path, "--detach"], environment=variables)
    assert done.returncode == 0, done.stderr
    return path.parent / "out" / str(yaml.safe_load(path.read_text())["name"])


def ends_of(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    found = []
    for process in processes:
        out, err = process.communicate(timeout=PATIENCE_S)
        found.append((process.returncode, out, err))
    return found


def assert_trained(ends: list[tuple[int, str, str]], folder: Path, here: Run) -> None:
    """All ended well, with the losses of one machine."""
    assert [status for status, _, _ in ends] == [0] * len(ends), ends
    assert losses(folder) == pytest.approx(here.steps("loss"), rel=1e-6)
    ended = [json.loads(line) for line in ends[0][1].splitlines() if '"ended"' in line]
    assert {event["state"] for event in ended} == {"ok"}, ends[0][1]


def watched(folder: Path) -> dict[str, str]:
    """Variables by which ranks leave what they see of others in a folder."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import json, os, sys\n"
        "if 'anygauge.launch.rank' in ' '.join(sys.orig_argv):\n"
        f"    with open({str(folder / 'seen')!r} + os.environ['RANK'], 'w') as file:\n"
        "        json.dump({n: os.environ.get(n) for n in ('PASSED', 'MY_TOKEN')}, file)\n"
    )
    return {"PYTHONPATH": str(folder)}


def seen_by_ranks(folder: Path) -> list[dict[str, str | None]]:
    return [json.loads((folder / f"seen{rank}").read_text()) for rank in range(2)]


class TestKubernetes:
    """Pods, as the controllers of each kind make them."""

    made: str
    """Name of the object."""

    def pods(
        self, cluster: ContainerCluster, kind: str, name: str, **changes: Any
    ) -> list[dict[str, Any]]:
        """Submit, and mount what pods mount; returns the container of each pod."""
        stuff = cluster.folder / "input"
        stuff.mkdir(exist_ok=True)
        options = {
            "kind": kind, "image": "x/y:1", "python": sys.executable,
            "storage": {"claim": "runs"},
            "volumes": [{"claim": "data", "path": "/anygauge/input"}],
            "secrets": {"MY_TOKEN": {"secret": "mine", "key": "token"}},
        }  # fmt: skip
        launch = {"launcher": "kubernetes", "options": options, "pass_environment": ["PASSED"]}
        path = run_of(stuff, ROOT / "input", launch, name=name, **changes)
        made = {
            "apiVersion": "x/v1",
            "kind": kind,
            "metadata": {"name": name, "namespace": "default", "uid": "u"},
        }
        client = Client("kubectl", Path(self._scratch(cluster)), sys.executable)
        client.answer("create", "-")
        client.answer("create", "json", out=made)
        client.answer("patch", "secret")
        folder = submitted(path, client)
        given = json.loads(client.asked[0][1])["stringData"]
        for place, files in (("job", given), ("secrets", {"MY_TOKEN": "s3cret"})):
            (ROOT / place).mkdir(parents=True)
            for file, text in files.items():
                (ROOT / place / file).write_text(text)
        (cluster.folder / "runs").mkdir(exist_ok=True)
        (ROOT / "runs").symlink_to(cluster.folder / "runs")
        (ROOT / "input").symlink_to(stuff)
        manifest = yaml.safe_load((folder / "manifest.yaml").read_text())
        self.made = made = manifest["metadata"]["name"]
        cluster.named(**{f"{made}-node-0-0.{made}": "node1"})
        return self._containers(manifest)

    def _scratch(self, cluster: ContainerCluster) -> Path:
        path = cluster.folder / f"client{time.monotonic_ns()}"
        path.mkdir()
        return path

    def _containers(self, manifest: dict[str, Any]) -> list[dict[str, Any]]:
        spec = manifest["spec"]
        if manifest["kind"] == "TrainJob":
            return [spec["trainer"]] * spec["trainer"]["numNodes"]
        work = spec["replicatedJobs"][0]["template"]["spec"]
        container = work["template"]["spec"]["containers"][0]
        return [container] * int(work["completions"])

    def variables(self, kind: str, rank: int) -> dict[str, str]:
        """What the controller sets, by its sources."""
        name = self.made
        if kind == "JobSet":
            return {"JOB_COMPLETION_INDEX": str(rank)}
        return {
            "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank),
            "PET_MASTER_ADDR": f"{name}-node-0-0.{name}", "PET_MASTER_PORT": "29500",
        }  # fmt: skip

    def start(
        self, cluster: ContainerCluster, pods: list[dict[str, Any]], kind: str = "JobSet"
    ) -> list[subprocess.Popen[str]]:
        return [
            cluster.start(node, pod["command"], self.variables(kind, rank))
            for rank, (node, pod) in enumerate(zip(NODES, pods, strict=True))
        ]

    @pytest.mark.parametrize("kind", ["JobSet", "TrainJob"])
    def test_the_losses_are_those_of_one_machine(
        self, cluster: ContainerCluster, kind: str, here: Run
    ) -> None:
        pods = self.pods(cluster, kind, kind.lower())
        before = {name: cluster.machines.bytes_sent(name) for name in NODES}
        ends = ends_of(self.start(cluster, pods, kind))
        folder = cluster.folder / "runs" / kind.lower()
        assert_trained(ends, folder, here)
        for name, count in before.items():
            assert cluster.machines.bytes_sent(name) > count + 100_000
        assert (folder / "run.yaml").is_file()  # the job brought it

    def test_variables_and_secrets_arrive_as_they_are(self, cluster: ContainerCluster) -> None:
        pods = self.pods(cluster, "JobSet", "probe", environment=watched(cluster.folder / "probe"))
        ends = ends_of(self.start(cluster, pods))
        assert [status for status, _, _ in ends] == [0, 0], ends
        for seen in seen_by_ranks(cluster.folder / "probe"):
            assert seen == {"PASSED": PASSED, "MY_TOKEN": "s3cret"}

    def test_pods_that_are_started_again_go_on_from_the_checkpoint(
        self, cluster: ContainerCluster
    ) -> None:
        pods = self.pods(cluster, "JobSet", "again", train={"steps": 60}, checkpoint={"every": 5})
        folder = cluster.folder / "runs" / "again"
        first = self.start(cluster, pods)
        until(lambda: (folder / "checkpoints").exists() and len(losses(folder)) >= 12, "steps")
        for pid in cluster.machines.of_job("node2"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        ends = ends_of(first)
        assert all(status != 0 for status, _, _ in ends), ends
        assert "node 1 (node2) is lost" in LEFT_BY_AGENTS.read_text()
        ends = ends_of(self.start(cluster, pods))
        assert [status for status, _, _ in ends] == [0, 0], ends
        assert "resumed: " in ends[0][1]
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [r["step"] for r in records if "loss" in r] == list(range(1, 61))

    def test_a_request_to_end_leaves_a_checkpoint(self, cluster: ContainerCluster) -> None:
        pods = self.pods(cluster, "JobSet", "asked", train={"steps": 100_000})
        folder = cluster.folder / "runs" / "asked"
        started = self.start(cluster, pods)
        until(lambda: (folder / "metrics.jsonl").exists() and len(losses(folder)) >= 2, "steps")
        for node in NODES:  # the kubelet asks the first process of every pod
            for pid, text in cluster.machines.of_job(node).items():
                if "anygauge.launch" in text:
                    os.kill(pid, signal.SIGTERM)
        ends = ends_of(started)
        assert [status for status, _, _ in ends] == [75, 75], ends
        assert list((folder / "checkpoints").glob("step-*")), ends

    def test_a_pod_that_waits_for_others_ends_when_it_is_asked(
        self, cluster: ContainerCluster
    ) -> None:
        pods = self.pods(cluster, "JobSet", "waits")
        # The first process of a container: signals that it does not handle do not reach it.
        inside = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        coordinator = cluster.start(
            "node1", [*inside, *pods[0]["command"]], self.variables("JobSet", 0)
        )
        log = cluster.folder / "runs" / "waits" / "logs" / "agent0.log"
        until(log.exists, "the coordinator")

        def agents() -> list[int]:
            found = cluster.machines.of_job("node1").items()
            return [pid for pid, text in found if text.startswith(sys.executable)]

        until(agents, "its process")
        time.sleep(1)
        for pid in agents():
            os.kill(pid, signal.SIGTERM)
        began = time.monotonic()
        ((_, out, _),) = ends_of([coordinator])
        assert time.monotonic() - began < 20
        ended = [json.loads(line) for line in out.splitlines() if '"ended"' in line]
        assert ended[-1]["state"] == "cancelled" and ended[-1]["exit_status"] == 143
        assert "asked to end before all nodes had met" in ended[-1]["cause"]


class TestAzure:
    """The command of a job, as Azure's agents start it on each machine."""

    def test_the_losses_are_those_of_one_machine(
        self, cluster: ContainerCluster, here: Run
    ) -> None:
        stuff = cluster.folder / "azure"
        stuff.mkdir()
        options = {
            "workspace": "research", "resource_group": "ml", "compute": "cpus", "image": "x/y:1",
            "python": sys.executable, "output": "azureml://datastores/blobs/paths/runs",
            "inputs": {"all": {"path": "azureml:all:1", "at": "/anygauge/input"}},
        }  # fmt: skip
        launch = {"launcher": "azureml", "options": options, "pass_environment": ["PASSED"]}
        environment = watched(cluster.folder / "azure-probe")
        path = run_of(stuff, ROOT / "input", launch, environment=environment)
        client = Client("az", stuff, sys.executable)
        client.answer("create", out="calm_river\n")
        folder = submitted(path, client)
        described = yaml.safe_load((folder / "job.yaml").read_text())
        (mounted := cluster.folder / "mounted").mkdir()
        command = described["command"].replace("${{outputs.run}}", str(mounted))
        command = command.replace("${{inputs.all}}", str(stuff))
        assert "{{" not in command
        variables = {
            "MASTER_ADDR": cluster.machines.addresses["node1"], "MASTER_PORT": "6105",
            "WORLD_SIZE": "2", "LOCAL_RANK": "0",
        }  # fmt: skip
        started = []
        for rank, name in enumerate(NODES):
            code = cluster.folder / f"code{rank}"
            shutil.copytree(folder / "code", code)
            own = {**variables, "NODE_RANK": str(rank), "RANK": str(rank)}
            started.append(cluster.start(name, ["bash", "-c", command], own, cwd=code))
        assert_trained(ends_of(started), mounted, here)
        for seen in seen_by_ranks(cluster.folder / "azure-probe"):
            assert seen["PASSED"] == PASSED


class TestSagemaker:
    """The container's side of a training job, each machine with an /opt/ml of its own."""

    OPT = Path("/opt/ml")

    @pytest.fixture(autouse=True)
    def _opt(self, cluster: ContainerCluster) -> Iterator[None]:
        self.OPT.mkdir()
        yield
        self.OPT.rmdir()

    def machines(self, cluster: ContainerCluster, path: Path) -> list[subprocess.Popen[str]]:
        """Submit, and start the entry point on each machine."""
        client = Client("aws", path.parent, sys.executable)
        client.answer("create-training-job", out={"TrainingJobArn": "arn:x"})
        folder = submitted(path, client)
        request = json.loads((folder / "request.json").read_text())
        how = request["AlgorithmSpecification"]
        argv = [*how["ContainerEntrypoint"], *how["ContainerArguments"]]
        started = []
        for name, host in zip(NODES, ("algo-1", "algo-2"), strict=True):
            opt = cluster.folder / f"opt-{path.stem}-{host}"
            for part in ("input/config", "input/data", "output", "model", "checkpoints"):
                (opt / part).mkdir(parents=True)
            where = {
                "current_host": host, "hosts": ["algo-1", "algo-2"],
                "network_interface_name": "eth0",
            }  # fmt: skip
            (opt / "input/config/resourceconfig.json").write_text(json.dumps(where))
            (opt / "input/config/hyperparameters.json").write_text(
                json.dumps(request["HyperParameters"])
            )
            (opt / "input/data/all").symlink_to(path.parent)
            mounted = ["bash", "-c", 'mount --bind "$0" /opt/ml; exec "$@"', opt, *argv]
            variables = {**request["Environment"], "TRAINING_JOB_NAME": request["TrainingJobName"]}
            started.append(cluster.start(name, mounted, variables))
        return started

    def launch(self) -> dict[str, Any]:
        options = {
            "role": "arn:aws:iam::123456789012:role/R", "python": sys.executable,
            "image": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/a:1",
            "instance_type": "ml.m5.xlarge", "output": "s3://bucket/runs",
            "channels": {"all": "s3://bucket/all"},
        }  # fmt: skip
        return {"launcher": "sagemaker", "options": options, "pass_environment": ["PASSED"]}

    def test_the_losses_are_those_of_one_machine(
        self, cluster: ContainerCluster, here: Run
    ) -> None:
        (stuff := cluster.folder / "sagemaker").mkdir()
        environment = watched(cluster.folder / "sagemaker-probe")
        path = run_of(stuff, self.OPT / "input/data/all", self.launch(), environment=environment)
        cluster.named(**{"algo-1": "node1", "algo-2": "node2"})
        ends = ends_of(self.machines(cluster, path))
        assert_trained(ends, cluster.folder / "opt-tiny-algo-1" / "checkpoints", here)
        for seen in seen_by_ranks(cluster.folder / "sagemaker-probe"):
            assert seen["PASSED"] == PASSED

    def test_a_failure_stands_where_sagemaker_looks_for_it(self, cluster: ContainerCluster) -> None:
        (stuff := cluster.folder / "broken").mkdir()
        at = self.OPT / "input/data/all"
        path = run_of(stuff, at, self.launch(), name="broken", train={"optimizer": {"lr": 1e6}})
        (stuff / "rows.jsonl").write_text("{}\n")
        cluster.named(**{"algo-1": "node1", "algo-2": "node2"})
        ends = ends_of(self.machines(cluster, path))
        assert all(status == 2 for status, _, _ in ends), ends
        for host in ("algo-1", "algo-2"):
            said = (cluster.folder / f"opt-broken-{host}" / "output" / "failure").read_text()
            assert "rows.jsonl:1" in said and len(said) <= 4000
