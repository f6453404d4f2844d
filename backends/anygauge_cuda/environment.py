"""Variables for ranks on NVIDIA GPUs: device order, allocator, threads and the network.

Little is set on purpose: NCCL finds InfiniBand by itself and uses relaxed ordering where it is
available (NCCL_IB_PCI_RELAXED_ORDERING is 2 by default), and current AWS EFA plugins (aws-ofi-nccl
1.7 and libfabric 1.18 or newer) want nothing either.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from anygauge.interface import (
    ETHERNET,
    THREADS,
    EnvironmentRule,
    Fabric,
    RuleContext,
    Scope,
    Setting,
    Skip,
    detected_by,
    interface_rule,
    meeting_rule,
)

ALLOCATOR_OLD, ALLOCATOR_NEW = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
"""Torch reads both names; the second one since 2.9."""

TOPOLOGIES = ("/opt/microsoft/ndv4-topo.xml", "/opt/microsoft/ndv5-topo.xml")
"""Where the images of Azure's ND virtual machines keep the machine's PCI topology for NCCL."""

NCCL_SETTINGS = "/etc/nccl.conf"
"""NCCL's own file of settings, which some images fill for the machine they run on."""

VISIBLE = "CUDA_VISIBLE_DEVICES"

WSL_DEVICE = "/dev/dxg"
DRIVER = "/proc/driver/nvidia/version"
READINGS = (
    WSL_DEVICE,  # of Windows' host, under WSL2
    DRIVER,
    # Its cards and their MIG slices (NVIDIA's README and MIG user guide).
    "/proc/driver/nvidia/gpus/*/information",
    "/proc/driver/nvidia/capabilities/gpu*/mig/gi*/access",
)

_ALLOCATOR_SOURCE = "pytorch.org/docs: notes/cuda, optimizing memory usage"
_NCCL_SOURCE = "NVIDIA NCCL user guide: environment variables"
_EFA_SOURCE = "aws-ofi-nccl: doc/efa-env-var.md"


def _allocator(*, since_2_9: bool) -> EnvironmentRule:
    name = ALLOCATOR_NEW if since_2_9 else ALLOCATOR_OLD

    def decide(context: RuleContext) -> Setting | Skip:
        if (context.version("torch") >= (2, 9)) is not since_2_9:
            torch = context.node.libraries.get("torch", "of unknown version")
            return Skip(f"torch {torch} reads the other name")
        other = next((n for n in (ALLOCATOR_OLD, ALLOCATOR_NEW) if context.variable(n)), None)
        if other is not None:
            # Torch reads both names: ours must not compete with the user's.
            return Skip(f"{other} is set, and torch reads both names")
        if "/mig/" in "".join(context.node.texts) or "MIG-" in (context.variable(VISIBLE) or ""):
            # Source: vllm-project/ci-infra, pull request 355.
            return Skip("a slice of a card (MIG) hides what torch asks of it when memory grows")
        if WSL_DEVICE in context.node.texts:
            # Source: pytorch/pytorch, issue 192330.
            return Skip("drivers before R615 fail under WSL2, and show no version there")
        return context.set_to(
            "expandable_segments:True", "batches of changing length do not fragment memory"
        )

    return EnvironmentRule(
        name=name,
        value="expandable_segments:True, with torch "
        + ("2.9 or newer" if since_2_9 else "below 2.9")
        + "; not on MIG slices and under WSL2",
        scope=Scope.NODE,
        reason="blocks that can grow are reused for batches of another length",
        source=_ALLOCATOR_SOURCE,
        decide=decide,
    )


def _old_consumer_cards(context: RuleContext) -> Setting | Skip:
    texts = context.node.texts
    if "\n".join(texts.values()).count("GeForce RTX 40") < 2:
        return Skip("for several GeForce RTX 40 in a machine only")
    found = re.search(r"\b(\d{3,})\.(\d+)(?:\.(\d+))?\b", texts.get(DRIVER, ""))
    if found is None or tuple(int(part or 0) for part in found.groups()) >= (550, 40, 7):
        return Skip("for drivers below 550.40.07 only")
    return context.set_to("1", f"the driver, {found[0]}, is below 550.40.07")


_CONSUMER_CARDS = tuple(
    EnvironmentRule(
        name=name,
        value="1 on several GeForce RTX 40 in one machine, with a driver below 550.40.07",
        scope=Scope.NODE,
        reason="such drivers report peer access that these cards have not: NCCL hangs or fails",
        source="accelerate: utils/environment.py, check_cuda_p2p_ib_support",
        decide=_old_consumer_cards,
    )
    for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
)


def _recorder_rule(
    name: str, value: str, reason: str, reads: Callable[[tuple[int, int]], bool] = bool
) -> EnvironmentRule:
    """A variable of torch's flight recorder. Args: reads: whether a version of torch reads it."""

    def decide(context: RuleContext) -> Setting | Skip:
        if context.job.world_size == 1:
            return Skip("there is one rank")
        if not reads(context.version("torch")):
            return Skip(f"torch {context.node.libraries.get('torch')} reads the other name")
        record = context.job.collectives_record
        return context.set_to(record if value == _RECORD else value.split(",")[0], reason)

    return EnvironmentRule(
        name=name,
        value=f"{value}; on several ranks",
        scope=Scope.NODE,
        reason=reason,
        source="PyTorch tutorial: flight recorder for debugging; torch's FlightRecorder.hpp",
        decide=decide,
    )


