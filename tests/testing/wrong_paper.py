"""Wrong backends that checks of the kit's part `basic` find: see `tests.testing.wrong`."""

from __future__ import annotations
