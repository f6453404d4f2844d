"""What ``anygauge doctor`` checks on any machine: packages, limits, networks, a collective.

Files and limits are read. Nothing is changed, except that a file is written to the output folder to
measure its speed, and removed. The collective runs on real ranks that this machine starts.
"""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from anygauge.interface import Check, Job, LaunchProfile, Node, Outcome
from anygauge.launch import local_job
from anygauge.launch.environment import file_text
from anygauge.registry import installed_version

MODULE = "anygauge.launch.doctor"
MIB = 2**20
SHARED_MEMORY = 2**30
"""Containers get 64 MiB by default, too little for collectives and data workers."""
OPEN_FILES = 4096
WRITTEN = 128 * MIB
SLOW_WRITES = 50 * MIB
"""Bytes per second: a checkpoint of a gigabyte then takes over twenty seconds."""
ROUND_TRIP = "collective round trip"
ROUND_TRIP_SIZES = (1_024, 1_048_576, 67_108_864)
"""Bytes of float32 in a tensor."""
ROUND_TRIP_REPEATS = 5


def host_checks(
    node: Node,
    launch: LaunchProfile,
    environ: Mapping[str, str],
    root: Path = Path("/"),
    *,
    backend: str = "",
) -> list[Check]:
    """All checks that need neither torch nor a device.

    Args:
        environ: the user's variables.
        backend: name of the backend for which the machine is checked.
        root: the folder of /proc, /sys and /dev.
    """
    return [
        packages(backend=backend),
        visibility(launch, environ),
        locked_memory(node),
        open_files(),
        shared_memory(root),
        numa_balancing(root),
        interfaces(node),
        rdma_devices(node),
    ]


def packages(distribution: str = "anygauge", *, backend: str = "") -> Check:
    """Whether each required package is in the range that was tested.

    Args:
        backend: the extra of this name narrows ranges; packages of that extra alone may be missing.
            Extras whose names add to it (`hpu-lazy` to `hpu`) are further sets that were tested: it
            suffices that the packages are within one of them.
    """
    try:
        required = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        seen = f"{distribution} is not installed as a package: its requirements are not known"
        return Check(name="packages", outcome=Outcome.SKIP, seen=seen, remedy="pip install .")
    extras = importlib.metadata.metadata(distribution).get_all("Provides-Extra") or []
    others = [extra for extra in extras if backend and extra.startswith(f"{backend}-")]
    first = _held_against(required, distribution, backend, backend)
    for check in (first, *(_held_against(required, distribution, backend, o) for o in others)):
        if check.outcome == Outcome.PASS:
            return check
    return first


def _held_against(required: list[str], distribution: str, backend: str, extra: str) -> Check:
    """The packages held against what is required always, and by one extra of a backend."""
    troubles, fine, wanted = [], [], distribution
    for requirement in map(Requirement, required):
        marker = requirement.marker
        always = marker is None or marker.evaluate({"extra": ""})
        if not always and not (extra and marker and marker.evaluate({"extra": extra})):
            continue
        version = installed_version(requirement.name)
        if version is None:
            if always:
                troubles.append(f"{requirement.name} is missing ({requirement.specifier})")
            continue
        if requirement.specifier.contains(version, prereleases=True):
            fine.append(f"{requirement.name} {version}")
        else:
            whose = ""
            if not always:
                whose = f" for the {backend} backend (docs/stacks.md)"
                wanted = f"'{distribution}[{extra}]'"
            troubles.append(
                f"{requirement.name} {version}, tested with {requirement.specifier}{whose}"
            )
    if troubles:
        remedy = f"pip install --upgrade {wanted}, or install versions within these ranges"
        return _fail("packages", "; ".join(troubles), remedy)
    shown = ", ".join(fine[:4]) + (f" and {len(fine) - 4} more" if len(fine) > 4 else "")
    return _pass("packages", shown)


def visibility(launch: LaunchProfile, environ: Mapping[str, str]) -> Check:
    """Whether the variable that hides devices from a process leaves any visible."""
    name, variable = "visible devices", launch.visibility_variable
    if variable is None:
        return _pass(name, "this backend has no variable that hides devices")
    value = environ.get(variable)
    if value is None:
        return _pass(name, f"{variable} is unset: all")
    if not value.strip():
        return _fail(name, f"{variable} is set to nothing: no device is visible", "unset it")
    return _pass(name, f"{variable}={value}")


