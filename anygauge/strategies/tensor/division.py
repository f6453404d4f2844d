"""A model's layers in parts, for tensor parallelism: which parameters are cut, and where it is.

A block (attention, a feed-forward) begins with layers of which a rank has some outputs, and ends
with one of which it has the matching inputs. An adapter's factors are cut with their layer: beside
columns the second one, beside rows the first; the other is whole on every rank. A mixture of
experts is one block, whose output is a part of a sum; see `experts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from anygauge.interface import UnsupportedError
from anygauge.strategies.shared.degrees import Degrees
from anygauge.strategies.shared.layout import Cut
from anygauge.strategies.shared.materialize import causal_of, decoder_layers, decoder_of
from anygauge.strategies.shared.tensor_plans import (
    COLUMNS,
    EXPERTS,
    REMEDY,
    ROWS,
    WHOLE,
    plan_of,
    plan_pattern,
)
from anygauge.strategies.tensor.experts import Mixture, divide_experts, inner_experts

HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads")
"""What attention modules call the numbers of heads by which they shape their tensors."""


@dataclass(frozen=True, slots=True)
class DividedLayer:
    """One decoder layer, its parts in the order of the model.

    Attributes:
        entries: whose input all ranks need whole.
        rows: whose output is a part of a sum.
        whole: blocks that every rank has and computes alike, of all positions.
        mixtures: among both `entries` and `rows`.
    """

    module: nn.Module
    entries: list[nn.Module] = field(default_factory=list)
    rows: list[nn.Module] = field(default_factory=list)
    whole: list[nn.Module] = field(default_factory=list)
    mixtures: list[Mixture] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Division:
    """A model that was divided.

    Attributes:
        cuts: by the name of a parameter.
        inside: names of whole parameters between divided layers: what a rank finds as their
            gradient is a part of a sum.
        layers: of the decoder.
        embedding: the one whose vocabulary is divided; None where it is whole.
    """

    cuts: Mapping[str, Cut]
    inside: frozenset[str]
    layers: list[DividedLayer]
    embedding: nn.Module | None


def divide(model: nn.Module, count: int, index: int) -> Division:
    """Cut a model's parameters, in place, to this rank's parts.

    Args:
        model: adapted; the base may be on the meta device.
        count, index: parts, and this rank's.

    Raises:
        UnsupportedError: names a layer that cannot be divided.
    """
    causal = causal_of(model)
    decoder = decoder_of(causal)
    plan = plan_of(causal.config)
    styles = {path: plan.get(plan_pattern(path)) for path, _ in decoder.named_modules()}
    paths = {id(module): path for path, module in decoder.named_modules()}
    names = {id(module): name for name, module in model.named_modules()}
    cuts: dict[str, Cut] = {}
    inside: set[str] = set()
    layers = []

    def cut(module: nn.Module, key: str, dim: int, what: str = "") -> None:
        parameter = module._parameters[key]
        if parameter is None:
            return
        if parameter.shape[dim] % count:
            what = what or ("outputs" if dim == 0 else "inputs")
            raise UnsupportedError(
                f"strategy.tp: {count} ranks cannot share the {parameter.shape[dim]} {what} of "
                f"{names[id(module)]} evenly. {REMEDY}"
            )
        found = Cut(dim, index, count)
        piece = parameter.detach()[
            (*(slice(None),) * dim, found.place(parameter.shape[dim]))
        ].contiguous()
        module._parameters[key] = nn.Parameter(piece, parameter.requires_grad)
        cuts[f"{names[id(module)]}.{key}"] = found

    for layer in decoder_layers(decoder):
        divided = DividedLayer(layer)
        mixed: dict[int, Mixture] = {}
        for path, module in layer.named_modules():
            if styles.get(paths[id(module)]) == EXPERTS:
                mixture = Mixture(layer.get_submodule(path.rpartition(".")[0]), module)
                mixed |= {id(inner): mixture for inner in mixture.block.modules()}
        for child_path, module in layer.named_modules():
            style = styles.get(paths[id(module)])
            parent = layer.get_submodule(child_path.rpartition(".")[0])
            mixture_of = mixed.get(id(module))
            for key in module._parameters:
                if plan.get(plan_pattern(f"{paths[id(module)]}.{key}")) == COLUMNS:
                    cut(module, key, 0)
            if style == EXPERTS:
                assert mixture_of is not None, "experts are in a block"
                experts = inner_experts(module, names[id(module)])
                for key in experts._parameters:
                    cut(experts, key, 0, "experts")
                divide_experts(module, count, index)
                divided.entries.append(parent)
                divided.rows.append(parent)
                divided.mixtures.append(mixture_of)
            if style not in (COLUMNS, ROWS):
                continue
            base, first, second = _factors(module, names[id(module)])
            if style == COLUMNS:
                for key in ("weight", "bias"):
                    cut(base, key, 0)
                if second is not None:
                    cut(second, "weight", 0)
                entry = module if parent is layer else parent
                if mixture_of is None and all(entry is not each for each in divided.entries):
                    divided.entries.append(entry)
                    if entry is parent:
                        _divide_heads(entry, count)
            else:
                cut(base, "weight", 1)
                if first is not None:
                    cut(first, "weight", 1)
                (divided if mixture_of is None else mixture_of).rows.append(module)
        divided.whole.extend(_whole_blocks(divided))
        inside |= _names_inside(divided, names, cuts, causal.config, styles, paths)
        layers.append(divided)
    embedding = causal.get_input_embeddings()
    if not _may_be_cut(causal, embedding, count):
        embedding = None
    else:
        cut(embedding, "weight", 0)
    return Division(cuts, frozenset(inside), layers, embedding)


def _factors(module: Any, name: str) -> tuple[nn.Module, nn.Module | None, nn.Module | None]:
    """A layer's own linear one, and the factors of its adapter."""
    base = getattr(module, "base_layer", module)
    if type(base) is not nn.Linear:
        raise UnsupportedError(
            f"strategy.tp: {name} is a {type(base).__name__}, which cannot be divided; only "
            f"torch.nn.Linear can. {REMEDY}"
        )
    if base is module:
        return base, None, None
    (adapter,) = module.lora_A
    return base, module.lora_A[adapter], module.lora_B[adapter]


