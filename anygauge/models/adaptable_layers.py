"""Which layers an adapter goes beside, and their rank and alpha; or which weights are trained."""

from __future__ import annotations

import copy
import difflib
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anygauge.config.schema import AdapterSection
from anygauge.interface import ModelError
from anygauge.models.factors import Factors
from anygauge.util.text import did_you_mean

if TYPE_CHECKING:
    from torch import nn

ALL_LINEAR = "all-linear"
_ROWS = 7
"""Of the input that a layer is tried with: no number of groups divides it."""


def adaptable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers that can carry an adapter, by whole name: linear ones and embeddings."""
    return {name: module for name, module in model.named_modules() if is_layer(module)}


def is_layer(module: nn.Module) -> bool:
    """Whether peft has a layer of its own to put around it."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | nn.Embedding | Conv1D)


def peft_targets(model: Any, plan: Iterable[str]) -> tuple[list[str], list[str]]:
    """peft's ``target_modules`` and ``target_parameters`` for layers and tensors.

    On transformers 5, peft takes certain names of layers for those of experts that were layers
    before, and adapts the experts in their place. Such layers' weights are named as tensors.
    """
    layers = adaptable_layers(model)
    taken = _taken_for_experts(model, _last_parts(layers))
    modules: set[str] = set()
    tensors: set[str] = set()
    for name in plan:
        if name not in layers:
            tensors.add(name)
        elif name.rpartition(".")[2] in taken:
            tensors.add(f"{name}.weight")
        else:
            modules.add(name)
    return (
        _shortest_list(modules, [name for name, _ in model.named_modules()], 1),
        _shortest_list(tensors, [name for name, _ in model.named_parameters()], 2),
    )


def _taken_for_experts(model: Any, last_parts: list[str]) -> set[str]:
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # transformers before 5, which renames nothing
        return set()
    from peft import LoraConfig

    config = LoraConfig(target_modules=list(last_parts))
    convert_peft_config_for_transformers(config, model=model, conversions=None)
    return set(last_parts) - set(config.target_modules or ())


def _shortest_list(wanted: set[str], everything: Iterable[str], parts: int) -> list[str]:
    """The shortest list that selects `wanted`: so many last parts where all so named are in."""
    short: set[str] = set()
    for last in {".".join(name.split(".")[-parts:]) for name in wanted}:
        called = {name for name in everything if _ends_with(name, last)}
        short |= {last} if called <= wanted else called & wanted
    return sorted(short)


def patterns(values: Mapping[str, float], usual: float) -> dict[str, Any]:
    """Name or last part -> value, for the layers whose value is not the usual one."""
    found: dict[str, float] = {}
    for last in _last_parts(values):
        here = {name: value for name, value in values.items() if _ends_with(name, last)}
        if len(set(here.values())) == 1:
            found[last] = next(iter(here.values()))
        else:
            found.update(here)
    return {name: value for name, value in found.items() if value != usual}


def planned_layers(model: Any, section: AdapterSection) -> dict[str, Factors]:
    """Every layer that the section names, with its factors, in the model's order.

    Of two groups that name a layer, the later one holds.

    Raises:
        ModelError: a name or an expression matches nothing.
    """
    usual = Factors(section.r, section.alpha)
    plan = dict.fromkeys(matching_layers(model, section.targets, "adapter.targets"), usual)
    for index, group in enumerate(section.groups):
        factors = Factors(group.r or usual.r, group.alpha or usual.alpha)
        names = matching_layers(model, group.targets, f"adapter.groups[{index}].targets")
        plan |= dict.fromkeys(names, factors)
    return {name: plan[name] for name in adaptable_layers(model) if name in plan}


