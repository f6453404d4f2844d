"""What training has changed so far, in a form that belongs to no strategy.

Tensors are whole, float32 and on the host; names are those of the model's parameters. One strategy
writes it, another reads it: on other ranks, another device, in another sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from anygauge.interface import ModelError
from anygauge.strategies.base import ModelFactory
from anygauge.strategies.quantised import is_auxiliary, pack, unpacked

PARAMETER = "parameter"
"""The kind of a trained tensor itself; other kinds are the optimizer's names, such as `exp_avg`."""

_STEP = "step"


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """Numbers of the optimizer and the loss scaler.

    Attributes:
        updates: steps that the optimizer has made; those that loss scaling skipped do not count.
        loss_scale: None where the loss is not scaled.
        good_steps: since the scale last changed.
    """

    updates: int
    loss_scale: float | None = None
    good_steps: int = 0


class TrainedState(Protocol):
    """Where a run goes on from; tensors may be read as late as they are asked for."""

    counters: Counters

    def names(self) -> Sequence[str]:
        """Trained parameters."""

    def kinds(self, name: str) -> Sequence[str]:
        """What is kept of one parameter beside itself."""

    def tensor(self, name: str, kind: str) -> Tensor:
        """One whole tensor, float32, on the host."""


class ResumedFactory:
    """A model factory whose trained parameters begin with the values of a state.

    The engine's float32 masters are made from what is built here, in the compute type, and get
    their digits back in `Engine.import_state`.
    """

    def __init__(self, factory: ModelFactory, state: TrainedState) -> None:
        self._factory = factory
        self._state = state
        self._names = frozenset(state.names())

    def skeleton(self) -> nn.Module:
        """See `ModelFactory.skeleton`."""
        return self._factory.skeleton()

    def values(self, model: nn.Module, unit: str) -> Mapping[str, Tensor]:
        """See `ModelFactory.values`."""
        values = dict(self._factory.values(model, unit))
        prefix = f"{unit}." if unit else ""
        for name in values:
            if prefix + name in self._names:
                values[name] = self._value(prefix + name, values[name])
        return values

    def adapt(self, model: nn.Module) -> nn.Module:
        """See `ModelFactory.adapt`."""
        adapted = self._factory.adapt(model)
        if adapted is model:
            return model
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if name in self._names and not parameter.is_meta:
                    parameter.copy_(self._value(name, parameter))
        return adapted

    def _value(self, name: str, built: Tensor) -> Tensor:
        kept = self._state.tensor(name, PARAMETER)
        if kept.shape != built.shape:
            raise ModelError(
                f"the checkpoint's {name} has shape {tuple(kept.shape)}, this run's "
                f"{tuple(built.shape)}; resume with the adapter that the checkpoint was made with"
            )
        return kept

    def borrowed(self, model: nn.Module) -> Sequence[tuple[nn.Module, nn.Parameter]]:
        """See `ModelFactory.borrowed`."""
        return self._factory.borrowed(model)

    @property
    def recomputes(self) -> bool:
        """See `ModelFactory.recomputes`."""
        return self._factory.recomputes

    def checkpoint_activations(self, model: nn.Module, *, reentrant: bool) -> None:
        """See `ModelFactory.checkpoint_activations`."""
        self._factory.checkpoint_activations(model, reentrant=reentrant)


def prime(optimizer: Any, parameters: Iterable[Tensor], step: Callable[[], Any]) -> None:
    """Have an optimizer make its state, which it does in its first step.

    One step at rate 0 with gradients of zero moves nothing: whatever is in the state afterwards
    is to be overwritten.

    Args:
        parameters: what `step` works on.
        step: the optimizer's step over these parameters.
    """
    parameters = list(parameters)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if torch.is_tensor(group["lr"]) else 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    step()
    for parameter in parameters:
        parameter.grad = None
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def moments(state: Mapping[str, Any]) -> list[str]:
    """Names of the moments in an optimizer's state of one parameter: not its step count, nor what
    describes quantised moments."""
    return [
        kind
        for kind, value in state.items()
        if kind != _STEP and torch.is_tensor(value) and not is_auxiliary(kind)
    ]


def updates_of(states: Iterable[Mapping[str, Any]]) -> int:
    """The step count that all of an optimizer's states share; 0 where it keeps none."""
    counts = {int(state[_STEP]) for state in states if _STEP in state}
    if len(counts) > 1:
        raise RuntimeError(f"the optimizer's parameters have made {sorted(counts)} steps")
    return counts.pop() if counts else 0


def set_updates(state: MutableMapping[str, Any], updates: int) -> None:
    """Set the step count of one state, where the optimizer keeps one."""
    if _STEP not in state:
        return
    if torch.is_tensor(state[_STEP]):
        state[_STEP].fill_(updates)
    else:
        state[_STEP] = updates


def import_plain(
    optimizer: Any,
    named: Sequence[tuple[str, nn.Parameter]],
    state: TrainedState,
) -> None:
    """Give parameters that an optimizer holds whole their values, moments and step count."""
    prime(optimizer, [p for _, p in named], optimizer.step)
    with torch.no_grad():
        for name, parameter in named:
            parameter.copy_(state.tensor(name, PARAMETER))
            kept = optimizer.state[parameter]
            for kind in moments(kept):
                pack(kept, kind, state.tensor(name, kind))
            set_updates(kept, state.counters.updates)


def export_plain(
    optimizer: Any, named: Sequence[tuple[str, nn.Parameter]], device: torch.device
) -> Iterator[tuple[str, str, Tensor]]:
    """What `import_plain` reads: (name, kind, tensor), copied to `device`."""
    for name, parameter in named:
        yield name, PARAMETER, parameter.detach().to(device, torch.float32, copy=True)
        kept = optimizer.state.get(parameter, {})
        for kind in moments(kept):
            yield name, kind, unpacked(kept, kind).to(device, copy=True)