_RECORD = "logs/flight_rank_ in the run's folder, followed by the rank's number"
_KEEPS = "keeps what each rank's last collectives were; as many as torchtitan's"
# The first was renamed: pytorch/pytorch, pull request 152563; NVIDIA/nvidia-resiliency-ext, 163.
# The last has another name beside it in newer torch; all versions read this one.
_RECORDER = (
    _recorder_rule(
        "TORCH_FR_BUFFER_SIZE", "20000, with torch 2.8 or newer", _KEEPS, lambda v: v >= (2, 8)
    ),
    _recorder_rule(
        "TORCH_NCCL_TRACE_BUFFER_SIZE", "20000, with torch below 2.8", _KEEPS, lambda v: v < (2, 8)
    ),
    _recorder_rule(
        "TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "a rank whose collective times out writes them down"
    ),
    _recorder_rule(
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", _RECORD, "there; the run's failure names the file"
    ),
)


def _topology(context: RuleContext) -> Setting | Skip:
    files = context.node.files
    present = [path for path in TOPOLOGIES if path in files]
    if not present:
        return Skip("not an image for Azure's ND machines")
    if NCCL_SETTINGS in files:
        return Skip(f"{NCCL_SETTINGS} is there, where such images set it for their machine")
    if len(present) > 1:
        return Skip(f"{' and '.join(present)} are both here: which machine this is, is unknown")
    return context.set_to(
        present[0], "a virtual machine hides which GPU is near which network adapter"
    )


def _net(context: RuleContext) -> Setting | Skip:
    if not context.fabric.requested:
        return Skip("launch.fabric is auto: NCCL takes the best that it finds")
    names = {"ethernet": "Socket", "infiniband": "IB", "roce": "IB"}
    name = names.get(context.fabric.name)
    if name is None:
        return Skip("the plugin of such a network brings itself forward")
    return context.set_to(
        name, f"launch.fabric: {context.fabric.name}; NCCL fails rather than use another"
    )


def _huge_pages(context: RuleContext) -> Setting | Skip:
    if context.fabric.name != "efa":
        return Skip(f"the network between machines is {context.fabric.name or 'unknown'}")
    return context.set_to(
        "0",
        "a process that holds huge pages may fail to start helpers ('Cannot allocate memory'), at "
        "a minor cost in speed",
    )


def _deterministic(context: RuleContext) -> Setting | Skip:
    if not context.job.deterministic:
        return Skip("train.deterministic is off")
    return context.set_to(context.rule.value.split(",")[0], context.rule.reason)


_DETERMINISTIC = tuple(
    EnvironmentRule(
        name=name,
        value=f"{value}, with train.deterministic",
        scope=Scope.JOB,
        reason=f"{what} otherwise adds in any order",
        source=source,
        decide=_deterministic,
    )
    for name, value, what, source in (
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", "cuBLAS", "cuBLAS: results reproducibility"),
        (
            *("FLASH_ATTENTION_DETERMINISTIC", "1", "the backward pass of flash-attn"),
            "transformers: modeling_flash_attention_utils.py",
        ),
    )
)

FABRICS = (
    Fabric(
        name="efa",
        what="AWS's Elastic Fabric Adapter, through the plugin aws-ofi-nccl",
        detect=detected_by(lambda device: device.driver == "efa"),
        resource="vpc.amazonaws.com/efa",
    ),
    Fabric(
        name="infiniband",
        what="InfiniBand, as in Azure's ND machines",
        detect=detected_by(lambda device: device.link_layer == "InfiniBand"),
        # Locked memory is limited otherwise (Azure: RDMA and InfiniBand on AKS).
        capabilities=("IPC_LOCK",),
    ),
    Fabric(
        name="roce",
        what="RDMA over Ethernet",
        detect=detected_by(
            lambda device: device.link_layer == "Ethernet" and device.driver != "efa"
        ),
        capabilities=("IPC_LOCK",),
    ),
    ETHERNET,
)
"""What NCCL can use between machines, best first."""

RULES = (
    EnvironmentRule(
        name="CUDA_DEVICE_ORDER",
        value="PCI_BUS_ID",
        reason="CUDA otherwise numbers GPUs by their speed",
        source="CUDA C++ programming guide: CUDA environment variables",
        decide=lambda context: context.set_to(
            "PCI_BUS_ID", "numbers GPUs as nvidia-smi does, and alike on all nodes"
        ),
    ),
    _allocator(since_2_9=False),
    _allocator(since_2_9=True),
    meeting_rule("GLOO_SOCKET_IFNAME", "gloo"),
    interface_rule(
        "NCCL_SOCKET_IFNAME",
        "NCCL",
        _NCCL_SOURCE + ", NCCL_SOCKET_IFNAME",
        only_one="there is a single one, and NCCL's own rules for InfiniBand do better",
        exactly="=",
    ),
    EnvironmentRule(
        name="NCCL_NET",
        value="Socket or IB, where launch.fabric names ethernet, infiniband or roce",
        reason="NCCL otherwise falls back to a slower network silently",
        source=_NCCL_SOURCE + ", NCCL_NET",
        decide=_net,
        between_machines=True,
    ),
    *_CONSUMER_CARDS,
    *_RECORDER,
    *_DETERMINISTIC,
    EnvironmentRule(
        name="NCCL_TOPO_FILE",
        value="the image's topology file on Azure ND, unless the image sets it itself",
        scope=Scope.NODE,
        reason="NCCL's rings otherwise cross between the machine's sockets",
        source="scripts for Azure's ND machines (JonShelley/azure); " + _NCCL_SOURCE,
        decide=_topology,
    ),
    EnvironmentRule(
        name="FI_EFA_USE_HUGE_PAGE",
        value="0 on EFA",
        scope=Scope.NODE,
        reason="a process that holds huge pages may fail to start child processes",
        source=_EFA_SOURCE,
        decide=_huge_pages,
        between_machines=True,
    ),
    THREADS,
)
