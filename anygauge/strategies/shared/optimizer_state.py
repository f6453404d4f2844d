"""An optimizer's state: made before the first step, exported, set from a `TrainedState`.

bitsandbytes keeps a tensor `state1` as codes of 8 bits, with a scale for each block of values in
`absmax1` and the code's values in `qmap1`. Blocks run over a whole tensor, a rank's flat partition
included, so a part of it can only be read from the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.interface import PARAMETER, TrainedState

_STEP = "step"
BLOCK = 256
"""Values that share a scale, in bitsandbytes' optimizers of 8 bits."""

_AUXILIARY = ("absmax", "qmap")


def make_state(optimizer: Any, parameters: Iterable[Tensor], step: Callable[[], Any]) -> None:
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
    describes quantized tensors."""
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
    part: Callable[[str, Tensor], Tensor] = lambda name, whole: whole,
) -> None:
    """Give parameters that an optimizer holds their values, state and step count.

    Args:
        part: (name, a whole tensor of that parameter) -> what the optimizer has of it.
    """
    make_state(optimizer, [p for _, p in named], optimizer.step)
    with torch.no_grad():
        for name, parameter in named:
            parameter.copy_(part(name, state.tensor(name, PARAMETER)))
            kept = optimizer.state[parameter]
            for key in state_keys(kept):
                pack(kept, key, part(name, state.tensor(name, key)))
            set_updates(kept, state.counters.updates)


def export_plain(
    optimizer: Any, named: Sequence[tuple[str, nn.Parameter]], device: torch.device
) -> Iterator[tuple[str, str, Tensor]]:
    """Export the state of parameters that it holds whole: (name, key, tensor), on `device`."""
    for name, parameter in named:
        yield name, PARAMETER, parameter.detach().to(device, torch.float32, copy=True)
        kept = optimizer.state.get(parameter, {})
        for key in state_keys(kept):
            yield name, key, to_float32(kept, key).to(device, copy=True)


# -- state of 8 bits -------------------------------------------------------------------------------


def is_auxiliary(key: str) -> bool:
    """Whether a part of an optimizer's state only describes another one."""
    return key.startswith(_AUXILIARY)


def is_packed(value: Any) -> bool:
    """Whether a tensor is kept as codes."""
    return torch.is_tensor(value) and value.dtype == torch.uint8


def to_float32(state: Mapping[str, Any], key: str) -> Tensor:
    """A tensor as float32, in its own shape."""
    value: Tensor = state[key]
    if not is_packed(value):
        return value.detach().to(torch.float32)
    from bitsandbytes.functional import dequantize_blockwise

    number = key.removeprefix("state")
    scales: Tensor = state[f"absmax{number}"]
    # Paged codes are the host's to torch, while their scales are on the device.
    return dequantize_blockwise(
        value.to(scales.device), absmax=scales, code=state[f"qmap{number}"], blocksize=BLOCK
    ).reshape(value.shape)


def pack(state: Mapping[str, Any], key: str, value: Tensor) -> None:
    """Put a float32 tensor into its place, as codes if it is kept so."""
    place: Tensor = state[key]
    value = value.reshape(place.shape)
    if not is_packed(place):
        place.copy_(value)
        return
    from bitsandbytes.functional import quantize_blockwise

    number = key.removeprefix("state")
    scales: Tensor = state[f"absmax{number}"]
    codes, blocks = quantize_blockwise(
        value.to(scales.device, torch.float32).contiguous(),
        code=state[f"qmap{number}"],
        blocksize=BLOCK,
    )
    place.copy_(codes.reshape(place.shape))
    scales.copy_(blocks.absmax)
