"""Dynamic scaling of the loss for float16, the same on every rank.

torch's scaler looks at the gradients that a rank has. Where a rank has a part of them alone, ranks
would decide on its own; so this one gets whether the norm over all of them was finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from anygauge.interface import Counters

FIRST = 2.0**16
INTERVAL = 2000
"""Updates without an overflow after which the scale doubles; these two are torch's defaults."""


@dataclass(slots=True)
class LossScale:
    """The scale, and how long it has held.

    Attributes:
        enabled: False: the scale is 1 for good.
    """

    enabled: bool
    value: float = FIRST
    good_steps: int = 0

    @property
    def factor(self) -> float:
        """What the loss is multiplied with before backward."""
        return self.value if self.enabled else 1.0

    def skips(self, norm: float) -> bool:
        """Whether the update must be left out; `norm` is that of all gradients."""
        if not self.enabled:
            return False
        if not math.isfinite(norm):
            self.value, self.good_steps = self.value / 2, 0
            return True
        self.good_steps += 1
        if self.good_steps == INTERVAL:
            self.value, self.good_steps = self.value * 2, 0
        return False

    def counters(self, updates: int) -> Counters:
        """With the optimizer's updates."""
        if not self.enabled:
            return Counters(updates=updates)
        return Counters(updates=updates, loss_scale=self.value, good_steps=self.good_steps)

    def load(self, counters: Counters) -> None:
        """Go on from counters of a run that scaled its loss; of another one, from the start."""
        if self.enabled and counters.loss_scale is not None:
            self.value, self.good_steps = counters.loss_scale, counters.good_steps
