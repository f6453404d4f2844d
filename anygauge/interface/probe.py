"""What a backend finds on this machine, as three separate questions.

A probe is cheap and pure: it looks at device files, version files and `importlib.util.find_spec`,
imports nothing heavy and changes nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Presence(enum.Enum):
    """The answer to one question. ``NOT_NEEDED``: this backend has nothing to find there."""

    YES = "yes"
    NO = "no"
    NOT_NEEDED = "not needed"

    def __bool__(self) -> bool:
        return self is not Presence.NO


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One question's answer.

    Attributes:
        presence: whether it is there.
        detail: what was seen or missed, in words.
        looked_at: the paths, modules or files that were examined.
    """

    presence: Presence
    detail: str
    looked_at: tuple[str, ...] = ()

    @classmethod
    def yes(cls, detail: str, *looked_at: str) -> Finding:
        """It is there."""
        return cls(presence=Presence.YES, detail=detail, looked_at=looked_at)

    @classmethod
    def no(cls, detail: str, *looked_at: str) -> Finding:
        """It is not there."""
        return cls(presence=Presence.NO, detail=detail, looked_at=looked_at)

    @classmethod
    def not_needed(cls, detail: str = "nothing to look for") -> Finding:
        """The backend has no use for it."""
        return cls(presence=Presence.NOT_NEEDED, detail=detail)


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What one backend found.

    Attributes:
        devices: are there devices of this vendor (not merely a device file of that name)?
        driver: is the kernel driver loaded?
        software: is the software that drives it installed?
        device_count: how many devices, or None where that cannot be known without opening them.
    """

    devices: Finding
    driver: Finding
    software: Finding
    device_count: int | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def available(self) -> bool:
        """True if all three questions are answered yes, or need no answer."""
        return bool(self.devices.presence and self.driver.presence and self.software.presence)

    @property
    def has_hardware(self) -> bool:
        """True if the vendor's devices were really seen (whatever the driver and software say)."""
        return self.devices.presence is Presence.YES

    @property
    def reason(self) -> str:
        """One line: why it is available, or everything that is missing."""
        parts = [
            (title, finding)
            for title, finding in (
                ("device", self.devices),
                ("driver", self.driver),
                ("software", self.software),
            )
        ]
        missing = [f"{title}: {f.detail}" for title, f in parts if not f.presence]
        if missing:
            return "; ".join(missing)
        return "; ".join(f.detail for _, f in parts if f.presence is Presence.YES) or "always there"
