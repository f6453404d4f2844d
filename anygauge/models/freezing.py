"""Which of a model's own weights are trained: expressions over the names of its parameters."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anygauge.config.schema import TrainSection
from anygauge.interface import ModelError
from anygauge.models.targets import matched_names

if TYPE_CHECKING:
    from torch import nn

_NEAR = 3


@dataclass(frozen=True, slots=True)
class Freezing:
    """What a run says of it.

    Args:
        trainable: only what one of these matches is trained; empty: everything is.
        frozen: what one of these matches is not.
    """

    trainable: tuple[str, ...]
    frozen: tuple[str, ...]
    _matched: dict[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, section: TrainSection) -> Freezing | None:
        """None where all weights are trained."""
        if not section.trainable and not section.frozen:
            return None
        return cls(tuple(section.trainable), tuple(section.frozen))

    def apply(self, model: nn.Module) -> None:
        """Leave gradients to what is trained; a tied parameter goes by each of its names.

        Raises:
            ModelError: an expression matches no parameter, or nothing is left to train.
        """
        named = dict(model.named_parameters(remove_duplicate=False))
        trained = self._identities(named, self.trainable, "train.trainable")
        frozen = self._identities(named, self.frozen, "train.frozen")
        for parameter in named.values():
            here = id(parameter)
            parameter.requires_grad_(
                (here in trained or not self.trainable)
                and here not in frozen
                and parameter.is_floating_point()
            )
        if not any(parameter.requires_grad for parameter in named.values()):
            raise ModelError(
                "train.trainable and train.frozen leave nothing to train: train.frozen matches all "
                "weights that would be trained"
            )

    def _identities(
        self, named: Mapping[str, nn.Parameter], expressions: Sequence[str], where: str
    ) -> set[int]:
        found: set[str] = set()
        for index, text in enumerate(expressions):
            if text not in self._matched:
                self._matched[text] = _matching(text, list(named), f"{where}[{index}]")
            found |= self._matched[text]
        return {id(named[name]) for name in found}


def _matching(text: str, names: list[str], where: str) -> frozenset[str]:
    found = matched_names(text, names)
    if not found:
        near = difflib.get_close_matches(text, names, _NEAR, 0.3) or names[:_NEAR]
        raise ModelError(
            f"{where}: the expression {text!r} matches no parameter; it must match a whole name, "
            f"such as {', '.join(near)}"
        )
    return frozenset(found)
