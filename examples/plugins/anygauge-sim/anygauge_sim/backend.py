"""The backend object: what differs from the defaults of a device that torch knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from anygauge.interface import (
    FULL,
    Backend,
    LaunchProfile,
    Level,
    NotAvailableError,
    Placement,
    Support,
)

if TYPE_CHECKING:
    import torch


class SimPlacement(Placement):
    """One simulated card for one process."""

    def open(self, local_rank: int) -> torch.device:
        """Load the device into torch, then take the card.

        Raises:
            NotAvailableError: the compiled part does not fit the torch that is installed, a setting
                is wrong, there are too few cards, or another process holds this one.
        """
        try:
            import torch  # noqa: F401  (the compiled part links to it)

            from anygauge_sim import _C
            from anygauge_sim.device import load

            load(self.device_type)
            device = super().open(local_rank)
            _C.claim(local_rank)
        except (ImportError, RuntimeError, ValueError) as error:
            super().close()
            text = str(error).splitlines()[0]
            raise NotAvailableError(f"simulated cards: {text}") from error
        return device

    def close(self) -> None:
        """Give the card back: other processes may have it once its last tensor here is gone."""
        if self.is_open:
            from anygauge_sim import _C

            _C.give_back(self.device.index)
        super().close()


class SimBackend(Backend):
    """Simulated cards. Settings are variables: see `anygauge_sim.settings`."""

    name = "sim"
    device_type = "sim"
    placement_class = SimPlacement
    launch = LaunchProfile(visibility_variable="ANYGAUGE_SIM_VISIBLE_CARDS")
    capabilities: Mapping[str, Support] = {
        "bfloat16": FULL,
        "float16": FULL,
        "collectives": FULL,
        "fp8_products": Support(
            Level.NOT_WRITTEN_YET, "a simulated card multiplies as the host does, in the run's type"
        ),
    }
