"""What ``anygauge doctor`` checks on any machine: packages, limits, networks, a collective.

Files and limits are read. Nothing is changed, except that a file is written to the output folder to
measure its speed, and removed.
"""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from anygauge.interface import (
    AnygaugeError,
    Backend,
    Check,
    LaunchProfile,
    Node,
    Outcome,
    file_text,
    installed_version,
)
from anygauge.launch.foreign import without_launcher
from anygauge.launch.rank_environment import inspect_node
from anygauge.launch.round_trip import round_trip
from anygauge.util.text import first_line

MIB = 2**20
SHARED_MEMORY = 2**30
"""Containers get 64 MiB by default, too little for collectives and data workers."""
OPEN_FILES = 4096
WRITE_BYTES = 128 * MIB
SLOW_WRITES = 50 * MIB
"""Bytes per second: a checkpoint of a gigabyte then takes over twenty seconds."""


def run_checks(backend: Backend, output: Path, *, hub: bool, ranks: int | None) -> list[Check]:
    """The backend's own checks, then those of any machine.

    Args:
        output: the folder whose speed is measured, absolute.
        hub: whether to ask the model hub, too.
        ranks: of a `round_trip`; None: none is made.
    """
    environ = without_launcher(os.environ)
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
    found = [_check_ranges(required, distribution, backend, extra) for extra in (backend, *others)]
    return next((check for check in found if check.outcome == Outcome.PASS), found[0])


def _check_ranges(required: list[str], distribution: str, backend: str, extra: str) -> Check:
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
    hidden = variable is not None and value is not None and not value.strip()
    return Check.of("visible devices", not hidden, seen, "unset it")


def locked_memory(node: Node) -> Check:
    """Whether enough memory can be locked for RDMA devices, which read it on their own."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("locked memory", Outcome.PASS, "unlimited")
    enough = not node.rdma_devices
    none = "; this machine has no RDMA device that needs more" if enough else ""
    return _pass_or_warn(
        *("locked memory", enough, f"{soft // 1024} KiB{none}"),
        "ulimit -l unlimited; in a container --ulimit memlock=-1; under Slurm "
        "PropagateResourceLimitsExcept=MEMLOCK",
    )


def open_files() -> Check:
    """Whether a process may open enough files: sockets, shards and data files share one limit."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    soft, hard = ("unlimited" if limit == unlimited else str(limit) for limit in limits)
    remedy = f"ulimit -n {OPEN_FILES} (up to {hard} is allowed here)"
    return _pass_or_warn("open files", soft == "unlimited" or int(soft) >= OPEN_FILES, soft, remedy)


def shared_memory(root: Path = Path("/")) -> Check:
    """Whether /dev/shm is large enough: processes of a machine exchange data through it."""
    path = root / "dev/shm"
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        seen = f"{path}: {error.strerror}"
        return Check("shared memory", Outcome.WARN, seen, "mount a tmpfs at /dev/shm")
    seen = f"/dev/shm has {usage.total // MIB} MiB, {usage.free // MIB} free"
    remedy = "give the container the host's (--ipc=host) or more (--shm-size=8g)"
    return _pass_or_warn("shared memory", usage.total >= SHARED_MEMORY, seen, remedy)


def numa_balancing(root: Path = Path("/")) -> Check:
    """Whether the kernel moves pages between memory nodes while devices read them."""
    count = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    state = {"": "not in this kernel", "0": "off"}.get(
        file_text(root / "proc/sys/kernel/numa_balancing"), "on"
    )
    seen = "one memory node" if count < 2 else f"{count} memory nodes; {state}"
    remedy = "sysctl kernel.numa_balancing=0 (as root): pages that move stall transfers"
    return _pass_or_warn("NUMA balancing", count < 2 or state != "on", seen, remedy)


def interfaces(node: Node) -> Check:
    """Which networks lead to other machines."""
    up, main = ", ".join(one.name for one in node.external_interfaces), node.main_interface
    if not up:
        seen = "only the loopback: runs on this machine only"
    elif main is None:
        seen = f"{up} are up, none of them physical"
    else:
        seen = f"{up} up; {main.name} is used for several machines"
    remedy = "for several machines, name one in the run file's environment (see anygauge env)"
    return _pass_or_warn("network interfaces", not up or main is not None, seen, remedy)


def rdma_devices(node: Node) -> Check:
    """Which RDMA devices there are."""
    seen = ", ".join(f"{d.name} ({d.driver}, {d.link_layer})" for d in node.rdma_devices)
    none = "none: several machines would communicate through sockets"
    return Check("RDMA devices", Outcome.PASS, seen or none)


def write_speed(folder: Path, size: int = WRITE_BYTES) -> Check:
    """How fast a file of `size` bytes reaches the disk of a folder. The file is removed."""
    path = folder / f".anygauge-doctor-{os.getpid()}"
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
        return Check("output folder", Outcome.FAIL, f"{folder}: {error.strerror}", remedy)
    finally:
        path.unlink(missing_ok=True)
    seen = f"{folder}: {rate / MIB:.0f} MiB/s, synchronized"
    remedy = "checkpoints will slow the run down: choose a faster disk"
    return _pass_or_warn("output folder", rate >= SLOW_WRITES, seen, remedy)


def _pass_or_warn(name: str, fine: bool, seen: str, remedy: str) -> Check:
    """One that passes, or warns of what a run can live with."""
    return Check.of(name, fine, seen, remedy, Outcome.WARN)


def hub_access(endpoint: str = "https://huggingface.co", timeout_s: float = 10.0) -> Check:
    """Whether the model hub answers, and whether a login to it is stored."""
    import huggingface_hub

    try:
        user = huggingface_hub.get_token()
        huggingface_hub.HfApi(endpoint=endpoint).model_info("gpt2", timeout=timeout_s, token=False)
    except Exception as error:
        seen = f"{endpoint} gave {type(error).__name__}: {first_line(error)}"
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