def locked_memory(node: Node) -> Check:
    """Whether enough memory can be locked for RDMA devices, which read it on their own."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    name, unlimited = "locked memory", soft == resource.RLIM_INFINITY
    seen = "unlimited" if unlimited else f"{soft // 1024} KiB"
    if unlimited:
        return _pass(name, seen)
    if not node.rdma_devices:
        return _pass(name, f"{seen}; this machine has no RDMA device that needs more")
    return _warn(
        name,
        seen,
        "ulimit -l unlimited; in a container --ulimit memlock=-1; under Slurm "
        "PropagateResourceLimitsExcept=MEMLOCK",
    )


def open_files() -> Check:
    """Whether a process may open enough files: sockets, shards and data files share one limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    name, seen = "open files", "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES:
        return _pass(name, seen)
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    return _warn(name, seen, f"ulimit -n {OPEN_FILES} (up to {most} is allowed here)")


def shared_memory(root: Path = Path("/")) -> Check:
    """Whether /dev/shm is large enough: processes of a machine exchange data through it."""
    path = root / "dev/shm"
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return _warn("shared memory", f"{path}: {error.strerror}", "mount a tmpfs at /dev/shm")
    seen = f"/dev/shm has {usage.total // MIB} MiB, {usage.free // MIB} free"
    if usage.total >= SHARED_MEMORY:
        return _pass("shared memory", seen)
    return _warn(
        "shared memory",
        seen,
        "give the container the host's (--ipc=host) or more (--shm-size=8g)",
    )


def numa_balancing(root: Path = Path("/")) -> Check:
    """Whether the kernel moves pages between memory nodes while devices read them."""
    name = "NUMA balancing"
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    text = file_text(root / "proc/sys/kernel/numa_balancing")
    if len(nodes) < 2:
        return _pass(name, "one memory node")
    if text in ("", "0"):
        return _pass(
            name, f"{len(nodes)} memory nodes; " + ("off" if text else "not in this kernel")
        )
    return _warn(
        name,
        f"{len(nodes)} memory nodes; on",
        "sysctl kernel.numa_balancing=0 (as root): pages that move stall transfers",
    )


def interfaces(node: Node) -> Check:
    """Which networks lead to other machines."""
    name, up = "network interfaces", [i.name for i in node.outward]
    if not up:
        return _pass(name, "only the loopback: runs on this machine only")
    if node.main_interface is None:
        return _warn(
            name,
            f"{', '.join(up)} are up, none of them physical",
            "for several machines, name one in the run file's environment (see anygauge env)",
        )
    return _pass(
        name, f"{', '.join(up)} up; {node.main_interface.name} is used for several machines"
    )


def rdma_devices(node: Node) -> Check:
    """Which RDMA devices there are."""
    if not node.rdma_devices:
        return _pass("RDMA devices", "none: several machines would communicate through sockets")
    seen = ", ".join(f"{d.name} ({d.driver}, {d.link_layer})" for d in node.rdma_devices)
    return _pass("RDMA devices", seen)


