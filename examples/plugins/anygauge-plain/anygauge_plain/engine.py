"""Builds the model whole on the device, and steps it with plain torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from anygauge.interface import (
    HOST_DEVICE,
    BuildContext,
    Counters,
    DeviceBatch,
    LossFunction,
    MemoryEstimate,
    Phase,
    TrainedState,
    UpdateResult,
    Workload,
)
from anygauge.strategies.shared.common import (
    logits_of,
    set_learning_rate,
    summed_losses,
    trained_parameters,
)
from anygauge.strategies.shared.finite import FiniteSteps, propagate_nonfinite
from anygauge.strategies.shared.footprint import EstimatedStrategy, whole_memory
from anygauge.strategies.shared.materialize import materialize
from anygauge.strategies.shared.optimizer_state import (
    export_plain,
    import_plain,
    updates_of,
)
from anygauge_plain.options import PlainOptions


class PlainEngine:
    """A whole model; its float32 parameters are their own masters."""

    refuses_checkpoints = ""

    def __init__(self, model: nn.Module, context: BuildContext, sums: torch.dtype) -> None:
        self.model = model
        self._graph = context.workload.backend.graph
        self._backend = context.workload.backend
        self._clip = context.clip_grad_norm
        self._trained = trained_parameters(model)
        self._sums = [torch.zeros_like(p, dtype=sums) for _, p in self._trained]
        self._optimizer = context.optimizer(self._trained)
        self._steps = FiniteSteps(self._optimizer)

    def run_step(
        self, batches: Sequence[DeviceBatch], loss_function: LossFunction, normalizer: int
    ) -> Sequence[Tensor]:
        """See `Engine.run_step`."""
        self.model.train()
        losses = []
        for batch in batches:
            outputs = self.model(**batch)
            self._graph.mark_step(Phase.FORWARD)
            loss = loss_function(outputs)
            propagate_nonfinite(loss, 1 / normalizer).backward()
            for total, (_, parameter) in zip(self._sums, self._trained, strict=True):
                if parameter.grad is not None:
                    total += parameter.grad
                    parameter.grad = None
            self._graph.mark_step(Phase.BACKWARD)
            losses.append(loss.detach())
        return losses

    def update(self, lr: float, max_norm: float) -> UpdateResult:
        """See `Engine.update`."""
        for total, (_, parameter) in zip(self._sums, self._trained, strict=True):
            parameter.grad = total.to(parameter.dtype, copy=True)  # the sum is zeroed
            total.zero_()
        norm = self._clip([p for _, p in self._trained], max_norm if max_norm > 0 else torch.inf)
        set_learning_rate(self._optimizer, lr)
        self._steps.step(norm)
        self._optimizer.zero_grad(set_to_none=True)
        self._graph.mark_step(Phase.UPDATE)
        return UpdateResult(norm)

    def evaluate(
        self, batches: Iterable[DeviceBatch], loss_function: LossFunction
    ) -> Sequence[Tensor]:
        """See `Engine.evaluate`."""
        return summed_losses(self.model, self._backend, batches, loss_function)

    def logits(self, batch: DeviceBatch) -> Tensor | None:
        """See `Engine.logits`."""
        return logits_of(self.model, self._backend, batch).to(HOST_DEVICE, torch.float32)

    def parameter_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """See `Engine.parameter_shape`."""
        return tuple(parameter.shape)

    def export_trained(self) -> Mapping[str, Tensor]:
        """See `Engine.export_trained`."""
        return {name: p.detach().to(HOST_DEVICE, copy=True) for name, p in self._trained}

    def export_state(self) -> Iterator[tuple[str, str, Tensor | None]]:
        """See `Engine.export_state`."""
        return export_plain(self._optimizer, self._trained, torch.device(HOST_DEVICE))

    def counters(self) -> Counters:
        """See `Engine.counters`."""
        states = (self._optimizer.state.get(p, {}) for _, p in self._trained)
        return Counters(updates=updates_of(states))

    def import_state(self, state: TrainedState) -> None:
        """See `Engine.import_state`."""
        import_plain(self._optimizer, self._trained, state)

    def close(self) -> None:
        """Nothing is held that Python does not free."""


class Plain(EstimatedStrategy):
    """See `Strategy`."""

    def __init__(self, options: PlainOptions) -> None:
        self._sums = options.sums
        self.description = f"plain, sums in {options.sums}"

    def memory(self, workload: Workload) -> MemoryEstimate:
        """See `StrategyPlanner.memory`; gradients are added up in a type of their own."""
        sum_bytes: int = getattr(torch, self._sums).itemsize
        return whole_memory(workload, replicas=1, sum_bytes=sum_bytes)

    def build(self, context: BuildContext) -> PlainEngine:
        """See `Strategy.build`."""
        model = context.factory.skeleton()
        device = context.workload.backend.placement.device
        materialize(model, context.factory, device=device, dtype=torch.float32)
        model = context.factory.adapt(model)
        context.factory.checkpoint_activations(model)
        return PlainEngine(model, context, getattr(torch, self._sums))
