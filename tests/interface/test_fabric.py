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
    missing_fabric,
)
from anygauge.interface.environment import choose_fabric
from anygauge_cpu.backend import CpuBackend
from anygauge_cuda.backend import CudaBackend
from anygauge_hpu.backend import HpuBackend
from tests.helpers.jobs import make_job

ETH0 = NetworkInterface(name="eth0", up=True, physical=True)
EFA = RdmaDevice(name="rdmap0", driver="efa", link_layer="Unspecified")
INFINIBAND = RdmaDevice(name="mlx5_0", driver="mlx5_core", link_layer="InfiniBand")
ROCE = RdmaDevice(name="mlx5_1", driver="mlx5_core", link_layer="Ethernet")
ALL = CudaBackend.fabrics


def job(nodes: int = 2, **fields: Any) -> Job:
    return make_job(run_directory="/r", nodes=nodes, **fields)


def machine(*found: RdmaDevice, interfaces: tuple[NetworkInterface, ...] = (ETH0,)) -> Node:
    return Node(hostname="a1", interfaces=interfaces, rdma_devices=found)


@pytest.mark.parametrize(
    ("found", "name", "why"),
    [
        ((), "ethernet", "interface eth0, and no better network"),
        ((ROCE,), "roce", "RDMA devices mlx5_1"),
        ((ROCE, INFINIBAND), "infiniband", "RDMA devices mlx5_0"),
        ((EFA, ROCE), "efa", "RDMA devices rdmap0"),
    ],
)
def test_the_best_that_a_machine_shows_is_chosen(
    found: tuple[RdmaDevice, ...], name: str, why: str
) -> None:
    chosen = choose_fabric(ALL, job(), machine(*found))
    assert (chosen.name, chosen.why, chosen.requested) == (name, why, False)


def test_the_one_asked_for_comes_first_and_one_machine_has_none() -> None:
    chosen = choose_fabric(ALL, job(fabric="ethernet"), machine(EFA))
    assert (chosen.name, chosen.requested) == ("ethernet", True)
    assert choose_fabric(ALL, job(nodes=1, fabric="efa"), machine()).name == ""
    assert choose_fabric(ALL, job(), machine(interfaces=())).why == (
        "nothing shows which: the library chooses"
    )
    # Gaudi's networks show in no file that is known: the library looks for them.
    assert choose_fabric(HpuBackend.fabrics, job(), machine(EFA)).name == ""


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


def test_a_machine_without_the_network_says_what_it_has() -> None:
    said = missing_fabric(ALL, job(fabric="infiniband"), machine(EFA))
    assert said is not None and said.startswith(
        "launch.fabric: infiniband: a1 does not show InfiniBand"
    )
    assert "its RDMA devices: rdmap0 (efa, Unspecified)" in said
    for asked, found in (("infiniband", INFINIBAND), ("auto", EFA)):
        assert missing_fabric(ALL, job(fabric=asked), machine(found)) is None
    assert missing_fabric(HpuBackend.fabrics, job(fabric="gaudi_nic"), machine()) is None
    assert missing_fabric(ALL, job(nodes=1, fabric="infiniband"), machine()) is None


@pytest.mark.parametrize(
    ("fabric", "value"),
    [("auto", None), ("ethernet", "Socket"), ("infiniband", "IB"), ("roce", "IB"), ("efa", None)],
)
def test_a_network_that_was_asked_for_is_not_left_in_silence(
    fabric: str, value: str | None
) -> None:
    found = CudaBackend().environment(job(fabric=fabric), machine(INFINIBAND), None)
    values = {setting.name: setting.value for setting in found}
    assert values.get("NCCL_NET") == value


def test_a_named_network_on_one_machine_is_said_to_have_no_use() -> None:
    rules = CudaBackend().explain_environment(
        job(nodes=1, fabric="infiniband"), machine(INFINIBAND)
    )
    (said,) = [found for rule, found in rules if rule.name == "NCCL_NET"]
    assert said == Skip(ONE_NODE)


def test_settings_for_efa_go_with_the_network_and_not_with_the_device() -> None:
    for fabric, expected in (("auto", "0"), ("ethernet", None)):
        found = CudaBackend().environment(job(fabric=fabric), machine(EFA), None)
        values = {setting.name: setting.value for setting in found}
        assert values.get("FI_EFA_USE_HUGE_PAGE") == expected