def planned_parameters(model: Any, section: AdapterSection) -> dict[str, Factors]:
    """Every tensor that `target_parameters` names, with its factors, in the model's order.

    Raises:
        ModelError: a name matches nothing, or only a layer's own weight.
    """
    layers = adaptable_layers(model)
    # Shapes tell nothing here: a strategy may have sharded the tensors.
    tensors = dict(model.named_parameters())
    free = [name for name in tensors if name.rpartition(".")[0] not in layers]
    for target in section.target_parameters:
        if not any(_ends_with(name, target) for name in free):
            owner = next((n for n in layers if _ends_with(f"{n}.weight", target)), None)
            short = sorted({".".join(n.split(".")[-2:]) for n in free if tensors[n].dim() > 1})
            raise ModelError(
                "adapter.target_parameters: "
                + (
                    f"no tensor is called {target!r}"
                    if owner is None
                    else f"{target!r} belongs to the layer {owner!r}; name that in adapter.targets"
                )
                + f". Tensors here: {', '.join(short) or 'none'}"
            )
    usual = Factors(section.r, section.alpha)
    return {
        name: usual
        for name in free
        if any(_ends_with(name, target) for target in section.target_parameters)
    }


def check_saved_modules(model: Any, section: AdapterSection) -> None:
    """Refuse names in `modules_to_save` that mean nothing: peft would leave them out silently.

    Raises:
        ModelError: says which.
    """
    owning = [
        name for name, module in model.named_modules() if any(True for _ in module.parameters())
    ]
    for target in section.modules_to_save:
        # As peft matches: the end of a name, which need not begin at a dot.
        if not target or not any(name.endswith(target) for name in owning):
            known = _last_parts(filter(None, owning))
            hint = did_you_mean(target, known) or ";"
            raise ModelError(
                f"adapter.modules_to_save: no module's name ends with {target!r}{hint} modules "
                f"here: {', '.join(known)}"
            )


def matching_layers(model: Any, targets: str | list[str], field: str) -> list[str]:
    """Whole names of the layers that `targets` means, in the model's order.

    Args:
        targets: ``all-linear`` (all but the output layer), one expression over whole names, or a
            list of last parts of names, in which ``all-linear`` may stand too.
        field: for messages.

    Raises:
        ModelError: something in `targets` matches no layer that can carry an adapter.
    """
    layers = adaptable_layers(model)
    if isinstance(targets, str) and targets != ALL_LINEAR:
        if not (found := matched_names(targets, layers)):
            raise ModelError(
                f"{field}: the expression {targets!r} matches no layer; it must match a whole "
                f"name, such as {next(iter(layers), '')!r}; to match the last part of a name, "
                f"write a list: [{targets}]; {_valid_names(layers)}"
            )
        return found
    listed = [targets] if isinstance(targets, str) else targets
    chosen: set[str] = set()
    for target in listed:
        matches = (
            _all_linear(model, layers)
            if target == ALL_LINEAR
            else [name for name in layers if _ends_with(name, target)]
        )
        if not matches and target != ALL_LINEAR:
            raise ModelError(f"{field}: {_nothing_called(model, layers, target)}")
        chosen.update(matches)
    return [name for name in layers if name in chosen]


