"""Which layers an adapter goes beside, and the rank and alpha that each of them has."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anygauge.config.schema import AdapterSection
from anygauge.interface import ModelError
from anygauge.models.peft_limits import takes_no_adapter
from anygauge.util.text import did_you_mean

if TYPE_CHECKING:
    from torch import nn

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True)
class Factors:
    """Inner dimension of a layer's two factors, and what scales their product."""

    rank: int
    alpha: float


def adaptable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers that can carry an adapter, by whole name: linear ones and embeddings."""
    return {name: module for name, module in model.named_modules() if is_layer(module)}


def is_layer(module: nn.Module) -> bool:
    """Whether peft has a layer of its own to put around it."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | nn.Embedding | Conv1D)


def divided(model: Any, plan: Iterable[str]) -> tuple[list[str], list[str]]:
    """(layers, tensors) to give to peft.

    On transformers 5, peft takes certain names of layers for those of experts that were layers
    before, and adapts the experts in their place. Such layers' weights are named as tensors.
    """
    layers = adaptable_layers(model)
    taken = _taken_for_experts(model, _last_parts(layers))
    chosen = [name for name in plan if name in layers]
    fused = [name for name in chosen if name.rpartition(".")[2] in taken]
    tensors = [name for name in plan if name not in layers]
    return [n for n in chosen if n not in fused], tensors + [f"{name}.weight" for name in fused]


def _taken_for_experts(model: Any, last_parts: list[str]) -> set[str]:
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # transformers before 5, which renames nothing
        return set()
    from peft import LoraConfig

    config = LoraConfig(target_modules=list(last_parts))
    convert_peft_config_for_transformers(config, model=model, conversions=None)
    return set(last_parts) - set(config.target_modules or ())


def planned_layers(model: Any, section: AdapterSection) -> dict[str, Factors]:
    """Every layer that the section names, with its factors, in the model's order.

    Raises:
        ModelError: a name, an expression or a group matches nothing, or two groups one layer.
    """
    usual = Factors(section.r, section.alpha)
    plan = dict.fromkeys(matching_layers(model, section.targets, "adapter.targets"), usual)
    group_of: dict[str, int] = {}
    for index, group in enumerate(section.groups):
        field = f"adapter.groups[{index}]"
        factors = Factors(group.r or usual.rank, group.alpha or usual.alpha)
        for name in matching_layers(model, group.targets, f"{field}.targets"):
            if name in group_of:
                raise ModelError(
                    f"{field}.targets: layer {name!r} is also in adapter.groups[{group_of[name]}]; "
                    "a layer has one r and one alpha, so name it in only one group"
                )
            group_of[name] = index
            plan[name] = factors
    return {name: plan[name] for name in adaptable_layers(model) if name in plan}


def planned_parameters(model: Any, section: AdapterSection) -> dict[str, Factors]:
    """Every tensor that `target_parameters` names, with its factors, in the model's order.

    Raises:
        ModelError: a name matches nothing, or only a layer's own weight.
    """
    field = "adapter.target_parameters"
    layers = adaptable_layers(model)
    tensors = dict(model.named_parameters())
    # Shapes tell nothing here: a strategy may have sharded the tensors.
    free = [name for name in tensors if name.rpartition(".")[0] not in layers]
    found: set[str] = set()
    for target in section.target_parameters:
        matches = {name for name in free if _ends_with(name, target)}
        if not matches:
            owned = next((name for name in tensors if _ends_with(name, target)), None)
            why = (
                f"no tensor is called {target!r}"
                if owned is None
                else f"{target!r} belongs to the layer {owned.rpartition('.')[0]!r}; name that in "
                "adapter.targets"
            )
            short = sorted({".".join(n.split(".")[-2:]) for n in free if tensors[n].dim() > 1})
            raise ModelError(f"{field}: {why}. Tensors here: {', '.join(short) or 'none'}")
        found |= matches
    usual = Factors(section.r, section.alpha)
    return {name: usual for name in free if name in found}


