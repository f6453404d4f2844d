"""All checks of the kit in one table; importing it imports torch."""

from __future__ import annotations

from anygauge.testing import basic, device, ranks
from anygauge.testing.check import CHECKS

__all__ = ["CHECKS", "basic", "device", "ranks"]
