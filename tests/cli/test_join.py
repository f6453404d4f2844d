"""`anygauge train` as a rank of torchrun, and of variables that somebody set."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from anygauge.interface import STOPPED, AnygaugeError, Job
from anygauge.launch import foreign_meeting
from anygauge.launch.foreign import ForeignLaunch
from tests.helpers.child_processes import alive, begin, end, free_port, until
from tests.helpers.forked import RunPart, finished
from tests.helpers.runs import Run, called, run_file, train

PATIENCE_S = 120.0
TORCHRUN = Path(sys.executable).with_name("torchrun")


def by_hand(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world), "MASTER_PORT": str(port),
    }  # fmt: skip


@contextlib.contextmanager
def torchrun(*arguments: object, restarts: int = 0) -> Iterator[subprocess.Popen[str]]:
    """A real torchrun of two ranks; it leads a process group, as in a terminal, and leaves nothing
    behind."""
    program = [TORCHRUN, "--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}"]
    program += ["-m", "anygauge", "train"]
    process = begin(*arguments, program=program, start_new_session=True)
    try:
        yield process
    finally:
        end(process)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def two_by_hand(*program: object) -> list[tuple[int, str, str]]:
    """Two processes of Python that nothing but their variables ties together."""
    port = free_port()
    processes = [
        begin(program=[sys.executable, *program], environment=by_hand(rank, 2, port))
        for rank in range(2)
    ]
    try:
        return [ended(process) for process in processes]
    finally:
        end(*processes)


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """Rank -> process id, of the ranks that torchrun's children have become."""
    found = {}
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in map(int, children):
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"anygauge.launch.rank" in command:
                named = dict(each.split("=", 1) for each in variables if "=" in each)
                found[int(named["RANK"])] = pid
    return found


def steps_taken(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return (folder / "metrics.jsonl").read_text().count('"loss"')
    return 0


def wait_for_steps(process: subprocess.Popen[str], folder: Path, more_than: int = 3) -> None:
    def come() -> bool:
        assert process.poll() is None, ended(process)
        return steps_taken(folder) > more_than

    until(come, "steps", PATIENCE_S)


def test_the_losses_under_torchrun_are_those_of_devices_2(tmp_path: Path) -> None:
    path = run_file(tmp_path, strategy={"name": "ddp"}, checkpoint={"every": 2})
    (own,) = finished([RunPart(file=str(path), overrides=("name=own", "launch.devices=2"))])
    with torchrun(path) as process:
        status, out, err = ended(process)
    assert status == 0, err
    run = Run(folder=tmp_path / "out" / "tiny", status=status, out=out, err=err)
    assert run.steps("loss") == own.steps("loss")
    assert run.steps("grad_norm") == own.steps("grad_norm")
    assert out.count("final loss") == 1 and out.count("step 4/4") == 1
    assert "note: started by torchrun" in err
    assert (run.folder / "checkpoints" / "step-00000004").is_dir()
    assert (run.folder / "adapter").is_dir() and (run.folder / "report.json").is_file()
    assert (run.folder / "environment-node0.json").is_file()
    assert {p.name for p in (run.folder / "logs").iterdir()} == {"rank0.log", "rank1.log"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--devices", "4"], "launch.devices: 4, but another launcher started 2 ranks, 2 on each"),
        (["--nodes", "2"], "launch.nodes: 2, but"),
        (["--launcher", "local"], "launch.launcher: local would start ranks"),
        (["--set", "launch.launcher=ssh"], "launch.launcher: ssh would start ranks"),
        (["--set", "launch.max_restarts=2"], "so only another launcher can restart them"),
        ([], "--resume auto: add it"),
    ],
)
def test_what_only_our_launchers_do_and_restarts_without_resuming_are_refused(
    tmp_path: Path, options: list[str], says: str
) -> None:
    restarts = {**by_hand(1, 2, 29500), "TORCHELASTIC_MAX_RESTARTS": "1"}
    done = called(["train", run_file(tmp_path), *options], environment=restarts)
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


