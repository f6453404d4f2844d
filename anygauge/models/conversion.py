"""How a checkpoint's tensors become a model's parameters, and back: transformers' own rules.

Since its version 5, transformers keeps an architecture's parameters in another form than the files
that were published: experts in one tensor, other names and prefixes. It says how one becomes the
other (``transformers.conversion_mapping``); here its operations are applied to the tensors that one
parameter needs, when that parameter is read. Before version 5, names alone are matched.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from anygauge.interface import ModelError
from anygauge.models.model_files import LazyTensor, WeightFiles, check_shape
from anygauge.util.text import first_line

ALL = (...,)


class Value(Protocol):
    """A parameter's value in the files."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole value."""
        ...

    def read(self, part: tuple[Any, ...]) -> Tensor:
        """A part of it, on the host, in the type it has on disk."""
        ...


@dataclass(frozen=True, slots=True)
class Conversion:
    """Tensors of the files that become one or more parameters together.

    Attributes:
        converter: transformers' description, of which a copy collects tensors and converts them.
        first: the parameter that it knows the result by.
        sources: the tensors of each of its patterns, in order.
    """

    converter: Any
    first: str
    sources: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Name the sources, for messages."""
        names = [name for group in self.sources.values() for name in group]
        return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]

    @property
    def is_stacked(self) -> bool:
        """Whether the result's first dimension numbers the sources, to be read one by one."""
        kinds = [(type(one).__name__, getattr(one, "dim", -1)) for one in self._operations]
        if kinds[:1] == [("Fp8Dequantize", -1)]:
            kinds = kinds[1:]
        return kinds[:1] == [("MergeModulelist", 0)] and all(
            name == "Concatenate" and dim > 0 for name, dim in kinds[1:]
        )

    @property
    def by_rows(self) -> bool:
        """Whether rows of the result, in the first dimension, come of the sources' rows alone."""
        return [type(one).__name__ for one in self._operations] == ["Mxfp4Dequantize"]

    @property
    def _operations(self) -> list[Any]:
        return list(self.converter.operations)

    def apply(
        self,
        model: nn.Module,
        files: WeightFiles,
        chosen: slice = slice(None),
        *,
        values: bool = True,
    ) -> dict[str, Tensor]:
        """Parameter name -> its value.

        Args:
            model: the skeleton, whose configuration and shapes some operations ask for.
            chosen: of each pattern's sources, or of their rows.
            values: False: shapes and types alone, on tensors without memory.

        Raises:
            ModelError: the operations refuse these tensors.
        """
        converter = copy.deepcopy(self.converter)
        some, part = (slice(None), (chosen,)) if self.by_rows else (chosen, ALL)

        def read(name: str) -> Tensor:
            lazy = files.lazy_tensor(name)
            if values:
                return lazy.read(part)
            return torch.empty(lazy.shape, dtype=lazy.dtype, device="meta")

        try:
            for pattern, names in self.sources.items():
                for name in names[some]:
                    # Called by the operations one after the other, and not kept by them.
                    converter.add_tensor(self.first, name, pattern, partial(read, name))
            made = converter.convert(self.first, model=model, config=model.config)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f"{files.folder}: {self.first} cannot be made from {self} by transformers' "
                f"conversion: {first_line(error)}. Does config.json belong to these weights?"
            ) from error
        return {name: v[0] if isinstance(v, list) else v for name, v in made.items()}


