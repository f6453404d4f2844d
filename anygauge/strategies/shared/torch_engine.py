"""The engine of plain torch: one rank's loop over micro-batches, whatever a rank holds.

The optimizer sees plain tensors, whole or this rank's parts: a fused update, one of 8 bits or a
device's own works on every layout. Weights are stored in the compute type, or in that of the
masters, which they then are themselves. What differs between strategies is handed in: what is
called, how gradients come together, how they are clipped, how a tensor is made whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from anygauge.interface import (
    HOST_DEVICE,
    PARAMETER,
    BuildContext,
    Counters,
    DeviceBatch,
    LossFunction,
    Phase,
    TrainedState,
    UpdateResult,
)
from anygauge.strategies.shared.common import (
    fp8_contexts,
    logits_of,
    set_learning_rate,
    summed_losses,
    torch_dtype,
    trained_parameters,
)
from anygauge.strategies.shared.finite import FiniteSteps, propagate_nonfinite
from anygauge.strategies.shared.gradients import Gradients, LocalGradients, sum_at
from anygauge.strategies.shared.layout import TensorLayout, WholeLayout
from anygauge.strategies.shared.optimizer_state import (
    import_plain,
    state_keys,
    to_float32,
    updates_of,
)

FIRST_SCALE = 2.0**16
SCALE_INTERVAL = 2000
"""Updates without an overflow after which the scale doubles; these two are torch's defaults."""


