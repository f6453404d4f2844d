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

from anygauge.interface import AnygaugeError, Backend, Check, Job, LaunchProfile, Node, Outcome
from anygauge.launch import local_job
from anygauge.launch.environment import file_text, inspect_node
from anygauge.launch.foreign import scrub
from anygauge.registry import installed_version

MODULE = "anygauge.launch.doctor"
MIB = 2**20
SHARED_MEMORY = 2**30
"""Containers get 64 MiB by default, too little for collectives and data workers."""
OPEN_FILES = 4096
WRITTEN = 128 * MIB
SLOW_WRITES = 50 * MIB
"""Bytes per second: a checkpoint of a gigabyte then takes over twenty seconds."""
ROUND_TRIP_SIZES = (1_024, 1_048_576, 67_108_864)
"""Bytes of float32 in a tensor."""
ROUND_TRIP_REPEATS = 5


def run_checks(backend: Backend, output: Path, *, hub: bool, ranks: int | None) -> list[Check]:
    """The backend's own checks, then those of any machine.

    Args:
        output: the folder whose speed is measured, absolute.
        hub: whether to ask the model hub, too.
        ranks: of a `round_trip`; None: none is made.
    """
    environ = scrub(os.environ)
    node = inspect_node(backend, environ)
    found = [
        *_own_checks(backend),
        packages(backend=backend.name),
        visibility(backend.launch, environ),
        locked_memory(node),
        open_files(),
        shared_memory(),
        numa_balancing(),
        interfaces(node),
        rdma_devices(node),
        write_speed(output),
    ]
    if hub:
        found.append(hub_access())
    return found if ranks is None else [*found, round_trip(backend.name, ranks)]


def _own_checks(backend: Backend) -> list[Check]:
    """The backend's checks; one that raises is a failed line, not the end of the others."""
    try:
        return list(backend.diagnostics())
    except AnygaugeError as error:
        seen = str(error)
    except Exception as error:
        seen = f"diagnostics() raised {type(error).__name__}: {error}"
    remedy = "report it to the authors of this backend (`anygauge backends` names the package)"
    return [Check(f"checks of {backend.name}", Outcome.FAIL, seen, remedy)]


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
        return Check("packages", Outcome.SKIP, seen, "pip install .")
    extras = importlib.metadata.metadata(distribution).get_all("Provides-Extra") or []
    others = [extra for extra in extras if backend and extra.startswith(f"{backend}-")]
    found = [_within(required, distribution, backend, extra) for extra in (backend, *others)]
    return next((check for check in found if check.outcome == Outcome.PASS), found[0])


def _within(required: list[str], distribution: str, backend: str, extra: str) -> Check:
    """The packages held against what is required always, and by one extra of a backend."""
    troubles, fine, wanted = [], [], distribution
    for requirement in map(Requirement, required):
        name, tested, marker = requirement.name, requirement.specifier, requirement.marker
        always = marker is None or marker.evaluate({"extra": ""})
        if not always and not (extra and marker and marker.evaluate({"extra": extra})):
            continue
        version = installed_version(name)
        if version is None and always:
            troubles.append(f"{name} is missing ({tested})")
        elif version is not None and tested.contains(version, prereleases=True):
            fine.append(f"{name} {version}")
        elif version is not None:
            troubles.append(f"{name} {version}, tested with {tested}")
            if not always:
                troubles[-1] += f" for the {backend} backend (docs/stacks.md)"
                wanted = f"'{distribution}[{extra}]'"
    if troubles:
        remedy = f"pip install --upgrade {wanted}, or install versions within these ranges"
        return Check("packages", Outcome.FAIL, "; ".join(troubles), remedy)
    more = f" and {len(fine) - 4} more" if len(fine) > 4 else ""
    return Check("packages", Outcome.PASS, ", ".join(fine[:4]) + more)


def visibility(launch: LaunchProfile, environ: Mapping[str, str]) -> Check:
    """Whether the variable that hides devices from a process leaves any visible."""
    variable = launch.visibility_variable
    value = environ.get(variable or "")
    if variable is None:
        seen = "this backend has no variable that hides devices"
    elif value is None:
        seen = f"{variable} is unset: all"
    elif value.strip():
        seen = f"{variable}={value}"
    else:
        seen = f"{variable} is set to nothing: no device is visible"
        return Check("visible devices", Outcome.FAIL, seen, "unset it")
    return Check("visible devices", Outcome.PASS, seen)


def locked_memory(node: Node) -> Check:
    """Whether enough memory can be locked for RDMA devices, which read it on their own."""
    name, (soft, _) = "locked memory", resource.getrlimit(resource.RLIMIT_MEMLOCK)
    seen = f"{soft // 1024} KiB"
    if soft == resource.RLIM_INFINITY:
        return Check(name, Outcome.PASS, "unlimited")
    if not node.rdma_devices:
        none = f"{seen}; this machine has no RDMA device that needs more"
        return Check(name, Outcome.PASS, none)
    remedy = (
        "ulimit -l unlimited; in a container --ulimit memlock=-1; under Slurm "
        "PropagateResourceLimitsExcept=MEMLOCK"
    )
    return Check(name, Outcome.WARN, seen, remedy)