class Weights:
    """A model's parameters and stored buffers, as its files have them.

    Args:
        model: a skeleton; only shapes and names of it are used.
        quantizer: transformers' own, which adds how its format becomes plain numbers.

    Raises:
        ModelError: a tensor of the files has no place in the model, or a parameter no tensor.
    """

    def __init__(self, model: Any, files: WeightFiles, quantizer: Any = None) -> None:
        self.files = files
        self._model = model
        self._plain: dict[str, str] = {}
        self._conversions: dict[str, tuple[Conversion, str, tuple[int, ...]]] = {}
        self._twins: dict[str, list[str]] = {}
        self._assign_tensors(quantizer)

    def _assign_tensors(self, quantizer: Any) -> None:
        """Give every tensor of the files its place."""
        one_name = {id(t): name for name, t in tensors_of(self._model)}
        places = {name: one_name[id(t)] for name, t in tensors_of(self._model, every_name=True)}
        rules = Rules.of(self._model, quantizer)
        pending: dict[str, Conversion] = {}
        strange: list[str] = []
        # In the order in which the conversions expect tensors: numbers by their value.
        for tensor in sorted(self.files.names(), key=_by_number):
            name, pattern = rules.place(tensor, places)
            if name not in places:
                strange.append(name)
            elif pattern is None:
                if places[name] in self._plain:
                    self._twins.setdefault(places[name], []).append(tensor)
                else:
                    self._plain[places[name]] = tensor
            else:
                made = pending.setdefault(name, Conversion(rules.converters[pattern], name))
                made.sources.setdefault(pattern, []).append(tensor)
        for conversion in pending.values():
            shapes = conversion.apply(self._model, self.files, values=False)
            for name, value in shapes.items():
                if name in places:
                    self._conversions[places[name]] = (conversion, name, tuple(value.shape))
                else:
                    strange.append(name)
        lacking = [n for n in one_name.values() if n not in self._plain | self._conversions]
        self._refuse_mismatch(lacking, [n for n in strange if not _known_beside(self._model, n)])

    def _refuse_mismatch(self, lacking: Sequence[str], strange: Sequence[str]) -> None:
        if not lacking and not strange:
            return
        parts = []
        if lacking:
            every = len(dict(tensors_of(self._model)))
            parts.append(
                f"{len(lacking)} of the model's {every} parameters have no tensor, first "
                f"{lacking[0]!r}"
            )
        if strange:
            parts.append(
                f"{len(strange)} tensors have no place in a {type(self._model).__name__}: "
                + ", ".join(repr(n) for n in sorted(strange)[:3])
            )
        raise ModelError(
            f"{self.files.folder}: {'; '.join(parts)}. Does config.json belong to these weights? "
            "If it does, the installed transformers does not know the files' layout: load and save "
            "the model once with the transformers version that its authors name"
        )

    def values(self, names: Iterable[str]) -> dict[str, Value]:
        """The values of these parameters; one conversion serves all of them that come from it."""
        shared: dict[int, _ConvertedValues] = {}
        found: dict[str, Value] = {}
        for name in names:
            if name in self._plain:
                found[name] = self._tensor(name)
            else:
                conversion, result, shape = self._conversions[name]
                made = shared.setdefault(
                    id(conversion), _ConvertedValues(conversion, self._model, self.files)
                )
                found[name] = _StackedPart(result, made, shape)
        return found

    def check_shapes(self) -> None:
        """Refuse files whose tensors do not have the model's shapes; reads none of them.

        Raises:
            ModelError: names the first, and both shapes.
        """
        expected = {name: tuple(t.shape) for name, t in tensors_of(self._model)}
        for name, value in self.values(expected).items():
            check_shape(self.files.folder, name, value.shape, expected[name])

    def _tensor(self, name: str) -> Value:
        tensor = self.files.lazy_tensor(self._plain[name])
        twins = self._twins.get(name)
        return tensor if twins is None else _TiedValue(name, tensor, self.files, twins)


@dataclass(frozen=True, slots=True)
class _TiedValue:
    """A tensor that the files have more than once, under each of a parameter's names."""

    name: str
    tensor: LazyTensor
    files: WeightFiles
    others: Sequence[str]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def read(self, part: tuple[Any, ...]) -> Tensor:
        value = self.tensor.read(part)
        for other in self.others:
            if not torch.equal(self.files.lazy_tensor(other).read(part), value):
                raise ModelError(
                    f"{self.files.folder}: config.json ties {self.name} and {other}, but the files "
                    "have two different tensors; set tie_word_embeddings to false in config.json"
                )
        return value


CHUNKS = 8
"""So many parts of stacked tensors are made one after the other, and copied into the whole."""


class _ConvertedValues:
    """What a conversion makes of the files, made once for all parameters that come of it."""

    def __init__(self, conversion: Conversion, model: nn.Module, files: WeightFiles) -> None:
        self.conversion = conversion
        self._model = model
        self._files = files
        self._waiting: dict[str, Tensor] = {}

    def convert(self, chosen: slice) -> dict[str, Tensor]:
        return self.conversion.apply(self._model, self._files, chosen)

    def take(self, name: str) -> Tensor:
        """Take one of the results; the others wait for their turn, if there are any."""
        if name not in self._waiting:
            self._waiting = self.convert(slice(None))
        return self._waiting.pop(name)