def test_a_rank_launches_nothing_and_its_dry_run_is_any_dry_run(tmp_path: Path) -> None:
    path, rank = run_file(tmp_path), by_hand(1, 2, 29500)
    done = called(["launch", path], environment=rank)
    assert done.returncode == 2 and "nothing left to launch" in done.stderr
    done = called(["train", path, "--dry-run", "--devices", "4"], environment=rank)
    assert done.returncode == 0 and "4 ranks" in done.stdout, done.stdout


def launch_of(rank: int) -> ForeignLaunch:
    return ForeignLaunch(
        launcher="torchrun", rank=rank, world_size=3, local_rank=rank, devices=3,
        host="127.0.0.1", port=1,
    )  # fmt: skip


def agreed(store: Path, rank: int, run: str = "", patience_s: float = 30) -> object:
    import torch.distributed as dist

    known = {"id": run} if rank == 0 else {}
    return foreign_meeting.agree(dist.FileStore(str(store), -1), launch_of(rank), known, patience_s)


def test_what_an_earlier_attempt_left_in_the_launchers_store_answers_nobody(tmp_path: Path) -> None:
    for run in ("first", "second"):
        with ThreadPoolExecutor(3) as pool:
            heard = [pool.submit(agreed, tmp_path / "store", rank, run) for rank in range(3)]
        assert [each.result() for each in heard] == [{"id": run}] * 3


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    with pytest.raises(AnygaugeError, match=r"of 3 ranks, 1, 2 did not connect .* within 0\.2 s"):
        agreed(tmp_path / "store", 0, "x", 0.2)


@pytest.mark.parametrize(
    ("named", "run", "says"),
    [
        ("tiny/job.json", "new", ""),
        ("tiny-2/job.json", "new", ""),
        ("tiny/attempts/new/job.json", "new", ""),
        ("tiny/job.json", "old", "is not seen on"),
        ("other/job.json", "new", "this rank's arguments name"),
        ("tiny/../other/job.json", "new", "this rank's arguments name"),
    ],
)
def test_what_the_store_names_is_a_run_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, run: str, says: str
) -> None:
    monkeypatch.setattr(foreign_meeting, "_SEEN_S", 0.0)
    (tmp_path / "tiny").mkdir()
    path = tmp_path / named
    path.parent.mkdir(parents=True, exist_ok=True)
    job = Job(name="x", run_directory="/x", run_file="/x", backend="cpu", rendezvous="", id=run)
    path.write_text(job.dump())
    known = {"folder": str(tmp_path / "tiny")}
    answer = {"id": "new", "job": str(path), "folder": str(path.parent)}
    with pytest.raises(AnygaugeError, match=says) if says else contextlib.nullcontext():
        assert foreign_meeting.job_of(launch_of(1), known, answer) == job


@pytest.mark.parametrize("host", ["127.0.0.1", "nowhere.invalid"])
def test_a_rank_without_rank_0_says_where_it_has_waited(tmp_path: Path, host: str) -> None:
    path = run_file(tmp_path)
    alone = {**by_hand(1, 2, free_port()), "MASTER_ADDR": host}
    done = train(path, "--set", "launch.join_timeout_s=1", environment=alone)
    assert done.status == 1
    assert f"no store answers at {host}" in done.err and "(rank 1)" in done.err
    assert "frame #" not in done.err


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    path = run_file(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = train(path, environment=by_hand(0, 1, port))
    assert done.status == 1
    assert f"rank 0 cannot listen at 127.0.0.1, port {port}" in done.err
    assert "set MASTER_PORT" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["a rank", "torchrun"])
def test_ranks_end_with_another_and_with_torchrun(victim: str, tmp_path: Path) -> None:
    path = run_file(tmp_path, strategy={"name": "ddp"}, train={"steps": 5000})
    with torchrun(path) as process:
        wait_for_steps(process, tmp_path / "out" / "tiny")
        ranks = ranks_of(process)
        assert sorted(ranks) == [0, 1]
        os.kill(ranks[1] if victim == "a rank" else process.pid, signal.SIGKILL)
        status, _, err = ended(process)
        until(lambda: not any(map(alive, ranks.values())), "the end of the ranks")
    assert status != 0
    if victim == "a rank":
        root_cause = err.partition("Root Cause")[2]
        assert "rank      : 1 " in root_cause and "SIGKILL" in root_cause


