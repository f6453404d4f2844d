"""Variables for ranks on Gaudi cards: mode, graphs, which card, and the network.

What is named here stands in Gaudi's own sources; each rule cites the place.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from anygauge.interface import (
    THREADS,
    EnvironmentRule,
    Fabric,
    RuleContext,
    RunFileError,
    Scope,
    Setting,
    Skip,
    interface_rule,
    major_minor,
    meeting_rule,
)
from anygauge_hpu.probe import PLUGIN, modules_here

LAZY_VARIABLE = "PT_HPU_LAZY_MODE"

LAZY_BY_DEFAULT_BEFORE = (1, 21)
"""The release that made eager mode, with torch.compile, the default (Gaudi-tutorials, PR 154)."""

MODULES_VARIABLE = "HABANA_VISIBLE_MODULES"
"""Module numbers that a process may take, as in ``0,1``; the position is the local rank."""

MODULE_VARIABLE = "HLS_MODULE_ID"
"""The one module that a process takes: a process drives one card."""

_BRIDGE = "gaudi-pytorch-bridge 1.19.0"
_FLAGS = f"{_BRIDGE}, scripts/env_flags.yaml"
_HCL = "HCL 1.21.0, hcl_global_conf.cpp"


class Mode(enum.StrEnum):
    """How Gaudi executes: accumulated graphs, compiled regions, or one operation after another.

    `COMPILE` and `EAGER` are one to Gaudi's software, which calls both eager.
    """

    LAZY = "lazy"
    COMPILE = "compile"
    EAGER = "eager"

    @property
    def variable(self) -> str:
        """What `LAZY_VARIABLE` must be."""
        return "1" if self is Mode.LAZY else "0"


def choose_mode(asked: str | None, libraries: Mapping[str, str]) -> tuple[Mode, str]:
    """The mode of a run and why. Pure.

    Args:
        asked: the run file's ``backend_options.mode``.
        libraries: installed distributions and their versions.
    """
    if asked is not None:
        return Mode(asked), "backend_options.mode"
    version = libraries.get(PLUGIN)
    known = major_minor(version)
    if known is None:
        return Mode.COMPILE, f"{PLUGIN} is not installed here: as releases since 1.21 do"
    if known < LAZY_BY_DEFAULT_BEFORE:
        return Mode.LAZY, f"the default of {PLUGIN} {version}"
    return Mode.COMPILE, f"the default of {PLUGIN} {version} is eager mode, which compiles regions"


def mode_of(context: RuleContext) -> tuple[Mode, str]:
    """The mode of a job on a node, and why."""
    return choose_mode(context.options.mode, context.node.libraries)


def _lazy_mode(context: RuleContext) -> Setting | Skip:
    mode, why = mode_of(context)
    return context.set_to(mode.variable, f"{mode} mode: {why}")


def _graph_limit(context: RuleContext) -> Setting | Skip:
    limit = context.options.graph_limit
    if limit is None:
        return Skip("backend_options.graph_limit is not set: graphs end where a step is marked")
    if mode_of(context)[0] is not Mode.LAZY:
        return Skip("no graph is accumulated in this mode")
    return context.set_to(
        str(limit), "backend_options.graph_limit: a graph is cut after so many operations"
    )


def _graph_limit_sync(context: RuleContext) -> Setting | Skip:
    if not context.options.graph_limit_sync:
        return Skip("backend_options.graph_limit_sync is not set: a cut graph runs on its own")
    return context.set_to("1", "backend_options.graph_limit_sync: the host waits for a cut graph")


def _engine_default(name: str, what: str) -> EnvironmentRule:
    def decide(context: RuleContext) -> Setting | Skip:
        if context.job.strategy not in ("zero", "auto"):  # the ranks decide what auto is
            return Skip("DeepSpeed is not used")
        return context.set_to("0", "as DeepSpeed sets it, but before Gaudi's library reads it")

    return EnvironmentRule(
        name=name,
        value="0 with strategy zero, or auto that the ranks decide",
        reason=f"DeepSpeed switches {what} off",
        source="deepspeed/accelerator/hpu_accelerator.py, apply_hpu_workarounds",
        decide=decide,
    )


def _recipe_cache(context: RuleContext) -> Setting | Skip:
    folder = context.options.recipe_cache
    if folder is None:
        return Skip("backend_options.recipe_cache is not set: each process compiles for itself")
    size = context.options.recipe_cache_mb
    # Never emptied at start ("false"): ranks that begin later would delete what others wrote.
    return context.set_to(f"{folder},false,{size}", "backend_options.recipe_cache")


def _module(context: RuleContext) -> Setting | Skip:
    rank, text = context.local_rank, context.variable(MODULES_VARIABLE)
    allowed = tuple(part.strip() for part in text.split(",")) if text else None
    here = modules_here(context.node.texts)
    assert rank is not None
    if allowed is None:
        if context.job.launch.devices == 1:
            return Skip("a single rank takes any card that is free")
        if here is None:
            return context.set_to(
                str(rank), f"the local rank: neither {MODULES_VARIABLE} nor the driver says more"
            )
        if rank >= len(here):
            raise RunFileError(
                f"{context.node.hostname} has device files of {len(here)} Gaudi cards (modules "
                f"{','.join(here)}), but local rank {rank} wants one more: ask for at most "
                f"--devices {len(here)}, or hand the container more cards"
            )
        return context.set_to(here[rank], f"place {rank} of the modules here: {','.join(here)}")
    if rank >= len(allowed):
        raise RunFileError(
            f"{MODULES_VARIABLE}={','.join(allowed)} allows {len(allowed)} cards, but local rank "
            f"{rank} wants one more: ask for at most --devices {len(allowed)}, or allow more"
        )
    if here is not None and allowed[rank] not in here:
        raise RunFileError(
            f"{MODULES_VARIABLE}={','.join(allowed)} names module {allowed[rank]}, but "
            f"{context.node.hostname} has modules {','.join(here)}: name some of these, or unset "
            "the variable"
        )
    return context.set_to(allowed[rank], f"place {rank} of {MODULES_VARIABLE}={','.join(allowed)}")


def _over_ofi(context: RuleContext) -> Setting | Skip:
    fabric = context.fabric
    if not fabric.requested:
        return Skip("the library looks for Gaudi's own NICs, then the host's, while it is unset")
    return context.set_to(
        "0" if fabric.name == "gaudi_nic" else "1", f"launch.fabric: {fabric.name}"
    )


def _gaudi_direct(context: RuleContext) -> Setting | Skip:
    if context.fabric.name != "host_nic_direct":
        return Skip("launch.fabric is not host_nic_direct")
    return context.set_to("1", "launch.fabric: host_nic_direct")


def _efa(name: str) -> EnvironmentRule:
    def decide(context: RuleContext) -> Setting | Skip:
        if not any(device.driver == "efa" for device in context.node.rdma_devices):
            return Skip("no EFA device")
        return context.set_to("1", "Intel asks for it on EFA; its images set it, too")

    return EnvironmentRule(
        name=name,
        value="1 on EFA (AWS DL1)",
        scope=Scope.NODE,
        reason="the library sends through EFA",
        source="Intel's container images (Dockerfile ENV)",
        decide=decide,
        between_machines=True,
    )


FABRICS = (
    Fabric(name="gaudi_nic", what="the cards' own network interfaces"),
    Fabric(
        name="host_nic_direct",
        what="the host's network interfaces, which read card memory directly (libfabric)",
    ),
    Fabric(
        name="host_nic", what="the host's network interfaces, through the host's memory (libfabric)"
    ),
)
"""What Gaudi's library can use between machines, in the order in which it looks for them."""