def surely_match(section: AdapterSection, shapes: Mapping[str, tuple[int, ...]] | None) -> bool:
    """Whether the targets name layers of a model, as far as its tensors tell; needs no torch.

    False means that only the built model can tell, by `planned_layers`.

    Args:
        shapes: tensor name -> shape; None where they are not known.
    """
    targets = section.targets
    if section.start_from is not None or section.groups or section.target_parameters:
        return False
    if targets == ALL_LINEAR:
        return True
    if shapes is None or not targets or isinstance(targets, str):
        return False  # an expression matches the model's names, which may have another prefix
    suffix = ".weight"
    layers = [
        n.removesuffix(suffix) for n, s in shapes.items() if n.endswith(suffix) and len(s) == 2
    ]
    return all(t == ALL_LINEAR or any(_ends_with(name, t) for name in layers) for t in targets)


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def matched_names(text: str, names: Iterable[str]) -> list[str]:
    """The names that an expression matches as a whole."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what may mean something else in a later Python
        pattern = re.compile(text)
    return [name for name in names if pattern.fullmatch(name)]


def _all_linear(model: Any, layers: Mapping[str, nn.Module]) -> list[str]:
    from torch import nn

    output = model.get_output_embeddings()
    return [
        name
        for name, module in layers.items()
        if not isinstance(module, nn.Embedding)
        and module is not output
        and not takes_no_adapter(model, name, module)
    ]


def _nothing_called(model: nn.Module, layers: Mapping[str, nn.Module], target: str) -> str:
    other = next(
        (m for name, m in model.named_modules() if name and _ends_with(name, target)), None
    )
    if other is not None:
        return (
            f"{target!r} is a {type(other).__name__}, but only linear layers and embeddings can "
            f"have an adapter; {_valid_names(layers)}"
        )
    hint = did_you_mean(target, [*_last_parts(layers), ALL_LINEAR]) or ";"
    return f"no layer is called {target!r}{hint} {_valid_names(layers)}"


def _valid_names(layers: Iterable[str]) -> str:
    return f"layers here: {', '.join(_last_parts(layers))}; or use all-linear"


def _last_parts(names: Iterable[str]) -> list[str]:
    return sorted({name.rsplit(".", 1)[-1] for name in names})


def takes_no_adapter(model: Any, name: str, module: nn.Module) -> bool:
    """Whether peft or the architecture rules out an adapter beside a layer.

    An architecture's own kind of linear layer may compute something else than a product with its
    weight: routers return several tensors, some layers are divided into groups. In state-space
    models, kernels read the weights of some layers without calling them; which, peft knows.

    Args:
        model: of transformers.
        name: the layer's whole name.
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    # Layers of other libraries, such as quantized ones, are known to peft.
    if type(module).__module__ == type(model).__module__ and not _maps_rows(module):
        return True
    try:
        _check_lora_target_modules_mamba(LoraConfig(), model, name.rpartition(".")[2])
    except ValueError:
        return True
    return False


def _maps_rows(module: Any) -> bool:
    """Whether a layer gives one row of its output size for each row, tried without memory."""
    import torch
    from torch import nn

    if not isinstance(module, nn.Linear):
        return True
    shapes = {"weight": (module.out_features, module.in_features), "bias": (module.out_features,)}
    twin = copy.copy(module)
    twin._parameters = {
        key: None if value is None else nn.Parameter(torch.empty(shapes[key], device="meta"))
        for key, value in module._parameters.items()
        if key in shapes
    }
    try:
        with torch.no_grad():
            found = twin(torch.empty(1, _ROWS, module.in_features, device="meta"))
    except Exception:  # whatever a model's own class raises here: it does not map rows
        return False
    return isinstance(found, torch.Tensor) and found.shape == (1, _ROWS, module.out_features)


def freeze(model: nn.Module, trainable: Sequence[str], frozen: Sequence[str]) -> None:
    """Leave gradients to some of a model's own weights; a tied one goes by each of its names.

    Args:
        trainable: only what one of these expressions matches is trained; empty: everything is.
        frozen: what one of these matches is not.

    Raises:
        ModelError: an expression matches no parameter, or nothing is left to train.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    chosen = _identities(named, trainable, "train.trainable") or {id(p) for p in named.values()}
    chosen -= _identities(named, frozen, "train.frozen")
    for parameter in named.values():
        parameter.requires_grad_(id(parameter) in chosen and parameter.is_floating_point())
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ModelError(
            "train.trainable and train.frozen leave nothing to train: train.frozen matches all "
            "weights that would be trained"
        )


def _identities(
    named: Mapping[str, nn.Parameter], expressions: Sequence[str], field: str
) -> set[int]:
    found: set[int] = set()
    for index, text in enumerate(expressions):
        matches = matched_names(text, named)
        if not matches:
            near = difflib.get_close_matches(text, named, 3, 0.3) or list(named)[:3]
            raise ModelError(
                f"{field}[{index}]: the expression {text!r} matches no parameter; it must match a "
                f"whole name, such as {', '.join(near)}"
            )
        found.update(id(named[name]) for name in matches)
    return found