class TorchEngine:
    """See `Engine`.

    Args:
        model: its parameters' names are those of the run.
        call: what is called in place of the model in training, such as a wrapper around it.
        gradients: made of the trained parameters; None: there is one rank.
        layout: which part of each parameter this rank holds.
        sums: places of gradients that are parts of sums, and the ranks that sum them, in one
            message each.
        join_logits: puts together the logits of positions that several ranks have.
    """

    refuses_checkpoints = ""

    def __init__(
        self,
        model: nn.Module,
        context: BuildContext,
        *,
        call: nn.Module | None = None,
        gradients: Callable[[Sequence[nn.Parameter]], Gradients] | None = None,
        layout: TensorLayout | None = None,
        sums: Sequence[tuple[Sequence[int], dist.ProcessGroup]] = (),
        join_logits: Callable[[Tensor], Tensor] = lambda logits: logits,
    ) -> None:
        self.model = model
        self._call = call or model
        self._writes = context.workload.rank == 0
        self._join_logits = join_logits
        self._graph = context.workload.backend.graph
        self._backend = context.workload.backend
        self._layout = layout or WholeLayout(context.clip_grad_norm)
        self._fp8 = fp8_contexts(model, context)
        self._trained = trained_parameters(model)
        held = [self._layout.local(p) for _, p in self._trained]
        self._held, self._group_sums = held, sums
        # A parameter that is already stored in float32 is its own master.
        self._masters = [
            part if part.dtype is torch.float32 else nn.Parameter(part.detach().float())
            for part in held
        ]
        self._copies = [
            (part, master)
            for part, master in zip(held, self._masters, strict=True)
            if part is not master
        ]
        parameters = [p for _, p in self._trained]
        self._gradients = (
            LocalGradients(parameters, torch_dtype(context.workload.precision.reduce_dtype))
            if gradients is None
            else gradients(parameters)
        )
        shapes = {name: self.parameter_shape(p) for name, p in self._trained}
        self._optimizer = context.optimizer(self._named_masters, shapes)
        self._steps = FiniteSteps(self._optimizer)
        self._scale = LossScale(context.workload.precision.scales_loss)

    def run_step(
        self, batches: Sequence[DeviceBatch], loss_function: LossFunction, normalizer: int
    ) -> Sequence[Tensor]:
        """See `Engine.run_step`."""
        self._call.train()
        self._set_weights("train")
        factor = self._scale.factor / normalizer
        sums = []
        for index in range(len(batches)):
            with self._gradients.micro_batch(last=index == len(batches) - 1):
                with self._fp8.forward():
                    outputs = self._call(**batches[index])
                self._graph.mark_step(Phase.FORWARD)
                loss = loss_function(outputs)
                with self._fp8.backward():
                    propagate_nonfinite(loss, factor).backward()
            self._gradients.collect()
            self._graph.mark_step(Phase.BACKWARD)
            sums.append(loss.detach())
            del outputs, loss  # of which the next forward needs nothing
        return sums

    def update(self, lr: float, max_norm: float) -> UpdateResult:
        """See `Engine.update`."""
        gradients = self._gradients.take()
        for places, group in self._group_sums:
            sum_at(gradients, places, self._held, group, self._backend.placement.device)
        for master, gradient in zip(self._masters, gradients, strict=True):
            if gradient is not None:
                gradient = gradient.to(master.dtype)
                master.grad = gradient.div_(self._scale.factor) if self._scale.enabled else gradient
        norm = self._layout.clip(self._masters, max_norm if max_norm > 0 else torch.inf)
        # float16 alone waits for the device here: the next step needs the scale.
        skipped = self._scale.enabled and self._scale.skips(float(norm))
        if not skipped:
            set_learning_rate(self._optimizer, lr)
            self._steps.step(norm)
        self._optimizer.zero_grad(set_to_none=True)
        self._copy_masters()
        self._graph.mark_step(Phase.UPDATE)
        return UpdateResult(norm, skipped)

    def evaluate(
        self, batches: Iterable[DeviceBatch], loss_function: LossFunction
    ) -> Sequence[Tensor]:
        """See `Engine.evaluate`."""
        self._set_weights("eval")
        sums = summed_losses(self.model, self._backend, batches, loss_function)
        self._reshard()
        return sums

    def logits(self, batch: DeviceBatch) -> Tensor | None:
        """See `Engine.logits`."""
        self._set_weights("eval")
        logits = self._join_logits(logits_of(self.model, self._backend, batch))
        self._reshard()
        return logits.to(HOST_DEVICE, torch.float32)

    def parameter_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """See `Engine.parameter_shape`."""
        return self._layout.shape(parameter)

    def export_trained(self) -> Mapping[str, Tensor]:
        """See `Engine.export_trained`; one tensor is whole at a time on other ranks."""
        self._set_weights("eval")
        found: dict[str, Tensor] = {}
        for (name, parameter), master in zip(self._trained, self._masters, strict=True):
            whole = self._layout.gather(parameter, master.detach())
            if self._writes:
                found[name] = whole.to(HOST_DEVICE, copy=True)
        return found

    def export_state(self) -> Iterator[tuple[str, str, Tensor | None]]:
        """See `Engine.export_state`."""
        self._set_weights("train")
        keys = self._state_keys()
        common = next(iter(keys.values()), [])  # of parameters of which this rank has nothing
        for (name, parameter), master in zip(self._trained, self._masters, strict=True):
            state = self._optimizer.state.get(master, {})
            for key in (PARAMETER, *keys.get(name, common)):
                part = master.detach() if key == PARAMETER else _unpack(state, key, master)
                whole = self._layout.gather(parameter, part)
                host = whole.to(HOST_DEVICE, torch.float32, copy=True) if self._writes else None
                yield name, key, host

    def counters(self) -> Counters:
        """See `Engine.counters`."""
        states = (self._optimizer.state.get(m, {}) for m in self._masters)
        return self._scale.counters(updates_of(states))

    def import_state(self, state: TrainedState) -> None:
        """See `Engine.import_state`."""
        self._set_weights("train")
        parameters = dict(self._trained)
        import_plain(
            self._optimizer,
            self._named_masters,
            state,
            lambda name, whole: self._layout.part(parameters[name], whole),
        )
        self._copy_masters()
        self._scale.load(state.counters)

    def export_rank_state(self) -> Mapping[str, Tensor]:
        """See `HasRankState.export_rank_state`; what sums the gradients keeps it."""
        return self._gradients.export_rank_state()

    def import_rank_state(self, tensors: Mapping[str, Tensor]) -> None:
        """See `HasRankState.import_rank_state`."""
        self._gradients.import_rank_state(tensors)

    def close(self) -> None:
        """Do nothing: Python frees all that the engine holds."""

    def _set_weights(self, mode: str) -> None:
        """Call the optimizer's ``train`` or ``eval``, if it has it: each gives it other weights."""
        if switch := getattr(self._optimizer, mode, None):
            switch()
            self._copy_masters()

    def _reshard(self) -> None:
        """Give gathered weights up on all ranks, as backward does. Otherwise `state_dict`, which
        peft calls where rank 0 saves, would do so there alone, and ranks gather differently."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @torch.no_grad()
    def _copy_masters(self) -> None:
        """Parameters get their masters' values; in one call, as each launch costs the host time."""
        if self._copies:
            parts, masters = zip(*self._copies, strict=True)
            torch._foreach_copy_(parts, masters)

    @property
    def _named_masters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parts that are not empty; no optimizer needs to see the others."""
        return [
            (name, m)
            for (name, _), m in zip(self._trained, self._masters, strict=True)
            if m.numel()
        ]

    def _state_keys(self) -> dict[str, list[str]]:
        """List the tensors that the optimizer keeps for each parameter; none before it stepped."""
        states = ((name, self._optimizer.state.get(m)) for name, m in self._named_masters)
        return {name: state_keys(state) for name, state in states if state}


def _unpack(state: Mapping[str, Any], key: str, master: Tensor) -> Tensor:
    """One tensor of an optimizer's state, laid out as its master; an empty part has none."""
    return to_float32(state, key) if state else torch.empty_like(master)


@dataclass(slots=True)
class LossScale:
    """Dynamic scaling of the loss for float16, the same on every rank.

    torch's scaler looks at the gradients that a rank has. Where a rank has a part of them alone,
    ranks would decide on its own; so this one gets whether the norm over all of them was finite.

    Attributes:
        enabled: False: the scale is 1 for good.
    """

    enabled: bool
    value: float = FIRST_SCALE
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
        if self.good_steps == SCALE_INTERVAL:
            self.value, self.good_steps = self.value * 2, 0
        return False

    def counters(self, updates: int) -> Counters:
        """Return the counters with the optimizer's updates."""
        if not self.enabled:
            return Counters(updates=updates)
        return Counters(updates=updates, loss_scale=self.value, good_steps=self.good_steps)

    def load(self, counters: Counters) -> None:
        """Go on from counters of a run that scaled its loss; of another one, from the start."""
        if self.enabled and counters.loss_scale is not None:
            self.value, self.good_steps = counters.loss_scale, counters.good_steps
