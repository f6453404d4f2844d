"""The auxiliary loss of a mixture of experts: how unevenly its routers use the experts.

transformers has the formula, and says which modules' outputs it takes. It is added for each
micro-batch, weighted with the loss tokens there, so that a step's loss is the mean over
tokens of both, whoever computed which micro-batch.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from anygauge.interface import UnsupportedError
from anygauge.kernels.loss import IGNORE, base_of, replace_forward

FORMULA = "load_balancing_loss_func"


def add_router_loss(model: Any, coefficient: float) -> None:
    """Let a model that returns its loss add the auxiliary one, while it trains.

    Call it after `return_loss`. The model's forward takes ``tokens`` (B, T), 1 where there is a
    token, with ``shift_labels``.

    Raises:
        UnsupportedError: the architecture has no auxiliary loss.
    """
    causal = base_of(model)
    formula = vars(sys.modules[type(causal).__module__]).get(FORMULA)
    experts = getattr(causal, "num_experts", None)
    chosen = getattr(causal, "num_experts_per_tok", None)
    recorded = _router_output(causal)
    if formula is None or recorded is None or experts is None or chosen is None:
        raise UnsupportedError(
            f"train.router_aux_loss_coef: {type(causal).__name__} models have no auxiliary loss in "
            "the installed transformers; leave it out"
        )
    kind, index = recorded
    recording: list[list[Tensor]] = []
    """What routers give out, layer by layer, of the forward that is under way."""

    def record(_: nn.Module, __: Any, output: Any) -> None:
        # Recomputed layers run again in backward: then nothing is recorded.
        if recording:
            recording[0].append(output[index] if isinstance(output, tuple) else output)

    for module in causal.modules():
        if isinstance(module, kind):
            module.register_forward_hook(record)
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
        recording.append([])
        try:
            outputs = usual(self, *args, shift_labels=shift_labels, **kwargs)
        finally:
            logits = tuple(recording.pop())
        loss_tokens = (shift_labels != IGNORE).sum()
        auxiliary = formula(logits, experts, chosen, tokens).float()
        outputs.loss = outputs.loss + coefficient * loss_tokens * auxiliary
        return outputs

    replace_forward(causal, forward)


def _router_output(causal: Any) -> tuple[type[nn.Module], int] | None:
    """The kind of module that gives router logits, and their place in its output."""
    for module in causal.modules():
        recorder = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        if recorder is not None:
            kind = getattr(recorder, "target_class", recorder)
            return kind, getattr(recorder, "index", 0)
    return None
