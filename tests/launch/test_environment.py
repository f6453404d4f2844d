"""What a machine shows, from fake /proc and /sys trees and from this machine; cores of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from anygauge.interface import Fabric, Job, NetworkInterface, Node, NotAvailableError, RdmaDevice
from anygauge.launch.rank_environment import NodeEnvironment, cores_of_ranks, inspect_node
from anygauge_cpu.backend import CpuBackend
from anygauge_hpu.backend import HpuBackend
from tests.helpers.fake_files import write_tree
from tests.helpers.jobs import make_job

# Two packages of four cores with two threads each, as `inspect_node` orders them.
SERVER = Node(cores=(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15), physical_cores=8)


def interface(name: str, index: int, **files: str) -> dict[str, str]:
    shown = {"type": "1", "flags": "0x1003", "operstate": "up", "ifindex": str(index)} | files
    return {f"sys/class/net/{name}/{key}": f"{value}\n" for key, value in shown.items()}


# As on common x86 servers: processors 4 to 7 are the second threads of cores 0 to 3.
THREADS = {core: (core % 4 % 2, core % 4 // 2) for core in range(8)}


@pytest.mark.parametrize(
    ("allowed", "shown", "cores", "physical"),
    [
        (range(8), THREADS, (0, 4, 1, 5, 2, 6, 3, 7), 4),
        ((1, 3), {core: (core // 2, 0) for core in range(4)}, (1, 3), 2),
        (range(3), {}, (0, 1, 2), 3),
    ],
    ids=["threads of a core are neighbours", "only allowed cores count", "no topology"],
)
def test_cores_are_ordered(
    allowed: Iterable[int],
    shown: dict[int, tuple[int, int]],
    cores: tuple[int, ...],
    physical: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*allowed})
    files: dict[str, str] = {}
    for core, (number, package) in shown.items():
        base = f"sys/devices/system/cpu/cpu{core}/topology"
        files[f"{base}/core_id"] = f"{number}\n"
        files[f"{base}/physical_package_id"] = f"{package}\n"
    node = inspect_node(CpuBackend(), {}, root=write_tree(tmp_path, files))
    assert (node.cores, node.physical_cores) == (cores, physical)


def test_interfaces_are_distinguished(tmp_path: Path) -> None:
    files = (
        interface("lo", 1, type="772", flags="0x9", operstate="unknown")
        | interface("ib0", 2, type="32")
        | interface("enp2", 4)
        | interface("enp1", 3)
        | interface("enp3", 5, operstate="down")
        | interface("enp4", 6, flags="0x1002")
        | interface("docker0", 7)
    )
    for name in ("ib0", "enp1", "enp2", "enp3", "enp4"):
        files[f"sys/class/net/{name}/device/vendor"] = "0x15b3\n"
    # A file that is not an interface lies there as well on machines with bonding.
    files["sys/class/net/bonding_masters"] = "\n"
    node = inspect_node(CpuBackend(), {}, root=write_tree(tmp_path, files))
    assert node.interfaces == (
        NetworkInterface(name="enp1", up=True, physical=True),
        NetworkInterface(name="enp2", up=True, physical=True),
        NetworkInterface(name="enp3", up=False, physical=True),
        NetworkInterface(name="enp4", up=False, physical=True),
        NetworkInterface(name="docker0", up=True, physical=False),
        NetworkInterface(name="lo", up=True, physical=False, loopback=True),
        NetworkInterface(name="ib0", up=True, physical=True),
    )
    assert node.loopback is not None
    assert node.main_interface is not None
    assert (node.loopback.name, node.main_interface.name) == ("lo", "enp1")
    assert [i.name for i in node.external_interfaces] == ["enp1", "enp2", "ib0", "docker0"]


def test_rdma_devices(tmp_path: Path) -> None:
    files = {
        "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
        "sys/class/infiniband/mlx5_0/device/driver": "-> ../../../../bus/pci/drivers/mlx5_core",
        "sys/class/infiniband/rdmap0/ports/1/link_layer": "Unspecified\n",
        "sys/class/infiniband/rdmap0/device/driver": "-> ../../../../bus/pci/drivers/efa",
        "sys/class/infiniband/odd/node_type": "1: CA\n",
    }
    node = inspect_node(CpuBackend(), {}, root=write_tree(tmp_path, files))
    assert node.rdma_devices == (
        RdmaDevice(name="mlx5_0", driver="mlx5_core", link_layer="InfiniBand"),
        RdmaDevice(name="odd", driver="unknown", link_layer="unknown"),
        RdmaDevice(name="rdmap0", driver="efa", link_layer="Unspecified"),
    )


def test_a_machine_that_shows_nothing_is_modest(tmp_path: Path) -> None:
    node = inspect_node(CpuBackend(), {}, root=tmp_path)
    assert (node.interfaces, node.rdma_devices) == ((), ())
    assert node.loopback is None and node.main_interface is None


def test_this_machine() -> None:
    node = inspect_node(CpuBackend(), {}, rank=7)
    assert set(node.cores) == os.sched_getaffinity(0)
    assert 1 <= node.physical_cores <= len(node.cores)
    assert (node.rank, node.hostname) == (7, os.uname().nodename)
    assert node.libraries["torch"]


def job(ranks: int, **fields: Any) -> Job:
    return make_job(run_directory="/r", devices=ranks, **fields)


def test_a_gaudi_server_gives_each_rank_whole_cores_of_one_package() -> None:
    shares = cores_of_ranks(job(4), HpuBackend.launch.binding, SERVER)
    assert shares == {0: (0, 8, 1, 9), 1: (2, 10, 3, 11), 2: (4, 12, 5, 13), 3: (6, 14, 7, 15)}


@pytest.mark.parametrize(
    ("ranks", "asked", "profile", "count"),
    [
        (4, "auto", "none", 0),
        (4, "cores", "none", 4),
        (4, "none", "cores", 0),
        (1, "auto", "cores", 0),  # a single rank may use every core
        (9, "auto", "cores", 0),  # more ranks than cores
    ],
)
def test_who_is_bound(ranks: int, asked: str, profile: str, count: int) -> None:
    found = cores_of_ranks(job(ranks, binding=asked), profile, SERVER)
    assert len(found) == count


def test_cores_that_were_demanded_and_are_not_there_are_an_error() -> None:
    with pytest.raises(NotAvailableError, match="cannot give each of its 9 ranks whole cores"):
        cores_of_ranks(job(9, binding="cores"), "none", SERVER)


def test_a_network_that_was_demanded_and_is_not_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast = Fabric(name="fast", what="the fast network", detect=lambda node: None)
    monkeypatch.setattr(CpuBackend, "fabrics", (fast,))
    with pytest.raises(NotAvailableError, match="does not show the fast network"):
        NodeEnvironment(job(1, nodes=2, fabric="fast"), 0, {})