@dataclass(frozen=True, slots=True)
class _StackedPart:
    """One parameter of those that a conversion makes."""

    name: str
    all: _ConvertedValues
    shape: tuple[int, ...]

    def read(self, part: tuple[Any, ...]) -> Tensor:
        first, *others = part
        if self.all.conversion.is_stacked or self.all.conversion.by_rows:
            return self._stack(first if isinstance(first, slice) else slice(None), others)
        return self.all.take(self.name)[part].contiguous()

    def _stack(self, chosen: slice, others: Sequence[Any]) -> Tensor:
        """Some of the stacked tensors; in memory twice is never more than a few of them."""
        start, stop, _ = chosen.indices(self.shape[0])
        each = max(1, -(-(stop - start) // CHUNKS))
        found: Tensor | None = None
        for first in range(start, stop, each):
            last = min(first + each, stop)
            made = self.all.convert(slice(first, last))[self.name][(slice(None), *others)]
            if found is None:
                found = made.new_empty(stop - start, *made.shape[1:])
            found[first - start : last - start] = made
        if found is None:
            return self.all.convert(slice(0, 1))[self.name][(slice(0, 0), *others)]
        return found


@dataclass(frozen=True, slots=True)
class Rules:
    """The renamings and conversions of an architecture."""

    renamings: Sequence[Any]
    converters: Mapping[str, Any]
    prefix: str
    names: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any, quantizer: Any = None) -> Rules:
        """Return the rules of the installed transformers."""
        prefix = getattr(model, "base_model_prefix", "")
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter, WeightRenaming
        except ImportError:  # before transformers 5
            return cls((), {}, prefix, names=_former_names(model))
        all_rules = get_model_conversion_mapping(model, hf_quantizer=quantizer)
        return cls(
            [rule for rule in all_rules if isinstance(rule, WeightRenaming)],
            {
                pattern: rule
                for rule in all_rules
                if isinstance(rule, WeightConverter)
                for pattern in rule.source_patterns
            },
            prefix,
        )

    def place(self, tensor: str, places: Mapping[str, str]) -> tuple[str, str | None]:
        """The name that a tensor has in the model, and the pattern of a conversion it goes into."""
        if not self.renamings and not self.converters:
            name = self._with_prefix(_rename(tensor, self.names), places)
            return (name if name in places else self._with_prefix(tensor, places)), None
        from transformers.core_model_loading import rename_source_key

        converters = list(dict.fromkeys(self.converters.values()))
        name, pattern = rename_source_key(tensor, self.renamings, converters)
        name = self._with_prefix(name, places)
        if name not in places and (plain := self._with_prefix(tensor, places)) in places:
            return plain, None  # files that were saved in the model's own form
        return name, pattern

    def _with_prefix(self, name: str, places: Mapping[str, str]) -> str:
        """A checkpoint of the bare model lacks the prefix that the one with a head has."""
        bare = name.removeprefix(f"{self.prefix}.")
        return next((n for n in (name, f"{self.prefix}.{name}", bare) if n in places), name)


def tensors_of(model: nn.Module, *, every_name: bool = False) -> Iterable[tuple[str, Tensor]]:
    """Parameters and the buffers that files have too, by name.

    Args:
        every_name: a tied one under each of its names.
    """
    yield from model.named_parameters(remove_duplicate=not every_name)
    yield from stored_buffers(model)


def stored_buffers(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """The buffers that a model keeps with its parameters."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def in_published_form(
    model: Any, state: Mapping[str, Tensor], files: WeightFiles | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """A model's tensors under the names and in the form that its architecture is published in.

    Args:
        model: its architecture; the buffers that are stored are taken from it, in their own types.
        state: parameters, by the model's own names.
        files: those that the model was read from; their form is kept. None: the usual one.
        dtype: of the parameters that are returned.
    """
    state = {name: tensor.to(dtype) for name, tensor in state.items()}
    state |= dict(stored_buffers(model))
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import rename_source_key, revert_weight_conversion
    except ImportError:  # before transformers 5
        back = {
            into: re.sub(r"\(.*\)", "", pattern.lstrip("^"))
            for pattern, into in _former_names(model).items()
        }
        return {_rename(name, back): tensor for name, tensor in state.items()}
    if files is not None:
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if not hasattr(rule, "operations")]
        converters = [rule for rule in rules if hasattr(rule, "operations")]
        for name in sorted(files.names(), key=_by_number):
            rename_source_key(name, renamings, converters)  # the rules note that they were used
        model._weight_conversions = [rule for rule in rules if rule.was_used()]
    return {name: _own_copy(t) for name, t in revert_weight_conversion(model, state).items()}


def _former_names(model: Any) -> Mapping[str, str]:
    """Pattern -> what takes its place in names of files, as transformers has it before 5."""
    return getattr(model, "_checkpoint_conversion_mapping", None) or {}


def _rename(name: str, names: Mapping[str, str]) -> str:
    """Rename by the first pattern that matches, as transformers does it."""
    for pattern, into in names.items():
        other, count = re.subn(pattern, into, name)
        if count:
            return other
    return name


def _own_copy(tensor: Tensor) -> Tensor:
    """A tensor with memory of its own: pieces of one would be stored as the whole of it."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _by_number(name: str) -> list[Any]:
    try:
        from transformers.core_model_loading import dot_natural_key
    except ImportError:  # before transformers 5
        return [name]
    return list(dot_natural_key(name))


def _known_beside(model: Any, name: str) -> bool:
    """Whether an architecture lists a tensor of its files that it has no use for.

    Such are tables that it computes itself, and layers that only others use.
    """
    patterns = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    buffers = [buffer for buffer, _ in model.named_buffers()]
    if any(buffer.endswith("rotary_emb.inv_freq") for buffer in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    return name in buffers or any(re.search(pattern, name) for pattern in patterns)
