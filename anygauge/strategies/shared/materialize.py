"""Give a skeleton's parameters their values, one unit at a time.

A unit is a decoder layer, or another submodule without layers of its own. At no time is more than
one unit whole in memory that the strategy has not yet placed: sharding strategies shard each unit
as soon as it has its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.interface import ModelFactory, UnsupportedError


def units(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Names and modules to materialize, children before the parents that own parameters too."""
    has_layers = any(isinstance(m, nn.ModuleList) for m in model.modules())
    if not has_layers:
        if any(True for _ in model.parameters()):
            yield prefix, model
        return
    for name, child in model.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(model, nn.ModuleList):
            yield path, child
        else:
            yield from units(child, path)
    if any(True for _ in model.parameters(recurse=False)):
        yield prefix, model


def decoder_of(causal: Any) -> nn.Module:
    """The model without its output layer."""
    found = getattr(causal, causal.base_model_prefix, None)
    if not isinstance(found, nn.Module):
        raise UnsupportedError(
            f"strategy.tp: anygauge does not know the decoder of {type(causal).__name__}. Set "
            "strategy.tp: 1"
        )
    return found


def causal_of(model: Any) -> Any:
    """The model that an adapter is around, or itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Outermost members of module lists that have parameters: a layer's experts are its own."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from (layer for layer in child if any(True for _ in layer.parameters()))
        else:
            yield from decoder_layers(child)


def owners_of(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Map each parameter to its modules, and its name there; a tied one has several."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            found.setdefault(id(parameter), []).append((module, name))
    return list(found.values())


def materialize(
    model: nn.Module,
    factory: ModelFactory,
    *,
    device: torch.device,
    dtype: torch.dtype,
    read: bool = True,
    place: Callable[[nn.Module], None] | None = None,
) -> None:
    """Turn every meta parameter into a real one on `device`, and move buffers there.

    Args:
        read: False leaves the values undefined: `place` will bring them from another rank.
        place: called with each unit once it is real; may shard it.
    """
    owners = {id(group[0][0]._parameters[group[0][1]]): group for group in owners_of(model)}
    for path, unit in units(model):
        waiting = {name: p for name, p in unit.named_parameters() if p.is_meta}
        if not waiting:
            continue
        values = factory.values(model, path) if read else {}
        for name, meta in waiting.items():
            kept = dtype if meta.is_floating_point() else meta.dtype
            data = (
                values[name].to(device, kept)
                if read
                else torch.empty(meta.shape, dtype=kept, device=device)
            )
            real = nn.Parameter(data, requires_grad=meta.requires_grad)
            # A tied weight has several owners: all must keep sharing one parameter.
            for module, attribute in owners[id(meta)]:
                module._parameters[attribute] = real
        if place is not None:
            place(unit)

    factory.fill_buffers(model)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def buffers_of(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Every buffer with its owner, to put back what an engine casts: rotary tables lose digits."""
    return [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]


def restore_buffers(buffers: list[tuple[nn.Module, str, Tensor]]) -> None:
    """Put back buffers whose type an engine changed."""
    for module, name, buffer in buffers:
        current = module._buffers.get(name)
        if current is not None and current.dtype != buffer.dtype:
            module._buffers[name] = buffer.to(current.device)