def _whole_blocks(divided: DividedLayer) -> list[nn.Module]:
    """Blocks without a divided layer; norms have vectors alone, and take positions one by one."""
    parts = {id(module) for module in (*divided.entries, *divided.rows)}
    return [
        child
        for child in divided.module.children()
        if not any(id(module) in parts for module in child.modules())
        and any(parameter.dim() > 1 for parameter in child.parameters())
    ]


def _divide_heads(module: nn.Module, count: int) -> None:
    for name in HEADS:
        number = getattr(module, name, None)
        if isinstance(number, int):
            setattr(module, name, number // count)


def _names_inside(
    divided: DividedLayer,
    names: Mapping[int, str],
    cuts: Mapping[str, Cut],
    config: Any,
    styles: Mapping[str, str | None],
    paths: Mapping[int, str],
) -> set[str]:
    """Whole parameters between the divided layers of one layer.

    Raises:
        UnsupportedError: one of them would have to be divided, and the plan does not say how.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", 1)
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    # A row layer's own bias is added to the sum.
    biases = {id(getattr(row, "base_layer", row)) for row in divided.rows}
    mixed = {id(module) for mixture in divided.mixtures for module in mixture.block.modules()}
    factors = {name for mixture in divided.mixtures for name in mixture.whole_names(names)}
    found: set[str] = set()
    for part in (*divided.entries, *divided.rows):
        for module in part.modules():
            for key, parameter in module._parameters.items():
                name = f"{names[id(module)]}.{key}"
                if parameter is None or name in cuts or (key == "bias" and id(module) in biases):
                    continue
                known = styles.get(paths[id(module)]) == WHOLE or ".lora_" in name
                known = known or name in factors
                of_heads = id(module) not in mixed and tuple(parameter.shape) == (head_size,)
                if not known and not of_heads:
                    raise UnsupportedError(
                        f"strategy.tp: {name} is between divided layers, and anygauge does not "
                        f"know how to divide it. {REMEDY}"
                    )
                found.add(name)
    return found


def _may_be_cut(causal: Any, embedding: Any, count: int) -> bool:
    head = causal.get_output_embeddings()
    tied = head is not None and getattr(head, "weight", None) is embedding.weight
    return type(embedding) is nn.Embedding and not tied and embedding.num_embeddings % count == 0


def partial_gradients(
    model: nn.Module, division: Division, options: Degrees, names: Sequence[str]
) -> list[bool]:
    """Tell which trained parameters get only a part of the gradient on a rank.

    Whole are those of parameters that every rank uses alike, and those of a rank's own parts.
    """
    causal = causal_of(model)
    decoder = decoder_of(causal)
    at = dict(model.named_parameters(remove_duplicate=False))
    modules = [module for module in decoder.modules() if module is not decoder]
    layers = {id(m) for layer in decoder_layers(decoder) for m in layer.modules()}
    begin = next(n for n, module in enumerate(modules) if id(module) in layers)
    # An embedding and what stands beside it come first in every known plan's decoder.
    before = {id(p) for m in modules[:begin] for p in m.parameters() if not _contains(m, layers)}
    head = {id(p) for p in causal.get_output_embeddings().parameters()}
    found = []
    for name in names:
        parameter = id(at[name])
        if name in division.cuts:
            found.append(False)
        elif name in division.inside or parameter in head:
            found.append(True)
        elif parameter in before:
            found.append(division.embedding is None)
        else:
            found.append(options.sequence_parallel)
    return found


def _contains(module: nn.Module, layers: set[int]) -> bool:
    return any(id(inner) in layers for inner in module.modules())
