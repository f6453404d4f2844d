"""Variables for ranks on the host: threads, cores and the network interface of gloo."""

from __future__ import annotations

from collections.abc import Sequence

from anygauge.interface import Job, Node, Scope, Setting

CORES_VARIABLE = "ANYGAUGE_CPU_CORES"
"""Logical processors of one rank, as in ``0,1``; `CpuPlacement.open` binds the process to them."""

THREADS_VARIABLE = "OMP_NUM_THREADS"

_THREADS_SOURCE = "pytorch.org/docs: notes/multiprocessing, avoiding CPU oversubscription"
_GLOO_SOURCE = "pytorch.org/docs: distributed, choosing the network interface to use"


def environment(job: Job, node: Node, local_rank: int | None) -> Sequence[Setting]:
    """All variables for one rank; those of the node alone if `local_rank` is None. Pure."""
    settings = _network(job, node)
    if local_rank is not None:
        settings += _cores(job, node, local_rank)
    return settings


def _network(job: Job, node: Node) -> list[Setting]:
    if job.nodes == 1:
        interface = node.loopback
        reason = "all ranks are on this machine: works without a host name that resolves"
    else:
        interface = node.main_interface
        others = [i.name for i in node.outward if i != interface]
        reason = "the first interface that is up and physical"
        if others:
            reason += f"; also up: {', '.join(others)}"
    if interface is None:
        return []
    return [
        Setting(
            name="GLOO_SOCKET_IFNAME",
            value=interface.name,
            scope=Scope.NODE,
            reason=reason,
            source=_GLOO_SOURCE,
        )
    ]


def _cores(job: Job, node: Node, local_rank: int) -> list[Setting]:
    ranks = job.devices_per_node
    threads = node.threads_per_rank(ranks)
    cores = node.cores_of_rank(local_rank, ranks)
    bound = ranks > 1 and bool(cores) and job.backend_options.get("bind_cores", True)
    if ranks == 1:
        why = "the rank has all physical cores of this machine"
    elif bound:
        why = f"physical cores of this rank ({node.physical_cores} for {ranks} ranks)"
    elif not cores:
        why = f"{ranks} ranks share {node.physical_cores} physical cores, so none is bound"
    else:
        why = f"{node.physical_cores} physical cores for {ranks} ranks; binding is switched off"
    settings = [
        Setting(
            name=THREADS_VARIABLE,
            value=str(threads),
            scope=Scope.RANK,
            reason=why,
            source=_THREADS_SOURCE,
        )
    ]
    if bound:
        settings.append(
            Setting(
                name=CORES_VARIABLE,
                value=",".join(map(str, cores)),
                scope=Scope.RANK,
                reason="cores of its own keep a rank's data in their caches",
                source="anygauge_cpu: equal shares of whole cores, by package",
            )
        )
    return settings
