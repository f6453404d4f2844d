"""Which rank of somebody else's launch a process is, from the variables of launchers."""

from __future__ import annotations

import pytest

from anygauge.interface import UsageError
from anygauge.launch.foreign import ForeignLaunch, find_launch

# Each as the launcher itself sets it, two ranks on each of two machines: the third of them.
TORCHRUN = {
    "RANK": "2", "LOCAL_RANK": "0", "GROUP_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_ERROR_FILE": "/somewhere/error.json",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "node[1-2]",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "301727745", "MASTER_ADDR": "node1",
}  # fmt: skip


def found(environ: dict[str, str]) -> ForeignLaunch:
    launch = find_launch(environ)
    assert launch is not None
    return launch


BY_HAND = {
    "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
}  # fmt: skip
DEEPSPEED = {**BY_HAND, "LOCAL_WORLD_SIZE": "", "LOCAL_SIZE": "2"}
UNDER_SRUN = {**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", **TORCHRUN}


@pytest.mark.parametrize(
    ("environ", "launcher", "tied"),
    [
        (TORCHRUN, "torchrun", True),
        (UNDER_SRUN, "torchrun", True),
        (SRUN, "srun", True),
        (MPIRUN, "mpirun", True),
        (BY_HAND, "another launcher", False),
        (DEEPSPEED, "another launcher", False),
    ],
)
def test_the_rank_and_where_ranks_meet(environ: dict[str, str], launcher: str, tied: bool) -> None:
    launch = found(environ)
    assert (launch.launcher, launch.tied) == (launcher, tied)
    assert (launch.rank, launch.world_size, launch.local_rank, launch.devices) == (2, 4, 0, 2)
    assert (launch.node_rank, launch.nodes, launch.host) == (1, 2, "node1")


def test_what_else_torchrun_sets() -> None:
    launch = found(TORCHRUN)
    assert (launch.port, launch.served, launch.restarts) == (29400, True, 3)
    assert launch.error_file == "/somewhere/error.json"
    assert not found(BY_HAND).served


def test_one_rank_needs_no_local_number() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert (found(alone).local_rank, found(alone).devices) == (0, 1)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        # a batch script with --ntasks=2, which Slurm tells that it is process 0
        {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"},
        # salloc's shell
        {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "2"},
        # one task: `srun anygauge train --devices 8`
        {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"},
        {**MPIRUN, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        # what an agent's rank has, and a shell that knows a rank but no meeting point
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
    ],
    ids=["nothing", "batch script", "salloc", "srun of one", "mpirun of one", "no address"],
)
def test_not_a_rank_of_another_launcher(environ: dict[str, str]) -> None:
    assert find_launch(environ) is None


def test_ranks_of_one_machine_meet_on_its_loopback_at_a_port_of_their_launch() -> None:
    one = {**SRUN, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "1", "SLURM_LOCALID": "2"}
    launch = found(one)
    assert (launch.host, launch.devices) == ("127.0.0.1", 4)
    assert found({**one, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).port == launch.port
    assert found({**one, "SLURM_STEP_ID": "1"}).port != launch.port
    assert found({**one, "MASTER_PORT": "4711"}).port == 4711
    local = {**MPIRUN, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    del local["MASTER_ADDR"]
    assert found(local).host == "127.0.0.1"
    assert found({**local, "PMIX_NAMESPACE": "301727746"}).port != found(local).port


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({**BY_HAND, "LOCAL_WORLD_SIZE": ""}, "LOCAL_RANK and LOCAL_WORLD_SIZE.*unset RANK"),
        ({**TORCHRUN, "RANK": "two"}, "RANK is 'two', not a whole number"),
        ({**TORCHRUN, "MASTER_PORT": ""}, "MASTER_PORT is ''"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "port 70000"),
        ({**TORCHRUN, "RANK": "4"}, "rank 4 of 4"),
        ({**TORCHRUN, "WORLD_SIZE": "3"}, "every machine must have equally many"),
        ({**SRUN, "SLURM_LOCALID": "1"}, "neighbouring ranks.*--distribution=block"),
        ({k: v for k, v in MPIRUN.items() if k != "MASTER_ADDR"}, "-x MASTER_ADDR=HOST"),
    ],
)
def test_what_does_not_fit_is_refused(environ: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        find_launch(environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[01-04,07],login", "gpu01"),
        ("gpu[07,09]", "gpu07"),
        ("r[1-2]n[30-40]", "r1n30"),
        ("a[2]-ib,b", "a2-ib"),
    ],
)
def test_the_first_of_slurms_nodes(nodes: str, first: str) -> None:
    assert found({**SRUN, "SLURM_STEP_NODELIST": nodes}).host == first