RULES = (
    EnvironmentRule(
        name=LAZY_VARIABLE,
        value="1 in lazy mode, else 0",
        reason="its default changed with release 1.21, and libraries disagree about it when unset",
        source=f"{_BRIDGE}, utils/internal.py; Gaudi-tutorials, PR 154",
        decide=_lazy_mode,
    ),
    EnvironmentRule(
        name="PT_HPU_MAX_COMPOUND_OP_SIZE",
        value="backend_options.graph_limit, in lazy mode",
        reason="a smaller graph holds fewer intermediate tensors, at some cost in speed",
        source=_FLAGS,
        decide=_graph_limit,
    ),
    EnvironmentRule(
        name="PT_HPU_MAX_COMPOUND_OP_SYNC",
        value="1 with backend_options.graph_limit_sync",
        reason="frees what a cut graph held before the next one is traced",
        source=f"{_BRIDGE}, habana_lazy/hpu_stage_submission.cpp",
        decide=_graph_limit_sync,
    ),
    _engine_default("PT_HPU_LAZY_ACC_PAR_MODE", "parallel accumulation of lazy graphs"),
    _engine_default("PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES", "dynamic shapes"),
    EnvironmentRule(
        name="PT_HPU_RECIPE_CACHE_CONFIG",
        value="FOLDER,false,MEGABYTES from backend_options.recipe_cache",
        reason="processes read compiled graphs from there instead of compiling their own",
        source=f"{_BRIDGE}, habana_serialization/recipe_cache_config.cpp",
        decide=_recipe_cache,
    ),
    EnvironmentRule(
        name="HCCL_OVER_OFI",
        value="0 or 1 where launch.fabric names the network, on several machines",
        reason="chooses between Gaudi's own NICs and the host's",
        source=_HCL,
        decide=_over_ofi,
        between_machines=True,
    ),
    EnvironmentRule(
        name="HCCL_GAUDI_DIRECT",
        value="1 with launch.fabric: host_nic_direct",
        reason="the host's NICs read card memory without a copy through the host's",
        source=f"{_HCL}; kernel 5.12 and libfabric 1.20 (1.16.1 on EFA) or newer",
        decide=_gaudi_direct,
        between_machines=True,
    ),
    interface_rule("HCCL_SOCKET_IFNAME", "HCCL", _HCL),
    meeting_rule("GLOO_SOCKET_IFNAME", "gloo"),
    _efa("RDMAV_FORK_SAFE"),
    _efa("FI_EFA_USE_DEVICE_RDMA"),
    EnvironmentRule(
        name=MODULE_VARIABLE,
        value=f"entry LOCAL_RANK of {MODULES_VARIABLE}; without that variable, of the modules of "
        "the cards that are here; without a driver that says them, the local rank",
        scope=Scope.RANK,
        reason="a process drives one card; ranks that choose for themselves may take the same",
        source=f"{_BRIDGE}, torch/distributed/hccl/__init__.py; Linux, sysfs-driver-habanalabs",
        decide=_module,
    ),
    THREADS,
)


def refuse_contradictions(environ: Mapping[str, str], mode: Mode) -> None:
    """Refuse a variable that contradicts the run's mode, or would end the process
    (`RunFileError`)."""
    lazy = environ.get(LAZY_VARIABLE)
    if lazy is not None and (lazy != "0") is not (mode is Mode.LAZY):
        raise RunFileError(
            f"{LAZY_VARIABLE}={lazy} is set, but this run is in {mode} mode: unset the variable, "
            f"or set backend_options.mode: {'lazy' if lazy != '0' else 'compile'}"
        )
    direct = next(
        (name for name in ("HCCL_GAUDI_DIRECT", "HCCL_PEER_DIRECT") if _on(environ.get(name))), None
    )
    if direct and not _on(environ.get("HCCL_OVER_OFI")):
        raise RunFileError(
            f"{direct} is on without HCCL_OVER_OFI, which makes Gaudi's library terminate the "
            "process (hcl_idevice.cpp): set launch.fabric: host_nic_direct, which "
            f"sets both, or unset {direct}"
        )


def _on(value: str | None) -> bool:
    return value is not None and value.strip().lower() in ("1", "true", "yes", "on")
