"""The `single` strategy: plain torch in one process.

The reference that other strategies are compared with, and the proof that the contract is nobody's
shape in particular. Weights are stored in the compute type; the optimizer works on float32 masters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.interface import FULL, HOST_DEVICE, Phase, Setting, Support
from anygauge.interface.strategy import (
    BuildContext,
    Counters,
    DeviceBatch,
    Footprint,
    LossFunction,
    StepResult,
    TrainedState,
    UpdateResult,
    Workload,
)
from anygauge.strategies.common import (
    compile_regions,
    set_learning_rate,
    summed_losses,
    torch_dtype,
    trained_parameters,
    whole_logits,
)
from anygauge.strategies.footprint import whole_model
from anygauge.strategies.materialise import materialise
from anygauge.strategies.state import export_plain, import_plain, updates_of


class SingleEngine:
    """A whole model on one device."""

    def __init__(self, model: nn.Module, context: BuildContext) -> None:
        self.model = model
        self._backend = context.backend
        self._precision = context.precision
        self._clip_grad_norm = context.clip_grad_norm
        self._reduce_dtype = torch_dtype(context.precision.reduce_dtype)
        self._trained = trained_parameters(model)
        master_dtype = torch_dtype(context.precision.master_dtype)
        # A parameter already stored in the master type is its own master.
        self._masters = [
            p if p.dtype is master_dtype else nn.Parameter(p.detach().to(master_dtype))
            for _, p in self._trained
        ]
        self._gradients: list[Tensor | None] = [None] * len(self._masters)
        self._optimizer = context.optimizer(self._named_masters)
        self._scaler = torch.amp.GradScaler(
            context.backend.device_type, enabled=context.precision.scales_loss
        )

    def run_step(
        self, batches: Sequence[DeviceBatch], loss_function: LossFunction, normalizer: int
    ) -> StepResult:
        """See `Engine.run_step`."""
        self.model.train()
        sums = []
        for batch in batches:
            outputs = self.model(**batch.inputs)
            self._backend.graph.mark_step(Phase.FORWARD)
            loss = loss_function(outputs)
            self._scaler.scale(loss / normalizer).backward()
            self._accumulate()
            self._backend.graph.mark_step(Phase.BACKWARD)
            sums.append(loss.detach())
        return StepResult(sums)

    def _accumulate(self) -> None:
        """Add this micro-batch's gradients in the reduction type."""
        for index, (_, parameter) in enumerate(self._trained):
            gradient = parameter.grad
            if gradient is None:
                continue
            parameter.grad = None
            total = self._gradients[index]
            if total is None:
                self._gradients[index] = gradient.to(self._reduce_dtype)
            else:
                total.add_(gradient)

    def update(self, lr: float, max_norm: float) -> UpdateResult:
        """See `Engine.update`."""
        for master, gradient in zip(self._masters, self._gradients, strict=True):
            master.grad = None if gradient is None else gradient.to(master.dtype)
        self._gradients = [None] * len(self._masters)
        set_learning_rate(self._optimizer, lr)
        self._scaler.unscale_(self._optimizer)
        if max_norm > 0:
            norm = self._clip_grad_norm(self._masters, max_norm)
        else:
            norm = nn.utils.clip_grad_norm_(self._masters, float("inf"))
        scale = self._scaler.get_scale()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for (_, parameter), master in zip(self._trained, self._masters, strict=True):
                if parameter is not master:
                    parameter.copy_(master)
        self._backend.graph.mark_step(Phase.UPDATE)
        skipped = self._precision.scales_loss and self._scaler.get_scale() < scale
        return UpdateResult(norm, skipped)

    def evaluate(
        self, batches: Iterable[DeviceBatch], loss_function: LossFunction
    ) -> Sequence[Tensor]:
        """See `Engine.evaluate`."""
        return summed_losses(self.model, self._backend, batches, loss_function)

    def logits(self, batch: DeviceBatch) -> Tensor | None:
        """See `Engine.logits`."""
        return whole_logits(self.model, batch)

    def parameter_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """See `Engine.parameter_shape`."""
        return tuple(parameter.shape)

    def export_trained(self) -> Mapping[str, Tensor]:
        """See `Engine.export_trained`."""
        return {
            name: master.detach().to(HOST_DEVICE, copy=True)
            for (name, _), master in zip(self._trained, self._masters, strict=True)
        }

    def checkpoint_support(self) -> Support:
        """See `Engine.checkpoint_support`."""
        return FULL

    def export_state(self) -> Iterator[tuple[str, str, Tensor | None]]:
        """See `Engine.export_state`."""
        return export_plain(self._optimizer, self._named_masters, torch.device(HOST_DEVICE))

    def counters(self) -> Counters:
        """See `Engine.counters`."""
        updates = updates_of(self._optimizer.state.get(m, {}) for m in self._masters)
        if not self._scaler.is_enabled():
            return Counters(updates=updates)
        scaler = self._scaler.state_dict()
        return Counters(
            updates=updates, loss_scale=scaler["scale"], good_steps=scaler["_growth_tracker"]
        )

    def import_state(self, state: TrainedState) -> None:
        """See `Engine.import_state`."""
        import_plain(self._optimizer, self._named_masters, state)
        if self._scaler.is_enabled() and state.counters.loss_scale is not None:
            scaler = self._scaler.state_dict()
            scaler["scale"] = state.counters.loss_scale
            scaler["_growth_tracker"] = state.counters.good_steps
            self._scaler.load_state_dict(scaler)

    @property
    def _named_masters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, m) for (name, _), m in zip(self._trained, self._masters, strict=True)]

    def close(self) -> None:
        """Nothing is held that Python does not free."""


class Single:
    """One process, one device, the whole model."""

    description = "single"

    def __init__(self, options: Any = None) -> None:
        """Args: options: the run file's section, which has no fields but the name."""

    def settings(self, workload: Workload) -> Sequence[Setting]:
        """Plain torch has no configuration of its own."""
        return ()

    def footprint(self, workload: Workload) -> Footprint:
        """See `Strategy.footprint`."""
        return whole_model(workload)

    def build(self, context: BuildContext) -> SingleEngine:
        """See `Strategy.build`."""
        model = context.factory.skeleton()
        materialise(
            model,
            context.factory,
            device=context.backend.placement.device,
            dtype=torch_dtype(context.precision.param_dtype),
        )
        model = context.factory.adapt(model)
        context.factory.checkpoint_activations(model)
        compile_regions(model, context.backend)
        return SingleEngine(model, context)
