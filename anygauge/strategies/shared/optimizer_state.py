"""An optimizer's state: made before the first step, exported, set from a `TrainedState`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.interface import PARAMETER, TrainedState
from anygauge.strategies.shared.quantised_state import is_auxiliary, pack, unpacked

_STEP = "step"


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
    # An engine may keep buffers there that it writes gradients into.
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    step()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def state_keys(state: Mapping[str, Any]) -> list[str]:
    """Keys of the tensors in an optimizer's state of one parameter: not its step count, nor what
    describes quantised tensors."""
    return [
        key
        for key, value in state.items()
        if key != _STEP and torch.is_tensor(value) and not is_auxiliary(key)
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
    """Give parameters that an optimizer holds whole their values, state and step count."""
    prime(optimizer, [p for _, p in named], optimizer.step)
    with torch.no_grad():
        for name, parameter in named:
            parameter.copy_(state.tensor(name, PARAMETER))
            kept = optimizer.state[parameter]
            for key in state_keys(kept):
                pack(kept, key, state.tensor(name, key))
            set_updates(kept, state.counters.updates)


def export_plain(
    optimizer: Any, named: Sequence[tuple[str, nn.Parameter]], device: torch.device
) -> Iterator[tuple[str, str, Tensor]]:
    """What `import_plain` reads: (name, key, tensor), copied to `device`."""
    for name, parameter in named:
        yield name, PARAMETER, parameter.detach().to(device, torch.float32, copy=True)
        kept = optimizer.state.get(parameter, {})
        for key in state_keys(kept):
            yield name, key, unpacked(kept, key).to(device, copy=True)
