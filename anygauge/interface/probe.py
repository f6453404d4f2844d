"""What a backend finds on a machine, and how it announces itself.

A probe asks three separate questions. It is cheap and pure: it looks at device files, version files
and `importlib.util.find_spec`, imports nothing heavy and changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

__all__ = [
    "API_VERSION",
    "BackendSpec",
    "Check",
    "Finding",
    "Outcome",
    "Probe",
    "count_of",
    "file_text",
    "file_texts",
    "installed_version",
    "major_minor",
    "pci_devices",
]


def file_text(path: Path) -> str:
    """A file's text without spaces around it, or "" where it cannot be read: a driver may refuse
    (EINVAL while a link is down)."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def file_texts(patterns: Iterable[str], root: Path = Path("/")) -> dict[str, str]:
    """Path -> text of the files that fit absolute patterns below `root`; no device is opened: ""
    for one that is no regular file."""
    return {
        f"/{path.relative_to(root)}": file_text(path) if path.is_file() else ""
        for pattern in patterns
        for path in sorted(root.glob(pattern.lstrip("/")))
    }


def installed_version(distribution: str) -> str | None:
    """The version of a package on this machine; None without it."""
    from importlib import metadata  # takes longer than all that is here

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def major_minor(version: str | None) -> tuple[int, int] | None:
    """``2.9.0+cu128`` is (2, 9); None for what is not a version."""
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(match[1]), int(match[2])) if match else None


def pci_devices(root: Path, vendor: str, kind: str = "") -> list[str]:
    """Addresses of a vendor's devices on the PCI bus.

    Args:
        root: where /sys is found.
        vendor: the vendor's PCI id, such as ``0x1da3``.
        kind: what the PCI class begins with, such as ``0x03`` for displays.
    """
    return sorted(
        path.name
        for path in (root / "sys/bus/pci/devices").glob("*")
        if file_text(path / "vendor") == vendor and file_text(path / "class").startswith(kind)
    )


def count_of(devices: Sequence[str], what: str) -> str:
    """``2 GPUs``, or ``1 GPU``."""
    return f"{len(devices)} {what}{'' if len(devices) == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One question's answer; true unless it is "no".

    Attributes:
        detail: what was seen or missed, in words.
        looked_at: the paths, modules or files that were examined.
    """

    presence: Literal["yes", "no", "not needed"]
    detail: str
    looked_at: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.presence != "no"

    @classmethod
    def yes(cls, detail: str, *looked_at: str) -> Finding:
        """Return a finding that it is there."""
        return cls("yes", detail, looked_at)

    @classmethod
    def no(cls, detail: str, *looked_at: str) -> Finding:
        """Return a finding that it is not there."""
        return cls("no", detail, looked_at)

    @classmethod
    def not_needed(cls, detail: str = "nothing to look for") -> Finding:
        """The backend has no use for it."""
        return cls("not needed", detail)


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What one backend found.

    Attributes:
        devices: are there devices of this vendor (not merely a device file of that name)?
        driver: is the kernel driver loaded?
        software: is the software that drives it installed?
        device_count: how many devices, or None where that cannot be known without opening them.
        cards: their names as the driver has them, by which descriptions of hardware are found; a
            name stands once. Empty where it does not tell.
    """

    devices: Finding
    driver: Finding
    software: Finding
    device_count: int | None = None
    notes: tuple[str, ...] = field(default=())
    cards: tuple[str, ...] = ()

    @property
    def questions(self) -> tuple[tuple[str, Finding], ...]:
        """The three questions by name, in the order in which they are asked."""
        return (("device", self.devices), ("driver", self.driver), ("software", self.software))

    @property
    def available(self) -> bool:
        """True if all three questions are answered yes, or need no answer."""
        return all(finding for _, finding in self.questions)

    @property
    def has_hardware(self) -> bool:
        """True if the vendor's devices were really seen (whatever the driver and software say)."""
        return self.devices.presence == "yes"

    @property
    def reason(self) -> str:
        """One line: why it is available, or everything that is missing."""
        missing = [f"{title}: {f.detail}" for title, f in self.questions if not f]
        if missing:
            return "; ".join(missing)
        found = [f.detail for _, f in self.questions if f.presence == "yes"]
        return "; ".join(found) or "always there"


API_VERSION = 1
"""Version of this contract: one more with each change that a plugin has to follow. A plugin
written for another is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSpec:
    """How a backend announces itself; making one imports nothing heavy.

    Attributes:
        name: what users write after ``--backend``.
        factory: ``"package.module:Class"``, imported only when the backend is selected.
        probe: cheap and pure; imports no torch.
        api_version: the contract's version that it was written for.
        priority: orders ``--backend auto``; higher is tried first, 0 and below are never
            chosen while another vendor's devices are present.
        drives: the devices in a few words, for lists: ``processors of this machine``.
        hardware: descriptions of its cards, ``"package:file.toml"``; "" where it brings none. The
            package is that of the plugin or lies within it.
        this_machine: figure of its cards -> number, where a description leaves it to the machine
            at hand. Called when such a card is looked up; cheap and pure; imports no torch.
        options: ``"package.module:Class"``: derives from `Options`; what the run file may say in
            ``backend_options``. Empty: nothing.
    """

    name: str
    factory: str
    probe: Callable[[], Probe]
    api_version: int
    priority: int = 0
    drives: str = ""
    hardware: str = ""
    this_machine: Callable[[], Mapping[str, float]] = dict
    options: str = ""


class Outcome:
    """Results of a diagnostic check; ``SKIP``: it could not be made, which is not a result."""

    PASS = "pass"
    SKIP = "skip"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of ``doctor``: what was seen, and what to do about it."""

    name: str
    outcome: str
    seen: str
    remedy: str = ""

    @classmethod
    def of(
        cls, name: str, passed: bool, seen: str, remedy: str, otherwise: str = Outcome.FAIL
    ) -> Check:
        """One that passed, or else failed (or what `otherwise` says) and has a remedy."""
        return cls(name, Outcome.PASS, seen) if passed else cls(name, otherwise, seen, remedy)

    @classmethod
    def warn(cls, name: str, seen: str, remedy: str) -> Check:
        """Return a check that found what may be meant and may be wrong."""
        return cls(name, Outcome.WARN, seen, remedy)

    @classmethod
    def skip(cls, name: str, seen: str) -> Check:
        """Return a check that could not be made because of what others found."""
        return cls(name, Outcome.SKIP, seen, "solve the checks above first")
