"""Tells what an engine is doing, and which of its tensors are for what."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from anygauge.interface.strategy import Engine, OptimizerFactory
from anygauge.kernels.loss import base_of
from anygauge.planning.live import LiveBytes
from anygauge.planning.memory import (
    ACTIVATIONS,
    ADAPTER,
    BUFFERS,
    FORWARD,
    GRADIENTS,
    LOGITS,
    LOSS,
    OPTIMIZER,
    SAVE,
    SAVED,
    UPDATE,
    WEIGHTS,
)


class EngineWatch:
    """Of one engine, from before it is built.

    Args:
        live: that counts its tensors.
        adapted: trained parameters are an adapter's.
    """

    def __init__(self, live: LiveBytes, *, adapted: bool) -> None:
        self._live = live
        self._trained = ADAPTER if adapted else WEIGHTS
        self._masters: list[weakref.ref[Tensor]] = []

    def optimizer(self, factory: OptimizerFactory) -> OptimizerFactory:
        """The same; of what it makes, masters and state are known as such."""

        def make(
            parameters: Iterable[tuple[str, nn.Parameter]],
            shapes: Mapping[str, Sequence[int]] | None = None,
        ) -> Any:
            made: Any = factory(parameters, shapes)
            self._found(made)
            if hasattr(made, "register_step_post_hook"):
                made.register_step_pre_hook(lambda one, *_: self._found(one))
                made.register_step_post_hook(lambda one, *_: self._state(one))
            return made

        return make

    def _found(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._masters.append(weakref.ref(parameter))
                self._live.assign(parameter, OPTIMIZER, (BUFFERS,))

    def _state(self, optimizer: Any) -> None:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self._live.assign(value, OPTIMIZER)

    def built(self, engine: Engine) -> None:
        """Look at what was made; backward, the loss and gradients are seen from now on."""
        live = self._live
        # What no one calls a weight is the engine's own.
        live.assign_rest(WEIGHTS, BUFFERS)
        for master in self._masters:
            live.assign(master(), OPTIMIZER, (BUFFERS,))
        for parameter in engine.model.parameters():
            kind = self._trained if parameter.requires_grad else WEIGHTS
            # An engine may keep its part of a weight with the parameter.
            for held in (parameter, *vars(parameter).values()):
                if isinstance(held, Tensor):
                    live.assign(held, kind)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda one: live.assign(one.grad, GRADIENTS)
                )
        for buffer in engine.model.buffers():
            live.assign(buffer, WEIGHTS)
        causal: Any = base_of(engine.model)
        for module in (engine.model, causal, causal.base_model):
            module.register_forward_pre_hook(self._at_model, prepend=True)
        head: Any = causal.get_output_embeddings()
        if head is not None:
            head.register_forward_pre_hook(self._at_head, prepend=True)

    def _at_model(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._live.kind = ACTIVATIONS

    def _at_head(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        live = self._live
        live.kind = LOGITS
        if live.phase == FORWARD:
            live.phase = LOSS
        if args and isinstance(args[0], Tensor) and args[0].requires_grad:
            live.in_backward = LOGITS
            args[0].register_hook(self._past_head)

    def _past_head(self, gradient: Tensor) -> None:
        self._live.in_backward = ACTIVATIONS

    def enter(self, phase: str) -> None:
        """A phase begins; the loss and backward are parts of `FORWARD`, and are seen."""
        live = self._live
        live.phase, live.in_backward = phase, ACTIVATIONS
        # A model that is called has activations.
        live.kind = {UPDATE: OPTIMIZER, SAVE: SAVED}.get(phase, BUFFERS)