def write_speed(folder: Path, size: int = WRITTEN) -> Check:
    """How fast a file of `size` bytes reaches the disk of a folder. The file is removed."""
    name, path = "output folder", folder / f".anygauge-doctor-{os.getpid()}"
    block = os.urandom(MIB)
    try:
        began = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(size // MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        rate = size / (time.perf_counter() - began)
    except OSError as error:
        return _fail(
            name, f"{folder}: {error.strerror}", "choose a folder that can be written (--output)"
        )
    finally:
        path.unlink(missing_ok=True)
    seen = f"{folder}: {rate / MIB:.0f} MiB/s, synchronised"
    if rate >= SLOW_WRITES:
        return _pass(name, seen)
    return _warn(name, seen, "checkpoints will slow the run down: choose a faster disk")


def hub_access(endpoint: str = "https://huggingface.co", timeout_s: float = 10.0) -> Check:
    """Whether the model hub answers, and whether a login to it is stored."""
    import huggingface_hub

    name = "model hub"
    try:
        user = huggingface_hub.get_token()
        huggingface_hub.HfApi(endpoint=endpoint).model_info("gpt2", timeout=timeout_s, token=False)
    except Exception as error:
        return _fail(
            name,
            f"{endpoint} gave {type(error).__name__}: {str(error).splitlines()[0]}",
            "check the network and proxies; models in local folders need no hub (HF_HUB_OFFLINE=1)",
        )
    return _pass(name, f"{endpoint} answers; " + ("logged in" if user else "not logged in"))


def worst(checks: Sequence[Check]) -> str:
    """The worst outcome among the checks."""
    order = (Outcome.PASS, Outcome.SKIP, Outcome.WARN, Outcome.FAIL)
    return max((check.outcome for check in checks), key=order.index, default=Outcome.PASS)


def round_trip(
    backend: str, options: Mapping[str, Any], ranks: int, timeout_s: float = 180.0
) -> Check:
    """Start ranks on this machine that sum tensors of several sizes, and time them.

    Args:
        timeout_s: seconds for the whole check.
    """
    remedy = f"anygauge env --backend {backend} --devices {ranks} shows the ranks' variables"
    try:
        result = local_job.run(MODULE, "doctor", backend, options, ranks, timeout_s)
    except local_job.LocalJobError as error:
        return _fail(ROUND_TRIP, str(error), remedy)
    lines = [
        f"{_size(one['bytes'])} in {one['seconds'] * 1e3:.2f} ms ({one['bytes_per_s'] / MIB:,.0f} "
        "MiB/s)"
        for one in result["sizes"]
    ]
    seen = f"{ranks} ranks, {result['library']}: " + ", ".join(lines)
    if result["wrong"]:
        return _fail(ROUND_TRIP, f"{seen}; sums of {_size(result['wrong'][0])} are wrong", remedy)
    return _pass(ROUND_TRIP, seen)


def _size(count: int) -> str:
    return f"{count // MIB} MiB" if count >= MIB else f"{count // 1024} KiB"


def run_rank(job: Job, rank: int, world_size: int, local_rank: int) -> dict[str, Any]:
    """One rank of `round_trip`.

    Returns:
        ``library``; ``sizes``: bytes, median seconds, and bytes per second that left this rank, as
        a ring of n ranks sends them (2 (n-1)/n of the tensor); ``wrong``: sizes with wrong sums.
    """
    import torch

    with local_job.opened(job, rank, world_size, local_rank) as backend:
        device = backend.placement.device
        wanted = float(sum(range(1, world_size + 1)))
        sizes, wrong = [], []
        for size in ROUND_TRIP_SIZES:
            seconds = []
            for _ in range(ROUND_TRIP_REPEATS):
                tensor = torch.full((size // 4,), float(rank + 1), device=device)
                backend.placement.synchronize()
                backend.collectives.barrier()
                began = time.perf_counter()
                backend.collectives.all_reduce(tensor)
                backend.placement.synchronize()
                seconds.append(time.perf_counter() - began)
                if not bool((tensor == wanted).all()):
                    wrong.append(size)
            median = sorted(seconds)[ROUND_TRIP_REPEATS // 2]
            moved = 2 * (world_size - 1) / world_size * size
            sizes.append({"bytes": size, "seconds": median, "bytes_per_s": moved / median})
        found = backend.collectives.gather_objects(wrong)
        return {
            "library": backend.collectives.backend_name(device),
            "sizes": sizes,
            "wrong": sorted({size for each in found for size in each}),
        }


def _pass(name: str, seen: str) -> Check:
    return Check(name=name, outcome=Outcome.PASS, seen=seen)


def _warn(name: str, seen: str, remedy: str) -> Check:
    return Check(name=name, outcome=Outcome.WARN, seen=seen, remedy=remedy)


def _fail(name: str, seen: str, remedy: str) -> Check:
    return Check(name=name, outcome=Outcome.FAIL, seen=seen, remedy=remedy)


if __name__ == "__main__":
    sys.exit(local_job.main(MODULE, run_rank, sys.argv[1:]))
