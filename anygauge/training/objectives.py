"""The objectives that come along: cross entropy of tokens, DPO and ORPO; a plugin like another's.

A preference is a number for each pair, of the probabilities of its two answers alone: who computes
which pair does not matter, and the loss of a step is the mean over all its pairs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from anygauge.interface import API_VERSION, ObjectiveSpec, Options, PairScores, hookimpl
from anygauge.util.section import PositiveNumber

if TYPE_CHECKING:
    from torch import Tensor


class DpoOptions(Options):
    """Options of ``dpo``."""

    beta: PositiveNumber = Field(
        0.1, description="How much a step away from the reference counts: a larger one stays near."
    )


class Dpo:
    """Direct preference optimization: Rafailov et al., https://arxiv.org/abs/2305.18290, eq. 7.

    TRL's `DPOTrainer` has it as the loss type ``sigmoid``.
    """

    def __init__(self, options: DpoOptions) -> None:
        self.options = options

    def __call__(self, policy: PairScores, reference: PairScores | None) -> Tensor:
        """See `Objective`."""
        from torch.nn.functional import logsigmoid

        assert reference is not None
        chosen, rejected = (policy.log_probs - reference.log_probs).unbind(1)
        return -logsigmoid(self.options.beta * (chosen - rejected))


class OrpoOptions(Options):
    """Options of ``orpo``."""

    beta: PositiveNumber = Field(
        0.1, description="Weight of the odds ratio beside the loss of the chosen answer."
    )


class Orpo:
    """Odds ratio preference optimization: Hong et al., https://arxiv.org/abs/2403.07691, eq. 6.

    The odds are of the mean token, as in TRL's `ORPOTrainer`. The loss of the chosen answer is the
    mean over its tokens, pair by pair; TRL's is over the prompt's as well, of a whole micro-batch.
    """

    def __init__(self, options: OrpoOptions) -> None:
        self.options = options

    def __call__(self, policy: PairScores, reference: PairScores | None) -> Tensor:
        """See `Objective`."""
        import torch
        from torch.nn.functional import logsigmoid

        means = policy.log_probs / policy.num_tokens
        # 1 - p counts as 1e-6 at least, so that the odds of certainty are finite.
        chosen, rejected = (means - torch.log(-torch.expm1(means.clamp(max=-1e-6)))).unbind(1)
        return -means[:, 0] - self.options.beta * logsigmoid(chosen - rejected)


@hookimpl
def anygauge_provide_objectives() -> Iterable[ObjectiveSpec]:
    """Announce the objectives of this module."""
    yield ObjectiveSpec(
        name="sft",
        api_version=API_VERSION,
        summary="Cross entropy of each loss token; the mean over all of the global batch.",
    )
    yield ObjectiveSpec(
        name="dpo",
        factory=f"{__name__}:Dpo",
        api_version=API_VERSION,
        summary="DPO: chosen answers gain on rejected ones, against the model without its adapter.",
        options=f"{__name__}:DpoOptions",
        reference=True,
    )
    yield ObjectiveSpec(
        name="orpo",
        factory=f"{__name__}:Orpo",
        api_version=API_VERSION,
        summary="ORPO: learns chosen answers, and their odds against rejected ones; no reference.",
        options=f"{__name__}:OrpoOptions",
    )