def open_files() -> Check:
    """Whether a process may open enough files: sockets, shards and data files share one limit."""
    soft, hard = (
        "unlimited" if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    if soft == "unlimited" or int(soft) >= OPEN_FILES:
        return Check("open files", Outcome.PASS, str(soft))
    remedy = f"ulimit -n {OPEN_FILES} (up to {hard} is allowed here)"
    return Check("open files", Outcome.WARN, str(soft), remedy)


def shared_memory(root: Path = Path("/")) -> Check:
    """Whether /dev/shm is large enough: processes of a machine exchange data through it."""
    name, path = "shared memory", root / "dev/shm"
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return Check(name, Outcome.WARN, f"{path}: {error.strerror}", "mount a tmpfs at /dev/shm")
    seen = f"/dev/shm has {usage.total // MIB} MiB, {usage.free // MIB} free"
    if usage.total >= SHARED_MEMORY:
        return Check(name, Outcome.PASS, seen)
    remedy = "give the container the host's (--ipc=host) or more (--shm-size=8g)"
    return Check(name, Outcome.WARN, seen, remedy)


def numa_balancing(root: Path = Path("/")) -> Check:
    """Whether the kernel moves pages between memory nodes while devices read them."""
    name, count = "NUMA balancing", len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    text = file_text(root / "proc/sys/kernel/numa_balancing")
    if count < 2:
        return Check(name, Outcome.PASS, "one memory node")
    seen = f"{count} memory nodes; " + {"": "not in this kernel", "0": "off"}.get(text, "on")
    if text in ("", "0"):
        return Check(name, Outcome.PASS, seen)
    remedy = "sysctl kernel.numa_balancing=0 (as root): pages that move stall transfers"
    return Check(name, Outcome.WARN, seen, remedy)


def interfaces(node: Node) -> Check:
    """Which networks lead to other machines."""
    name, up, main = "network interfaces", [i.name for i in node.outward], node.main_interface
    if not up:
        return Check(name, Outcome.PASS, "only the loopback: runs on this machine only")
    if main is None:
        remedy = "for several machines, name one in the run file's environment (see anygauge env)"
        return Check(name, Outcome.WARN, f"{', '.join(up)} are up, none of them physical", remedy)
    seen = f"{', '.join(up)} up; {main.name} is used for several machines"
    return Check(name, Outcome.PASS, seen)


def rdma_devices(node: Node) -> Check:
    """Which RDMA devices there are."""
    seen = ", ".join(f"{d.name} ({d.driver}, {d.link_layer})" for d in node.rdma_devices)
    none = "none: several machines would communicate through sockets"
    return Check("RDMA devices", Outcome.PASS, seen or none)


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
        remedy = "choose a folder that can be written (--output)"
        return Check(name, Outcome.FAIL, f"{folder}: {error.strerror}", remedy)
    finally:
        path.unlink(missing_ok=True)
    seen = f"{folder}: {rate / MIB:.0f} MiB/s, synchronised"
    if rate >= SLOW_WRITES:
        return Check(name, Outcome.PASS, seen)
    remedy = "checkpoints will slow the run down: choose a faster disk"
    return Check(name, Outcome.WARN, seen, remedy)


def hub_access(endpoint: str = "https://huggingface.co", timeout_s: float = 10.0) -> Check:
    """Whether the model hub answers, and whether a login to it is stored."""
    import huggingface_hub

    try:
        user = huggingface_hub.get_token()
        huggingface_hub.HfApi(endpoint=endpoint).model_info("gpt2", timeout=timeout_s, token=False)
    except Exception as error:
        seen = f"{endpoint} gave {type(error).__name__}: {str(error).splitlines()[0]}"
        remedy = (
            "check the network and proxies; models in local folders need no hub (HF_HUB_OFFLINE=1)"
        )
        return Check("model hub", Outcome.FAIL, seen, remedy)
    login = "logged in" if user else "not logged in"
    return Check("model hub", Outcome.PASS, f"{endpoint} answers; {login}")


def worst(checks: Sequence[Check]) -> str:
    """The worst outcome among the checks."""
    order = (Outcome.PASS, Outcome.SKIP, Outcome.WARN, Outcome.FAIL)
    return max((check.outcome for check in checks), key=order.index, default=Outcome.PASS)


def round_trip(backend: str, ranks: int, timeout_s: float = 180.0) -> Check:
    """Start ranks on this machine that sum tensors of several sizes, and time them.

    Args:
        timeout_s: seconds for the whole check.
    """
    name = "collective round trip"
    remedy = f"anygauge env --backend {backend} --devices {ranks} shows the ranks' variables"
    try:
        result = local_job.run(MODULE, "doctor", backend, {}, ranks, timeout_s)
    except local_job.LocalJobError as error:
        return Check(name, Outcome.FAIL, str(error), remedy)
    seen = f"{ranks} ranks, {result['library']}: " + ", ".join(
        f"{_size(one['bytes'])} in {one['seconds'] * 1e3:.2f} ms ({one['bytes_per_s'] / MIB:,.0f} "
        "MiB/s)"
        for one in result["sizes"]
    )
    wrong = result["wrong"]
    if wrong:
        seen += f"; sums of {_size(wrong[0])} are wrong"
    return Check.of(name, not wrong, seen, remedy)


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


if __name__ == "__main__":
    sys.exit(local_job.main(run_rank, sys.argv[1:]))