def check_saved_modules(model: Any, section: AdapterSection, planned: Iterable[str]) -> None:
    """Refuse names in `modules_to_save` that mean nothing, or what has factors already.

    Args:
        planned: layers and tensors that have factors.

    Raises:
        ModelError: says which.
    """
    field = "adapter.modules_to_save"
    owning = [
        name
        for name, module in model.named_modules()
        if name and any(True for _ in module.parameters())
    ]
    for target in section.modules_to_save:
        # As peft matches: the end of a name, which need not begin at a dot.
        matches = [name for name in owning if target and name.endswith(target)]
        if not matches:
            hint = did_you_mean(target, _last_parts(owning)) or ";"
            shown = ", ".join(_last_parts(owning))
            raise ModelError(
                f"{field}: no module's name ends with {target!r}{hint} modules here: {shown}"
            )
        taken = next((n for m in matches for n in planned if n == m or n.startswith(f"{m}.")), None)
        if taken is not None:
            raise ModelError(
                f"{field}: {target!r} would be trained whole, but {taken!r} also has factors; "
                "remove one of the two from the run file"
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
        return _matching_expression(layers, targets, field)
    listed = [targets] if isinstance(targets, str) else targets
    if not listed:
        raise ModelError(f"{field}: an empty list names no layer; {_valid(layers)}")
    found: set[str] = set()
    for target in listed:
        if target == ALL_LINEAR:
            found.update(_all_linear(model, layers))
            continue
        matches = {name for name in layers if _ends_with(name, target)}
        if not matches:
            raise ModelError(f"{field}: {_nothing_called(model, layers, target)}")
        found |= matches
    return [name for name in layers if name in found]


def surely_match(section: AdapterSection, shapes: Mapping[str, tuple[int, ...]] | None) -> bool:
    """Whether the targets name layers of a model, as far as its tensors tell; needs no torch.

    False means that only the built model can tell, by `planned_layers`.

    Args:
        shapes: tensor name -> shape; None where they are not known.
    """
    if section.start_from is not None or section.groups or section.target_parameters:
        return False
    if section.targets == ALL_LINEAR:
        return True
    if shapes is None or not section.targets:
        return False
    suffix = ".weight"
    layers = [
        n.removesuffix(suffix) for n, s in shapes.items() if n.endswith(suffix) and len(s) == 2
    ]
    if isinstance(section.targets, str):
        return False  # an expression matches the model's names, which may have another prefix
    return all(
        target == ALL_LINEAR or any(_ends_with(name, target) for name in layers)
        for target in section.targets
    )


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def matched_names(text: str, names: Iterable[str]) -> list[str]:
    """The names that an expression matches as a whole."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what may mean something else in a later Python
        pattern = re.compile(text)
    return [name for name in names if pattern.fullmatch(name)]


def _matching_expression(layers: Mapping[str, nn.Module], text: str, field: str) -> list[str]:
    found = matched_names(text, layers)
    if not found:
        raise ModelError(
            f"{field}: the expression {text!r} matches no layer; it must match a whole name, such "
            f"as {next(iter(layers), '')!r}; to match the last part of a name, write a list: "
            f"[{text}]; {_valid(layers)}"
        )
    return found


def _all_linear(model: Any, layers: Mapping[str, nn.Module]) -> list[str]:
    from torch import nn

    getter = getattr(model, "get_output_embeddings", None)
    output = getter() if getter is not None else None
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
            f"have an adapter; {_valid(layers)}"
        )
    hint = did_you_mean(target, [*_last_parts(layers), ALL_LINEAR]) or ";"
    return f"no layer is called {target!r}{hint} {_valid(layers)}"


def _valid(layers: Iterable[str]) -> str:
    return f"layers here: {', '.join(_last_parts(layers))}; or use all-linear"


def _last_parts(names: Iterable[str]) -> list[str]:
    return sorted({name.rsplit(".", 1)[-1] for name in names})


def short_names(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The shortest list that selects exactly `names`: last parts where all of that name are in."""
    wanted = set(names)
    everything = [name for name, _ in model.named_modules()]
    short: set[str] = set()
    for last in _last_parts(wanted):
        called = {name for name in everything if _ends_with(name, last)}
        short |= {last} if called <= wanted else called & wanted
    return sorted(short)


def short_parameter_names(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The shortest list that selects exactly `names`: two last parts where all so named are in."""
    wanted = set(names)
    short: set[str] = set()
    for name in wanted:
        last = ".".join(name.split(".")[-2:])
        called = {other for other, _ in model.named_parameters() if _ends_with(other, last)}
        short.add(last if called <= wanted else name)
    return sorted(short)


def patterns(values: Mapping[str, float], usual: float) -> dict[str, float]:
    """Name or last part -> value, for the layers whose value is not the usual one."""
    found: dict[str, float] = {}
    for last in _last_parts(values):
        here = {name: value for name, value in values.items() if _ends_with(name, last)}
        if len(set(here.values())) == 1:
            found[last] = next(iter(here.values()))
        else:
            found.update(here)
    return {name: value for name, value in found.items() if value != usual}
