"""`anygauge train` as a rank of torchrun, and of variables that somebody set."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from anygauge.interface import STOPPED, AnygaugeError
from anygauge.launch.foreign import ForeignLaunch
from anygauge.launch.foreign_rank import _agreed
from tests.helpers.forked import RunPart, finished
from tests.helpers.processes import alive, as_in_a_terminal, begin, end, free_port, until
from tests.helpers.runs import Run, called, run_file, train

PATIENCE_S = 120.0
TORCHRUN = Path(sys.executable).with_name("torchrun")


def by_hand(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world), "MASTER_PORT": str(port),
    }  # fmt: skip


@contextlib.contextmanager
def torchrun(
    *arguments: object, ranks: int = 2, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A real torchrun; it leads a process group, as in a terminal, and leaves nothing behind."""
    options = ["--standalone", f"--nproc-per-node={ranks}"]
    while arguments and str(arguments[0]).startswith("--max"):
        options.append(str(arguments[0]))
        arguments = arguments[1:]
    process = subprocess.Popen(
        [TORCHRUN, *options, "-m", "anygauge", "train", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=as_in_a_terminal,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
    )
    try:
        yield process
    finally:
        end(process)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def by_hand_together(
    arguments: Sequence[object], world: int, port: int
) -> list[tuple[int, str, str]]:
    """Processes of Python that nothing but their variables ties together."""
    processes = [
        subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **by_hand(rank, world, port)},
        )
        for rank in range(world)
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
    ],
)
def test_what_only_our_launchers_do_is_refused_by_each_rank(
    tmp_path: Path, options: list[str], says: str
) -> None:
    path = run_file(tmp_path)
    done = called(["train", path, *options], environment=by_hand(1, 2, 29500))
    assert done.returncode == 2
    assert re.search(says, done.stderr), done.stderr
    assert not (tmp_path / "out").exists()


def test_a_launcher_that_restarts_needs_a_run_that_resumes(tmp_path: Path) -> None:
    restarts = {**by_hand(0, 2, 29500), "TORCHELASTIC_MAX_RESTARTS": "1"}
    done = called(["train", run_file(tmp_path)], environment=restarts)
    assert done.returncode == 2 and "--resume auto: add it" in done.stderr


def test_a_rank_launches_nothing_and_its_dry_run_is_any_dry_run(tmp_path: Path) -> None:
    path, rank = run_file(tmp_path), by_hand(1, 2, 29500)
    done = called(["launch", path], environment=rank)
    assert done.returncode == 2 and "nothing left to launch" in done.stderr
    done = called(["train", path, "--dry-run", "--devices", "4"], environment=rank)
    assert done.returncode == 0 and "4 ranks" in done.stdout, done.stdout


def launch_of(rank: int, world: int) -> ForeignLaunch:
    return ForeignLaunch(
        launcher="torchrun", rank=rank, world_size=world, local_rank=rank, devices=world,
        host="127.0.0.1", port=1,
    )  # fmt: skip


def test_what_an_earlier_attempt_left_in_the_launchers_store_answers_nobody(
    tmp_path: Path,
) -> None:
    import torch.distributed as dist

    def agree(run: str) -> list[object]:
        heard: list[object] = [None] * 3

        def ask(rank: int) -> None:
            own = dist.FileStore(str(tmp_path / "store"), -1)
            heard[rank] = _agreed(own, launch_of(rank, 3), {"id": run} if rank == 0 else None, 30)

        threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return heard

    assert agree("first") == [{"id": "first"}] * 3
    assert agree("second") == [{"id": "second"}] * 3


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


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), -1)
    with pytest.raises(
        AnygaugeError, match=r"of 3 ranks, 1, 2 did not connect to .* within 0\.2 s"
    ):
        _agreed(store, launch_of(0, 3), {"id": "x"}, 0.2)


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
    with torchrun("--max-restarts=1", path, "--resume", "auto") as process:
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
def test_a_refusal_of_rank_0_ends_all_and_torchrun_shows_the_message_of_a_rank(
    tmp_path: Path,
) -> None:
    path = run_file(tmp_path, strategy={"name": "ddp"})
    folder = tmp_path / "out" / "tiny"
    folder.mkdir(parents=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "run.yaml").write_text("")
        with torchrun(path, "--resume", "auto") as process:
            status, _, err = ended(process)
    own, _, root_cause = err.partition("Root Cause")
    assert status != 0 and own.partition("ChildFailedError")[0].count("a run is writing to") == 1
    assert "a run is writing to" in root_cause


@pytest.mark.slow
def test_two_processes_with_variables_set_by_hand_and_one_alone(tmp_path: Path) -> None:
    path = run_file(tmp_path, strategy={"name": "ddp"})
    results = by_hand_together(["-m", "anygauge", "train", path], 2, free_port())
    assert [status for status, _, _ in results] == [0, 0], results
    assert "final loss" in results[0][1] and "final loss" not in results[1][1]
    alone = {**by_hand(0, 1, free_port()), "PYTHONUNBUFFERED": "1"}
    one = train(path, environment=alone)
    assert one.status == 0 and "on 1 rank" in one.out, one.err
    losses = Run(folder=tmp_path / "out" / "tiny-2", status=0, out="", err="").steps("loss")
    assert losses == pytest.approx(one.steps("loss"), rel=1e-5)


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
    results = by_hand_together([tmp_path / "worker.py", path], 2, free_port())
    assert [status for status, _, _ in results] == [0, 0], results
    assert all("run it in a process of its own" in out for _, out, _ in results)
    assert results[0][1].count("final loss") == 1
