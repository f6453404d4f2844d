"""The auxiliary loss of a mixture of experts: how unevenly its routers use the experts.

transformers has the formula, and says which modules' outputs it takes. It is added for each
micro-batch, weighted with the loss tokens there, so that a step's loss is the mean over
tokens of both, whoever computed which micro-batch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from anygauge.interface import UnsupportedError
from anygauge.kernels.loss import IGNORE, base_of, replace_forward

FORMULA = "load_balancing_loss_func"
FIELD = "train.router_aux_loss_coef"


class Routers:
    """What the routers of a model give out while it runs forward once.

    Raises:
        UnsupportedError: the architecture has no auxiliary loss.
    """

    def __init__(self, model: Any) -> None:
        causal = base_of(model)
        name = type(causal).__name__
        formula: Callable[..., Tensor] | None = vars(sys.modules[type(causal).__module__]).get(
            FORMULA
        )
        source = _recorded(causal)
        experts = getattr(causal, "num_experts", None)
        chosen = getattr(causal, "num_experts_per_tok", None)
        if formula is None or source is None or experts is None or chosen is None:
            raise UnsupportedError(
                f"{FIELD}: {name} models have no auxiliary loss in the installed transformers; "
                "leave it out"
            )
        self._formula, self._experts, self._chosen = formula, experts, chosen
        self._given: list[Tensor] | None = None
        kind, index = source
        routers = [module for module in causal.modules() if isinstance(module, kind)]

        def keep(_: nn.Module, __: Any, output: Any) -> None:
            # Recomputed layers run again in backward: then nobody listens.
            if self._given is not None:
                self._given.append(output[index] if isinstance(output, tuple) else output)

        for router in routers:
            router.register_forward_hook(keep)

    @contextlib.contextmanager
    def heard(self) -> Iterator[list[Tensor]]:
        """Keep what routers give out in the meantime, layer by layer."""
        self._given = []
        try:
            yield self._given
        finally:
            self._given = None

    def loss(self, given: list[Tensor], tokens: Tensor) -> Tensor:
        """The auxiliary loss, () float32.

        Args:
            given: by `heard`.
            tokens: (B, T), 1 where there is a token.
        """
        return self._formula(tuple(given), self._experts, self._chosen, tokens).float()


def _recorded(causal: Any) -> tuple[type[nn.Module], int] | None:
    """The kind of module that gives router logits, and their place in its output."""
    for module in causal.modules():
        recorder = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        if recorder is not None:
            kind = getattr(recorder, "target_class", recorder)
            return kind, getattr(recorder, "index", 0)
    return None


def add_router_loss(model: Any, coefficient: float) -> None:
    """Let a model that returns its loss add the auxiliary one, while it trains.

    Call it after `return_loss`. The model's forward takes ``tokens`` (B, T) with ``shift_labels``.
    """
    causal = base_of(model)
    routers = Routers(model)
    usual = vars(causal)["forward"].__func__

    def forward(
        self: Any,
        *args: Any,
        tokens: Tensor | None = None,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if shift_labels is None or not self.training:
            return usual(self, *args, shift_labels=shift_labels, **kwargs)
        assert tokens is not None
        with routers.heard() as given:
            outputs = usual(self, *args, shift_labels=shift_labels, **kwargs)
        loss_tokens = (shift_labels != IGNORE).sum()
        outputs.loss = outputs.loss + coefficient * loss_tokens * routers.loss(given, tokens)
        return outputs

    replace_forward(causal, forward)
