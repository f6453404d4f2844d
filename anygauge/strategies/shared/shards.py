"""Parameters that are DTensors: this rank's part of them, the whole, and their first values."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from anygauge.interface import BuildContext, ModelFactory
from anygauge.strategies.shared.common import float_parameters, prepare_layers, torch_dtype
from anygauge.strategies.shared.flat import FlatLayers
from anygauge.strategies.shared.layout import Cut, GroupLayout
from anygauge.strategies.shared.materialize import owners_of, units


class ShardLayout(GroupLayout):
    """Parameters are DTensors, which show their whole shapes; see `TensorLayout`."""

    def local(self, parameter: nn.Parameter) -> nn.Parameter:
        """See `TensorLayout.local`."""
        assert isinstance(parameter, DTensor)
        return nn.Parameter(parameter.to_local().detach())

    def gather(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """See `TensorLayout.gather`."""
        assert isinstance(parameter, DTensor)
        whole: Tensor = DTensor.from_local(
            part.to(self._device),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        ).full_tensor()
        return whole

    def part(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """See `TensorLayout.part`."""
        return whole[part_of(parameter)]


def part_of(parameter: Tensor, cut: Cut | None = None) -> tuple[slice, ...]:
    """Return where this rank's part of a DTensor lies in the whole; of a plain tensor, all of it.

    Args:
        cut: made before, of which the tensor is a part.

    torch divides a dimension into pieces of equal size, of which the last ones may be shorter, or
    empty; the outer dimension of a mesh comes first.
    """
    ends = [(0, size) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        place = parameter.device_mesh.get_coordinate()
        assert place is not None, "this rank is part of the mesh"
        for dimension, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                start, end = ends[placement.dim]
                piece = -(-(end - start) // parameter.device_mesh.size(dimension))
                first = min(start + place[dimension] * piece, end)
                ends[placement.dim] = (first, min(first + piece, end))
    if cut is not None:
        before = cut.index * parameter.shape[cut.dim]
        ends[cut.dim] = (before + ends[cut.dim][0], before + ends[cut.dim][1])
    return tuple(slice(start, end) for start, end in ends)


def sharded_later(
    context: BuildContext, *, masters: bool = False, reentrant: bool = False
) -> tuple[nn.Module, Mapping[str, str]]:
    """A model before it has values, whose layers recompute and are compiled as the run asks for.

    Parameters have the type of arithmetic; codes of quantized weights stay what they are.

    Args:
        masters: trained parameters have the optimizer's, and are converted when they are gathered.
        reentrant: layers recompute by torch's reentrant form.

    Returns:
        As `ModelFactory.adapted_on_meta`.
    """
    dtype = torch_dtype(context.workload.precision.param_dtype)
    model, names = context.factory.adapted_on_meta()
    for parameter in float_parameters(model):
        is_master = masters and parameter.requires_grad
        parameter.data = parameter.data.to(torch.float32 if is_master else dtype)
    prepare_layers(model, context, reentrant=reentrant)
    return model, names


def fill(
    model: nn.Module,
    names: Mapping[str, str],
    factory: ModelFactory,
    device: torch.device,
    *,
    storage: torch.device | None = None,
    foreign: Container[int] = (),
    cuts: Mapping[str, Cut] = MappingProxyType({}),
    flat: FlatLayers | None = None,
) -> None:
    """Make a sharded model real, and give this rank's parts their values, unit by unit.

    Args:
        model, names: of `ModelFactory.adapted_on_meta`; parameters have become DTensors since.
        device: that computes.
        storage: where parts lie; None: there.
        foreign: parameters that this rank does not hold, by identity: they are on meta afterwards.
        cuts: by name, of parameters that were cut before they became DTensors.
        flat: holds parts of parameters that are no DTensors.
    """
    _make_real(model, storage or device, foreign)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta:  # what comes with values is brought with them
                module._buffers[name] = buffer.to(device)
    at = dict(model.named_parameters(remove_duplicate=False))
    adapted = {inner: name for name, inner in names.items()}

    def wanted(name: str, shape: Sequence[int]) -> tuple[slice, ...] | None:
        parameter = at[adapted[name]]
        if flat is not None and parameter in flat:
            return flat.rows(parameter)
        part = part_of(parameter, cuts.get(adapted[name]))
        empty = any(piece.start == piece.stop for piece in part)
        return None if parameter.is_meta or empty else part

    skeleton = factory.skeleton()
    owners = owners_of(skeleton)
    with torch.no_grad():
        for path, unit in units(skeleton):
            waiting = [
                f"{path}.{name}" if path else name
                for name, parameter in unit.named_parameters()
                if parameter.is_meta
            ]
            if not waiting or all(at[adapted[name]].is_meta for name in waiting):
                _leave_meta(unit, owners)
                continue
            for name, value in factory.values(skeleton, path, wanted).items():
                parameter = at[adapted[f"{path}.{name}" if path else name]]
                if flat is not None and parameter in flat:
                    flat.store(parameter, value)
                    continue
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.copy_(value)
            _take_buffers(unit, path, model, adapted, device)
            _leave_meta(unit, owners)


def _take_buffers(
    unit: nn.Module, path: str, model: nn.Module, adapted: Mapping[str, str], device: torch.device
) -> None:
    """Bring buffers that came with a unit's values to the model, and let go of them."""
    for inner, module in unit.named_modules():
        found = {name: b for name, b in module.named_buffers(recurse=False) if not b.is_meta}
        own = next((name for name, _ in module.named_parameters(recurse=False)), None)
        if not found or own is None:
            continue
        name = ".".join(filter(None, (path, inner, own)))
        owner = model.get_submodule(adapted[name].rpartition(".")[0])
        for key, buffer in found.items():
            owner._buffers[key] = buffer.to(device)
            module._buffers[key] = torch.empty_like(buffer, device="meta")


def _make_real(model: nn.Module, place: torch.device, foreign: Container[int]) -> None:
    """Give parameters memory at a place, without values; those of others keep or get none."""

    def moved(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return tensor
        here = torch.device("meta") if id(tensor) in foreign else place
        return torch.empty_like(tensor, device=here) if tensor.is_meta else tensor.to(here)

    tied = owners_of(model)
    model._apply(moved)  # as FSDP2 wants it done
    for (first, name), *others in tied:
        for module, key in others:
            module._parameters[key] = first._parameters[name]


def _leave_meta(unit: nn.Module, owners: Sequence[Sequence[tuple[nn.Module, str]]]) -> None:
    """Put something without memory in place of parameters that have served, with all their owners.

    A parent of a unit looks at whether its own are the only ones left; a tied one has its values.
    """
    served = {id(module) for module in unit.modules()}
    for group in owners:
        if not any(id(module) in served for module, _ in group):
            continue
        module, key = group[0]
        # One for all: who lists names sees that they share it. What was drawn is let go of.
        shape = module.get_parameter(key).shape
        nothing = nn.Parameter(torch.zeros(()).expand(shape), requires_grad=False)
        for module, key in group:
            module._parameters[key] = nothing
