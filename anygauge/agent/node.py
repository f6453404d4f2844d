"""What one machine shows of itself, read from /proc and /sys: cores, memory, network, libraries.

Backends decide their environment from the `Node` that is filled here and from nothing else.
Nothing is opened, changed or imported: this runs before torch is loaded.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from anygauge.interface import Backend, NetworkInterface, Node, RdmaDevice

LIBRARIES = ("torch",)
"""Installed distributions whose version any backend's setting may depend on; a backend names what
else it reads (`Backend.libraries`)."""

_ETHERNET = 1  # ARPHRD_ETHER, <linux/if_arp.h>
_LOOPBACK = 772  # ARPHRD_LOOPBACK
_UP = 0x1  # IFF_UP, <linux/if.h>


def inspect_node(
    rank: int = 0,
    root: Path = Path("/"),
    *,
    backend: Backend | None = None,
    environ: Mapping[str, str] | None = None,
) -> Node:
    """Look at this machine; whatever it does not show keeps `Node`'s modest default.

    Args:
        rank: which machine of the job this is, from 0.
        root: where /proc and /sys are found.
        backend: whose libraries and variables are looked at, too.
        environ: the user's variables; None: this process's.
    """
    environ = os.environ if environ is None else environ
    order = _ordered_cores(root)
    return Node(
        rank=rank,
        hostname=_text(root / "proc/sys/kernel/hostname") or "localhost",
        cores=tuple(core for _, core in order) or (0,),
        physical_cores=len({place for place, _ in order}) or 1,
        memory_bytes=_memory_bytes(root),
        interfaces=_interfaces(root),
        rdma_devices=_rdma_devices(root),
        libraries=_libraries((*LIBRARIES, *(backend.libraries if backend else ()))),
        variables={
            name: environ[name]
            for name in (backend.variables if backend else ())
            if name in environ
        },
        files=_files(root, backend.files if backend else ()),
    )


def parse_core_list(text: str) -> tuple[int, ...]:
    """The kernel's list format: ``"0-2,5"`` is ``(0, 1, 2, 5)``."""
    cores: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores.extend(range(int(first), int(last or first) + 1))
    return tuple(cores)


def _ordered_cores(root: Path) -> list[tuple[tuple[int, ...], int]]:
    """(place of the physical core, logical processor), sorted; only those we may run on."""
    allowed = _field(root / "proc/self/status", "Cpus_allowed_list")
    found = []
    for core in parse_core_list(allowed):
        topology = root / f"sys/devices/system/cpu/cpu{core}/topology"
        package, die, number = (
            _number(topology / name) for name in ("physical_package_id", "die_id", "core_id")
        )
        # Some virtual machines hide the topology: each processor then counts as a core of its own.
        place = (package or 0, die or 0, number) if number is not None else (0, 0, core)
        found.append((place, core))
    return sorted(found)


def _memory_bytes(root: Path) -> int:
    words = _field(root / "proc/meminfo", "MemTotal").split()
    return int(words[0]) * 1024 if words else 0


def _interfaces(root: Path) -> tuple[NetworkInterface, ...]:
    found = []
    for folder in _folders(root / "sys/class/net"):
        kind = _number(folder / "type")
        flags = _number(folder / "flags") or 0
        # "unknown" is what drivers say that do not report a state, the loopback among them.
        state = _text(folder / "operstate")
        interface = NetworkInterface(
            name=folder.name,
            up=bool(flags & _UP) and state in ("up", "unknown", ""),
            physical=(folder / "device").exists(),
            loopback=kind == _LOOPBACK,
        )
        order = (kind != _ETHERNET, _number(folder / "ifindex") or 0, folder.name)
        found.append((order, interface))
    return tuple(interface for _, interface in sorted(found, key=lambda pair: pair[0]))


def _rdma_devices(root: Path) -> tuple[RdmaDevice, ...]:
    found = []
    for folder in _folders(root / "sys/class/infiniband"):
        driver = folder / "device/driver"
        found.append(
            RdmaDevice(
                name=folder.name,
                driver=driver.resolve().name if driver.exists() else "unknown",
                link_layer=_text(folder / "ports/1/link_layer") or "unknown",
            )
        )
    return tuple(found)


def _libraries(names: Iterable[str]) -> dict[str, str]:
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _files(root: Path, names: Iterable[str]) -> dict[str, str]:
    """Those that exist; a bare name is a shared library, looked for where the linker would."""
    linked = [
        Path(sys.prefix) / "lib",
        *sorted((root / "usr/lib").glob("*-linux-gnu*")),
        *(root / name for name in ("usr/local/lib", "usr/lib64", "usr/lib", "lib64", "lib")),
    ]
    found = {}
    for name in names:
        absolute = name.startswith("/")
        folders = [root] if absolute else linked
        path = next(
            (f / name.lstrip("/") for f in folders if (f / name.lstrip("/")).is_file()), None
        )
        if path is not None:
            found[name] = name if absolute else str(path)
    return found


def _folders(parent: Path) -> Iterable[Path]:
    return sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else ()


def _text(path: Path) -> str:
    """A file's text, or nothing: a driver may refuse to be read (EINVAL while a link is down)."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    try:
        return int(text, 0)
    except ValueError:
        return None


def _field(path: Path, name: str) -> str:
    """The value after ``name:`` in a file of such lines."""
    for line in _text(path).splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return value.strip()
    return ""
