"""Cores for each rank, so that none of them wanders over the machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from anygauge.interface import Job, LaunchProfile, Node, NotAvailableError


def cores_of_ranks(job: Job, profile: LaunchProfile, node: Node) -> dict[int, tuple[int, ...]]:
    """Local rank -> logical processors that it is bound to; ranks that are not bound are left out.

    Ranks get equal shares of whole cores, package by package, as ``mpirun --bind-to core --map-by
    slot:PE=N`` gives them. A machine with fewer cores than ranks binds none.

    Raises:
        NotAvailableError: binding was asked for by name, and cannot be.
    """
    wanted = profile.binding if job.launch.binding == "auto" else job.launch.binding
    count = job.launch.devices
    if wanted != "cores" or count == 1:
        return {}
    shares = {rank: node.cores_of_rank(rank, count) for rank in range(count)}
    if all(shares.values()):
        return shares
    if job.launch.binding == "cores":
        raise NotAvailableError(
            f"launch.binding: cores: {node.hostname} has {node.physical_cores} physical cores for "
            f"{count} ranks, or cores of several kinds; auto binds where it can"
        )
    return {}


@contextlib.contextmanager
def bound(cores: tuple[int, ...]) -> Iterator[None]:
    """What is started meanwhile is bound to these cores from its first moment; none: not bound."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
