"""The loss of pairs in a model: an objective's, of both answers, and of a reference where it asks.

The reference is the model itself with its adapter off, within the same forward: engines gather and
release weights by hooks of layers, which run twice, and there is no second model to hold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.config.schema import RunFile
from anygauge.interface import Objective, PairScores
from anygauge.kernels.loss import IGNORE, base_of, replace_forward
from anygauge.registry import installed_plugins
from anygauge.registry.specs import load_factory, read_options

HARMLESS = -1.0
"""In place of the score of an answer without tokens, whose loss does not count."""


def objective_of(run: RunFile) -> Objective | None:
    """The objective of a run that trains on pairs; None: the model's loss is that of tokens.

    Raises:
        RunFileError: an option is wrong.
        PluginError: its plugin is broken.
    """
    provided = installed_plugins().find_objective(run.objective)
    with run.locate_errors():
        options = read_options(provided, run.objective_options)
    made: Objective | None = load_factory(provided)(options) if provided.spec.pairs else None
    return made


def return_pair_loss(model: Any, objective: Objective, *, reference: bool) -> None:
    """Let a model that returns the loss of each sequence return that of pairs, summed over them.

    Call it after `return_loss`. Sequences 2n and 2n + 1 are the chosen and the rejected answer of a
    pair; one without loss tokens, which fills a micro-batch up, adds nothing.

    Args:
        reference: the objective is given scores of the model with its adapter off.
    """
    causal = base_of(model)
    usual = vars(causal)["forward"].__func__

    def forward(self: Any, *args: Any, shift_labels: Tensor | None = None, **kwargs: Any) -> Any:
        if shift_labels is None:
            return usual(self, *args, **kwargs)
        num_tokens = (shift_labels != IGNORE).sum(dim=1).view(-1, 2)
        real = (num_tokens > 0).all(dim=1)

        def scores(outputs: Any) -> PairScores:
            log_probs = -outputs.loss.float().view(-1, 2)
            return PairScores(
                torch.where(real[:, None], log_probs, HARMLESS), num_tokens.clamp(min=1).float()
            )

        given = dict(kwargs, shift_labels=shift_labels)
        before = None
        if reference:
            with torch.no_grad(), _adapter_off(self):
                before = scores(usual(self, *args, **given))
        outputs = usual(self, *args, **given)
        outputs.loss = torch.where(real, objective(scores(outputs), before), 0.0).sum()
        return outputs

    replace_forward(causal, forward)


@contextlib.contextmanager
def _adapter_off(causal: nn.Module) -> Iterator[None]:
    """Within it, the model computes as the base does, without dropout.

    peft's switch also sets which parameters ask for a gradient: engines look at that when they
    gather them, so it stays as it was.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    layers: list[Any] = [module for module in causal.modules() if isinstance(module, kinds)]
    trained = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    training = causal.training

    def switch(*, on: bool) -> None:
        causal.train(on and training)
        for layer in layers:
            layer.enable_adapters(on)
        for parameter in trained:
            parameter.requires_grad_(True)

    switch(on=False)
    try:
        yield
    finally:
        switch(on=True)
