"""What one step of a run gives, recorded, so that two runs can be laid side by side."""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anygauge.interface import HOST_DEVICE
from anygauge.testing.noise import roundings
from anygauge.testing.place import Place

if TYPE_CHECKING:
    from anygauge.training.setup import PreparedRun

SURELY = 32.0
"""Times what rounding typically makes of a tensor: beyond it, it is not rounding."""
UPDATED_OTHERWISE = 0.05
"""Adam divides gradients by their size, so that single elements may go either way: not a twentieth
of what all elements together move."""


@dataclass(slots=True)
class Recorded:
    """Of the first step, in float64 on the host.

    Attributes:
        outputs: (module, output) in the order of forwards; zero where rows are padding.
        gradients: of trained parameters, in the order of backward; summed over micro-batches.
        moved: what the update changed, by parameter.
    """

    outputs: list[tuple[str, Tensor]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    moved: Mapping[str, Tensor] = field(default_factory=dict)


def recorded(run: PreparedRun, step: Callable[[PreparedRun, int], None]) -> Recorded:
    """Train the first step."""
    found = Recorded()
    model = run.engine.model
    masks: list[Tensor] = []
    usual = run.loop.to_device

    def to_device(batch: Any) -> Any:
        masks.append(batch.attention_mask)
        return usual(batch)

    run = replace(run, loop=replace(run.loop, to_device=cast("Any", to_device)))
    handles = [
        module.register_forward_hook(_output_into(found.outputs, name, masks))
        for name, module in model.named_modules()
    ]
    handles += [
        parameter.register_hook(_gradient_into(found.gradients, name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    before = {name: value.double() for name, value in run.engine.export_trained().items()}
    step(run, 0)
    after = run.engine.export_trained()
    found.moved = {name: after[name].double() - value for name, value in before.items()}
    for handle in handles:
        handle.remove()
    return found


def first_difference(found: Recorded, wanted: Recorded, dtype: str) -> str:
    """What of the step leaves the host first, in words; empty if nothing does."""
    u = torch.finfo(getattr(torch, dtype)).eps / 2
    allowed = SURELY * roundings() ** 0.5 * u
    for name, here, there in _pairs(found.outputs, wanted.outputs):
        if here.shape != there.shape:
            return (
                f"the device leaves the host first in the output of {_short(name) or 'the model'}, "
                f"step 1: its shape is {tuple(here.shape)}, on the host {tuple(there.shape)}"
            )
        if distance(here, there) > allowed:
            return (
                f"the device leaves the host first in the output of {_short(name) or 'the model'}, "
                f"step 1: {distance(here, there):.1e} of its largest value, rounding explains "
                f"{allowed:.1e}"
            )
    for name, here in found.gradients.items():
        if name not in wanted.gradients:
            return f"on the host {_short(name)} has no gradient, step 1"
        if distance(here, wanted.gradients[name]) > allowed:
            return (
                f"the device leaves the host first in the gradient of {_short(name)}, step 1: "
                f"{distance(here, wanted.gradients[name]):.1e} of its largest value, rounding "
                f"explains {allowed:.1e}"
            )
    for name, here in found.moved.items():
        there = wanted.moved[name]
        way = float(there.abs().mean())
        if float((here - there).abs().mean()) > max(UPDATED_OTHERWISE, allowed) * way:
            return f"the device leaves the host first in the update of {_short(name)}, step 1"
    return ""


def _pairs(
    found: Sequence[tuple[str, Tensor]], wanted: Sequence[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Outputs of the same call of a module: a kernel may have made calls of others needless."""
    there: dict[str, deque[Tensor]] = defaultdict(deque)
    for name, output in wanted:
        there[name].append(output)
    for name, output in found:
        if there[name]:
            yield name, output, there[name].popleft()


def distance(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest value; infinity for shapes or NaN."""
    if found.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    difference = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
    return float("inf") if difference != difference else difference


def _short(name: str) -> str:
    return name.removeprefix("base_model.model.")


def _wide(value: Tensor) -> Tensor:
    return value.detach().to(HOST_DEVICE).double()


def without_padding(output: Tensor, mask: Tensor | None) -> Tensor:
    """An output whose padding is zero: what is computed there is used by nothing, and may differ.

    Args:
        mask: (B, T), 0 for padding; of outputs (B, T, ...).
    """
    if mask is None or output.shape[:2] != mask.shape:
        return output
    return output.masked_fill((mask == 0).reshape(*mask.shape, *[1] * (output.dim() - 2)), 0.0)


def _output_into(
    outputs: list[tuple[str, Tensor]], name: str, masks: Sequence[Tensor]
) -> Callable[..., None]:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                outputs.append((name, without_padding(_wide(leaf), masks[-1] if masks else None)))
                return

    return hook


def _gradient_into(gradients: dict[str, Tensor], name: str) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        value = _wide(gradient)
        gradients[name] = gradients[name] + value if name in gradients else value

    return hook


class Digests(TorchDispatchMode):
    """Notes what each operation on a device gives.

    Attributes:
        found: (operation, where, digest) in order.
    """

    def __init__(self, device_type: str, place: Place) -> None:
        super().__init__()
        self._device_type = device_type
        self._place = place
        self.found: list[tuple[str, str, bytes]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, then note it."""
        self._place.note()
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.startswith(("empty", "new_empty")):
            return result
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(leaf.device.type == self._device_type for leaf in tensors):
            name = f"{func.namespace}::{func.overloadpacket.__name__}"
            self.found.append((name, str(self._place), digest(tensors)))
        return result


def digest(tensors: Sequence[Tensor]) -> bytes:
    """Of their values."""
    found = hashlib.sha256()
    for each in tensors:
        plain = each.detach().to(HOST_DEVICE).contiguous()
        found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.digest()
