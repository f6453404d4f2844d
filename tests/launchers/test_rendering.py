"""What ssh, mpi and slurm would do: pure, and nothing of the user's in a shell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anygauge.interface import Job, Launcher, Plan, RunFileError, UnsupportedError
from anygauge_launchers.hosts import Mpi, Ssh
from anygauge_launchers.slurm import SCRIPT, Slurm
from tests.helpers.jobs import make_job
from tests.helpers.plans_from_options import render
from tests.helpers.sample_machines import assert_pure

ODD = '/runs/it\'s a "b" $HOME\n雪'
HOSTS = {"hosts": ["node1", "me@node2"]}
LAUNCHERS: dict[str, tuple[Launcher, dict[str, Any]]] = {
    "ssh": (Ssh(), HOSTS),
    "mpi": (Mpi(), HOSTS),
    "slurm": (Slurm(), {"allocation": "new"}),
}


def job(**fields: Any) -> Job:
    return make_job(
        **{
            "run_directory": ODD, "nodes": 2, "devices": 8,
            "token": "the token", "environment": {"HF_TOKEN": "the secret"}, "port": 4711,
            "pass_environment": ("PATH",),
            **fields,
        }
    )  # fmt: skip


def rendered(name: str, **options: Any) -> Plan:
    return render(name, job(), {**LAUNCHERS[name][1], **options})


@pytest.mark.parametrize("name", sorted(LAUNCHERS))
def test_rendering_is_pure_and_keeps_secrets_in_one_file(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert_pure(lambda: rendered(name), monkeypatch)
    plan = rendered(name)
    held = {f.path: f for f in plan.files if "the token" in f.text or "the secret" in f.text}
    assert set(held) == {f"{ODD}/job.json"} and held[f"{ODD}/job.json"].mode == 0o600
    spoken = json.dumps([(p.argv, p.arguments) for p in plan.processes])
    assert "the token" not in spoken and "the secret" not in spoken
    assert plan.pass_environment == ("PATH",)


def test_the_agent_of_each_host_gets_its_number_through_standard_input() -> None:
    plan = rendered("ssh", python="/opt/py", config="/c d", grace_s=2.5)
    assert [process.host for process in plan.processes] == ["node1", "me@node2"]
    for rank, process in enumerate(plan.processes):
        assert process.argv[-2:] == (process.host, "exec /opt/py -m anygauge.launch.agent --stdin")
        assert process.argv[process.argv.index("-F") + 1] == "/c d"
        assert process.arguments == (
            *("--job", f"{ODD}/job.json", "--node-rank", str(rank), "--coordinator", "node1:4711"),
            *("--grace", "2.5"),
        )


def test_the_coordinator_may_have_another_address() -> None:
    for name in ("ssh", "mpi"):
        process = rendered(name, coordinator="10.0.0.1").processes[-1]
        assert "10.0.0.1:4711" in (*process.argv, *process.arguments)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "list the machines, either as hosts"),
        ({"hosts": ["a", "b"], "hostfile": "x"}, "either as hosts"),
        ({"hosts": ["a"]}, r"1 machines are listed \(a\), and launch.nodes is 2"),
        ({"hosts": ["a", "a"]}, "a is listed twice"),
        ({"hosts": ["a", "-oProxyCommand=x"]}, "'-oProxyCommand=x' is not a host name"),
        ({"hosts": ["a", "b c"]}, "'b c' is not a host name"),
        ({"hosts": "a,b"}, "launch.options.hosts: 'a,b': input should be a valid list"),
        ({"hostfile": "/nowhere/hosts"}, "/nowhere/hosts cannot be read"),
        ({"hosts": ["a", "b"], "prot": 1}, "launch.options.prot: the ssh launcher has no such"),
        ({"hosts": ["a", "b"], "python": "/a b/python"}, "a remote shell reads this path"),
        ({"hosts": ["a", "b"], "grace_s": -1}, "launch.options.grace_s: -1: input should be"),
    ],
)
def test_bad_options_of_ssh_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(RunFileError, match=said):
        render("ssh", job(), options)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a slots=8\nb slots=7\n", "line 2: b has 7 slots, and launch.devices is 8"),
        ("a\nb x=1\n", "line 2: 'b x=1' is not `host` or `host slots=N`"),
        ("a\n", "1 machines are listed"),
    ],
)
def test_bad_host_files_are_named(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text)
    for launcher in ("ssh", "mpi"):
        with pytest.raises(RunFileError, match=said):
            render(launcher, job(), {"hostfile": str(tmp_path / "hosts")})


def test_host_files_of_open_mpi_and_deepspeed_are_read(tmp_path: Path) -> None:
    text = "node7 slots=8 max_slots=16  # the big one\n\nnode9\n# ours\n"
    (tmp_path / "hosts").write_text(text, encoding="utf-8-sig")
    plan = render("ssh", job(), {"hostfile": str(tmp_path / "hosts")})
    assert [process.host for process in plan.processes] == ["node7", "node9"]


def test_mpirun_starts_one_agent_on_each_host_and_binds_none() -> None:
    (process,) = rendered("mpi", interface="eth0", config="/ssh/config").processes
    text = " ".join(process.argv)
    assert "mpirun --allow-run-as-root -np 2 --host node1:1,me@node2:1 " in text
    assert " --map-by ppr:1:node --bind-to none " in text
    assert "ServerAliveCountMax=13 -F /ssh/config" in text
    assert "--mca oob_tcp_if_include eth0" in text
    assert ("--node-rank", "$OMPI_COMM_WORLD_RANK") in zip(
        process.argv, process.argv[1:], strict=False
    )
    with pytest.raises(RunFileError, match="mpirun splits this path at its spaces"):
        rendered("mpi", config="/a b")


def test_the_batch_script_is_the_same_for_every_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    plans = [render("slurm", job(name=name), {}) for name in ("a", "b")]
    scripts = {file.text for plan in plans for file in plan.files if file.path.endswith(".sh")}
    assert scripts == {SCRIPT}
    (process,) = plans[0].processes
    assert process.argv[:2] == ("sbatch", "--parsable") and "--job-name=a" in process.argv
    assert "--exclusive" in process.argv and "--no-requeue" in process.argv
    assert "--export=NIL" in process.argv
    place = process.argv.index(f"{ODD}/slurm.sh")
    assert process.argv[place + 1 : place + 4] == (f"{ODD}/logs/slurm.log", "", "1")


def test_what_sbatch_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    asked = {
        "partition": "gpu", "time": "1-0", "gpus_per_node": 8, "cpus_per_task": 64, "mem": "0",
        "requeue": True, "warn_s": 300, "extra": ["--comment=a b"],
    }  # fmt: skip
    argv = render("slurm", job(), asked).processes[0].argv
    for word in (
        *("--partition=gpu", "--time=1-0", "--gpus-per-node=8", "--mem=0", "--requeue"),
        *("--signal=USR1@300", "--comment=a b", f"{ODD}/cancelled"),
    ):
        assert argv.count(word) == 1, word
    assert argv.count("--cpus-per-task=64") == 2  # of the job, and of its step
    assert "--exclusive" not in argv


def test_inside_an_allocation_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (process,) = render("slurm", job(), {}).processes
    assert process.argv[0] == "sh" and "--input=all" in process.argv
    assert "--node-rank" in process.arguments and "--job" not in process.argv
    assert render("slurm", job(), {"allocation": "new"}).processes[0].argv[0] == "sbatch"


def test_jobs_that_end_with_their_command_cannot_be_found_again() -> None:
    for launcher in (Ssh(), Mpi()):
        with pytest.raises(UnsupportedError, match="ends with the command that started it"):
            launcher.attach({}, Path("/runs/x"))
    with pytest.raises(UnsupportedError, match="is not a record of a job"):
        Slurm().attach({"number": 1}, Path("/runs/x"))