@pytest.mark.slow
def test_ctrl_c_saves_and_torchruns_restart_goes_on(tmp_path: Path) -> None:
    path = run_file(
        tmp_path, strategy={"name": "ddp"}, train={"steps": 60}, checkpoint={"every": 10}
    )
    folder = tmp_path / "out" / "tiny"
    with torchrun(path) as process:
        wait_for_steps(process, folder)
        os.killpg(process.pid, signal.SIGINT)
        status, _, err = ended(process)
    assert status != 0
    assert "stopped at request after step" in err and "--resume auto" in err
    with torchrun(path, "--resume", "auto", restarts=1) as process:
        before = steps_taken(folder)
        wait_for_steps(process, folder, before + 14)
        os.kill(ranks_of(process)[0], signal.SIGKILL)
        status, out, err = ended(process)
    assert status == 0, err
    assert out.count("resumed: ") == 2 and out.count("final loss") == 1
    (own,) = finished([RunPart(file=str(path), overrides=("name=own", "launch.devices=2"))])
    run = Run(folder=folder, status=status, out=out, err=err)
    assert run.steps("step") == list(range(1, 61))
    assert run.steps("loss") == own.steps("loss")
    with torchrun(path, "--resume", "auto") as process:
        status, out, err = ended(process)
    assert status == 0 and out.count("this run has already finished") == 1, err


@pytest.mark.slow
@pytest.mark.parametrize("why", ["a run is writing to", "no layer is called 'q_porj'"])
def test_a_refusal_of_rank_0_is_shown_once_and_by_torchrun(tmp_path: Path, why: str) -> None:
    path = run_file(tmp_path, adapter={"targets": ["q_porj"]})
    folder = tmp_path / "out" / "tiny"
    folder.mkdir(parents=True)
    with (folder / ".lock").open("w") as lock:
        if why == "a run is writing to":
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "run.yaml").write_text("")
        with torchrun(path, "--resume", "auto") as process:
            status, _, err = ended(process)
    own, _, root_cause = err.partition("Root Cause")
    assert status != 0 and own.partition("ChildFailedError")[0].count(why) == 1, err
    assert why in root_cause


@pytest.mark.slow
def test_two_processes_with_variables_set_by_hand(tmp_path: Path) -> None:
    path = run_file(tmp_path, strategy={"name": "ddp"})
    results = two_by_hand("-m", "anygauge", "train", path)
    assert [status for status, _, _ in results] == [0, 0], results
    assert "final loss" in results[0][1] and "final loss" not in results[1][1]


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGUSR1])
def test_what_terminals_and_schedulers_send_asks_for_a_checkpoint(
    tmp_path: Path, signum: int
) -> None:
    path = run_file(tmp_path, strategy={"name": "single"}, train={"steps": 5000})
    folder = tmp_path / "out" / "tiny"
    variables = {**by_hand(0, 1, free_port()), "OMP_NUM_THREADS": "3"}
    process = begin("train", path, environment=variables)
    try:
        wait_for_steps(process, folder)
        process.send_signal(signum)
        status, _, err = ended(process)
    finally:
        end(process)
    assert status == STOPPED and "stopped at request after step" in err, err
    assert list((folder / "checkpoints").iterdir())
    assert "OMP_NUM_THREADS=3, set by you or by" in err


WORKER = """
import os, subprocess, sys
import torch.distributed as dist
from anygauge.cli import run
from anygauge.interface import AnygaugeError

dist.init_process_group("gloo")
# As Ray Train's workers do it: the store at MASTER_PORT is theirs.
served = {**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True"}
command = [sys.executable, "-m", "anygauge", "train", sys.argv[1]]
subprocess.run(command, env=served, check=True)
try:
    run(["train", sys.argv[1]])
except AnygaugeError as error:
    print("refused:", error)
"""


@pytest.mark.slow
def test_workers_that_have_a_process_group_of_their_own(tmp_path: Path) -> None:
    path = run_file(tmp_path, strategy={"name": "ddp"})
    (tmp_path / "worker.py").write_text(WORKER)
    results = two_by_hand(tmp_path / "worker.py", path)
    assert [status for status, _, _ in results] == [0, 0], results
    assert all("run it in a process of its own" in out for _, out, _ in results)
    assert results[0][1].count("final loss") == 1
