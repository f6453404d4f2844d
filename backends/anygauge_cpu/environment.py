"""Variables for ranks on the host: threads, cores, memory allocator, gloo's network interface."""

from __future__ import annotations

import dataclasses

from anygauge.interface import (
    THREADS,
    EnvironmentRule,
    RuleContext,
    Scope,
    Setting,
    Skip,
    meeting_rule,
)

CORES_VARIABLE = "ANYGAUGE_CPU_CORES"
"""Logical processors of one rank, as in ``0,1``; `CpuPlacement.open` binds the process to them."""

THREADS_VARIABLE = THREADS.name

ALLOCATORS = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4", "libjemalloc.so.2")
"""Replacements of the C library's allocator, the preferred one first."""

_ALLOCATOR_SOURCE = "pytorch.org/tutorials: performance tuning guide, memory allocator"


def _off(context: RuleContext) -> str | None:
    if context.job.launch.binding == "none":
        return "launch.binding is none"
    if not context.options.bind_cores:
        return "backend_options.bind_cores is false"
    return None


def _bound_cores(context: RuleContext) -> tuple[int, ...]:
    ranks, rank = context.job.launch.devices, context.local_rank
    if rank is None or ranks == 1 or _off(context) is not None:
        return ()
    return context.node.cores_of_rank(rank, ranks)


def _threads(context: RuleContext) -> Setting | Skip:
    node, ranks = context.node, context.job.launch.devices
    if ranks == 1:
        why = "the rank has all physical cores of this machine"
    elif _bound_cores(context):
        why = f"physical cores of this rank ({node.physical_cores} for {ranks} ranks)"
    elif not node.cores_of_rank(0, ranks):
        why = f"{ranks} ranks share {node.physical_cores} physical cores, so none is bound"
    else:
        why = f"{node.physical_cores} physical cores for {ranks} ranks; binding is switched off"
    return context.set_to(str(node.threads_per_rank(ranks)), why)


def _cores(context: RuleContext) -> Setting | Skip:
    cores = _bound_cores(context)
    if cores:
        return context.set_to(
            ",".join(map(str, cores)), "cores of its own keep a rank's data in their caches"
        )
    if context.job.launch.devices == 1:
        return Skip("a single rank may use every core")
    off = _off(context)
    if off is not None:
        return Skip(off)
    return Skip("there are fewer physical cores than ranks, or cores of several kinds")


def _allocator(context: RuleContext) -> Setting | Skip:
    if not context.options.preload_allocator:
        return Skip("backend_options.preload_allocator is false")
    found = context.node.files
    name = next((name for name in ALLOCATORS if name in found), None)
    if name is None:
        return Skip(f"none is installed (looked for {', '.join(ALLOCATORS)})")
    return context.set_to(
        found[name], "reuses memory between steps instead of giving it back to the kernel"
    )


RULES = (
    meeting_rule("GLOO_SOCKET_IFNAME", "gloo"),
    EnvironmentRule(
        name="LD_PRELOAD",
        value="tcmalloc or jemalloc, where one is installed",
        scope=Scope.NODE,
        reason="the C library's allocator gives large blocks back to the kernel after each use",
        source=_ALLOCATOR_SOURCE,
        decide=_allocator,
    ),
    dataclasses.replace(THREADS, decide=_threads),
    EnvironmentRule(
        name=CORES_VARIABLE,
        value="an equal share of whole cores, where there are enough for all ranks",
        scope=Scope.RANK,
        reason="a rank that moves to other cores loses its caches and the node of its memory",
        source="anygauge_cpu: equal shares of whole cores, by package",
        decide=_cores,
    ),
)
