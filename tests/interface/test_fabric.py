"""Networks between machines: which one a job uses, and what a machine without it says."""

from __future__ import annotations

from typing import Any

import pytest

from anygauge.interface import (
    ONE_NODE,
    Job,
    NetworkInterface,
    Node,
    RdmaDevice,
    RunFileError,
    Skip,
    choose_fabric,
)
from anygauge_cpu.backend import CpuBackend
from anygauge_cuda.backend import CudaBackend
from anygauge_hpu.backend import HpuBackend
from tests.helpers.jobs import make_job

ETH0 = NetworkInterface(name="eth0", up=True, physical=True)
EFA = RdmaDevice(name="rdmap0", driver="efa", link_layer="Unspecified")
INFINIBAND = RdmaDevice(name="mlx5_0", driver="mlx5_core", link_layer="InfiniBand")
ROCE = RdmaDevice(name="mlx5_1", driver="mlx5_core", link_layer="Ethernet")
ALL, GAUDI = CudaBackend.fabrics, HpuBackend.fabrics


def job(nodes: int = 2, **fields: Any) -> Job:
    return make_job(run_directory="/r", nodes=nodes, **fields)


def machine(*found: RdmaDevice, interfaces: tuple[NetworkInterface, ...] = (ETH0,)) -> Node:
    return Node(hostname="a1", interfaces=interfaces, rdma_devices=found)


@pytest.mark.parametrize(
    ("fabrics", "asked", "here", "name", "why"),
    [
        (ALL, job(), machine(), "ethernet", "interface eth0, and no better network"),
        (ALL, job(), machine(ROCE), "roce", "RDMA devices mlx5_1"),
        (ALL, job(), machine(ROCE, INFINIBAND), "infiniband", "RDMA devices mlx5_0"),
        (ALL, job(), machine(EFA, ROCE), "efa", "RDMA devices rdmap0"),
        (ALL, job(), machine(interfaces=()), "", "nothing shows which: the library chooses"),
        (ALL, job(fabric="ethernet"), machine(EFA), "ethernet", "launch.fabric"),
        (ALL, job(fabric="infiniband"), machine(INFINIBAND), "infiniband", "launch.fabric"),
        (ALL, job(nodes=1, fabric="infiniband"), machine(), "", ONE_NODE),
        # Gaudi's networks show in no file that is known: the library looks for them.
        (GAUDI, job(), machine(EFA), "", "nothing shows which: the library chooses"),
        (GAUDI, job(fabric="gaudi_nic"), machine(), "gaudi_nic", "launch.fabric"),
    ],
)
def test_the_one_asked_for_or_the_best_that_a_machine_shows_is_chosen(
    fabrics: Any, asked: Job, here: Node, name: str, why: str
) -> None:
    chosen = choose_fabric(fabrics, asked, here)
    assert (chosen.name, chosen.why, chosen.missing) == (name, why, "")
    assert chosen.requested is (why == "launch.fabric")


def test_a_machine_without_the_network_says_what_it_has() -> None:
    missing = choose_fabric(ALL, job(fabric="infiniband"), machine(EFA)).missing
    assert missing.startswith("launch.fabric: infiniband: a1 does not show InfiniBand")
    assert "its RDMA devices: rdmap0 (efa, Unspecified)" in missing


@pytest.mark.parametrize(
    ("backend", "known"),
    [
        (CpuBackend, "auto, ethernet"),
        (CudaBackend, "auto, efa, infiniband, roce, ethernet"),
        (HpuBackend, "auto, gaudi_nic, host_nic_direct, host_nic"),
    ],
)
def test_a_network_that_the_backend_does_not_have_is_refused(backend: Any, known: str) -> None:
    with pytest.raises(RunFileError, match=rf"^launch.fabric: 'myri': this backend has {known}$"):
        choose_fabric(backend.fabrics, job(fabric="myri"), machine())


@pytest.mark.parametrize(
    ("fabric", "found", "variable", "value"),
    [
        ("auto", INFINIBAND, "NCCL_NET", None),
        ("ethernet", INFINIBAND, "NCCL_NET", "Socket"),
        ("infiniband", INFINIBAND, "NCCL_NET", "IB"),
        ("roce", INFINIBAND, "NCCL_NET", "IB"),
        ("efa", INFINIBAND, "NCCL_NET", None),
        # It goes with the network, not with the device.
        ("auto", EFA, "FI_EFA_USE_HUGE_PAGE", "0"),
        ("ethernet", EFA, "FI_EFA_USE_HUGE_PAGE", None),
    ],
)
def test_a_network_that_was_asked_for_is_not_left_in_silence(
    fabric: str, found: RdmaDevice, variable: str, value: str | None
) -> None:
    settings = CudaBackend().environment(job(fabric=fabric), machine(found), None)
    assert {one.name: one.value for one in settings}.get(variable) == value


def test_a_named_network_on_one_machine_is_said_to_have_no_use() -> None:
    rules = CudaBackend().explain_environment(
        job(nodes=1, fabric="infiniband"), machine(INFINIBAND)
    )
    (said,) = [found for rule, found in rules if rule.name == "NCCL_NET"]
    assert said == Skip(ONE_NODE)
