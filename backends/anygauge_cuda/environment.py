"""Variables for ranks on NVIDIA GPUs: device order, allocator, threads and the network.

Little is set on purpose: NCCL finds InfiniBand by itself, and current AWS EFA plugins (aws-ofi-nccl
1.7 and libfabric 1.18 or newer) want nothing either.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from anygauge.interface import Job, Node, Scope, Setting

_ALLOCATOR_OLD, _ALLOCATOR_NEW = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
_EFA_SOURCE = "aws-ofi-nccl: doc/efa-env-var.md"


def environment(job: Job, node: Node, local_rank: int | None) -> Sequence[Setting]:
    """All variables for one rank; those of job and node alone if `local_rank` is None. Pure."""
    settings = [*_device(), *_allocator(job, node), *_gloo(job, node)]
    if job.nodes > 1:
        settings += [*_nccl(node), *_efa(node)]
    if local_rank is not None:
        settings += _threads(job, node)
    return settings


def _device() -> list[Setting]:
    return [
        Setting(
            name="CUDA_DEVICE_ORDER",
            value="PCI_BUS_ID",
            reason="numbers GPUs as nvidia-smi does, and alike on all nodes, not by their speed",
            source="CUDA C++ programming guide: CUDA environment variables",
        )
    ]


def _allocator(job: Job, node: Node) -> list[Setting]:
    # Torch reads both names: ours must not compete with the other one, set by the user.
    if {_ALLOCATOR_OLD, _ALLOCATOR_NEW} & set(job.environment):
        return []
    version = _version(node.libraries.get("torch", ""))
    return [
        Setting(
            name=_ALLOCATOR_NEW if version >= (2, 9) else _ALLOCATOR_OLD,
            value="expandable_segments:True",
            scope=Scope.NODE,
            reason="batches of changing length do not fragment memory",
            source="pytorch.org/docs: notes/cuda, optimizing memory usage (name: torch "
            + (node.libraries.get("torch") or "of unknown version")
            + ")",
        )
    ]


def _gloo(job: Job, node: Node) -> list[Setting]:
    """Host-side messages go through gloo, which otherwise resolves the host name."""
    interface = node.loopback if job.nodes == 1 else node.main_interface
    if interface is None:
        return []
    return [
        Setting(
            name="GLOO_SOCKET_IFNAME",
            value=interface.name,
            scope=Scope.NODE,
            reason="all ranks are on this machine: works without a host name that resolves"
            if job.nodes == 1
            else "the first interface that is up and physical" + _others(node),
            source="pytorch.org/docs: distributed, choosing the network interface to use",
        )
    ]


def _nccl(node: Node) -> list[Setting]:
    interface = node.main_interface
    # With a single one there is nothing to choose, and NCCL's own rules for InfiniBand do better.
    if interface is None or len(node.outward) == 1:
        return []
    return [
        Setting(
            name="NCCL_SOCKET_IFNAME",
            value=f"={interface.name}",
            scope=Scope.NODE,
            reason="ranks must meet on interfaces that reach each other; '=' matches the whole "
            "name, not a prefix" + _others(node),
            source="NVIDIA NCCL user guide: environment variables, NCCL_SOCKET_IFNAME",
        )
    ]


def _efa(node: Node) -> list[Setting]:
    if not any(device.driver == "efa" for device in node.rdma_devices):
        return []
    return [
        Setting(
            name="FI_EFA_USE_HUGE_PAGE",
            value="0",
            scope=Scope.NODE,
            reason="a process that holds huge pages may fail to start helpers ('Cannot allocate "
            "memory'), at a minor cost in speed",
            source=_EFA_SOURCE,
        )
    ]


def _threads(job: Job, node: Node) -> list[Setting]:
    return [
        Setting(
            name="OMP_NUM_THREADS",
            value=str(node.threads_per_rank(job.devices_per_node)),
            scope=Scope.RANK,
            reason=f"{node.physical_cores} physical cores for {job.devices_per_node} ranks",
            source="pytorch.org/docs: notes/multiprocessing, avoiding CPU oversubscription",
        )
    ]


def _others(node: Node) -> str:
    names = [i.name for i in node.outward if i != node.main_interface]
    return f"; also up: {', '.join(names)}" if names else ""


def _version(text: str) -> tuple[int, int]:
    """``"2.9.0+cu128"`` is ``(2, 9)``; an unknown version is ``(0, 0)``."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)
