"""Results of operations on tensors without values, made again as they were the first time.

torch's fake tensors find out what an operation gives out by doing it with tensors of no device,
hundreds of thousands of instructions each. All of it follows from the arguments' shapes, and a
step does the same operations over and over.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import in_kernel_invocation_manager

_PLAIN = {int, float, bool, str, type(None)}
_PLAIN |= {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
"""Types of arguments that are equal where they are the same."""
_VARIES = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
}
"""Tags of operations whose result does not follow from arguments' shapes, or that change these."""
_NEVER = {"resize_", "set_", "lift", "lift_fresh", "lift_fresh_copy", "all"}
"""Others of which more is to be known than their result's shape."""


@dataclass(frozen=True, slots=True)
class _Output:
    """A tensor that is given out.

    Attributes:
        given: number of the argument that it is, or `OUT`; None: it has memory of its own.
    """

    given: int | str | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make an operation's result.

    Attributes:
        kind: tuple or list; None: a single one.
        counted: see `Counter.see_again`.
    """

    outputs: tuple[_Output | None, ...]
    kind: type | None
    counted: list[Any] = field(default_factory=list)


_BELOW, _KEPT = torch._C._PreserveDispatchKeyGuard, torch._C._DisableTorchDispatch
OUT = "out"
"""The one argument with a name that is a tensor."""
VIEW = Recipe((), None, [{}])
"""Of what `Results.view` makes."""
Key = tuple[Any, ...]
Given = dict[int | str, Any]
_RECIPES: dict[Key, Recipe | None] = {}
"""What was found in this process; None: the next time is another matter."""


def key_of(
    func: Any,
    args: Any,
    kwargs: Mapping[str, Any],
    valued: Container[int] = (),
    *,
    memory: bool = False,
) -> Key | None:
    """All that an operation's result depends on; None: it takes more to tell.

    Args:
        valued: ids of tensors whose values are known all the same.
        memory: the result may have an argument's memory, and depend on what part of it that has.
    """
    key: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
    described = _described(key, args, valued, memory)
    if described and kwargs:
        described = _described(key, kwargs.items(), valued, memory)
    return tuple(key) if described else None


def _described(key: list[Any], values: Any, valued: Container[int], memory: bool) -> bool:
    """Extend a key by some arguments."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor or isinstance(value, FakeTensor):
            if not is_plain(value, valued) or value.dtype.is_complex:
                return False
            key += (kind, value.shape, value.stride(), value.dtype, value.fake_device)
            key.append(value.requires_grad)
            if memory:
                key += (value.storage_offset(), value.untyped_storage().nbytes())
        elif kind in _PLAIN:
            key += (kind, value)
        elif kind is list or kind is tuple:
            key += (kind, len(value))
            if not _described(key, value, valued, memory):
                return False
        else:
            return False
    return True


@functools.cache
def is_view(func: Any) -> bool:
    """Whether `Results.view` makes its results."""
    return (
        func.namespace == "aten"
        and (func.is_view or func is torch.ops.aten._unsafe_view.default)
        and torch.Tag.inplace_view not in func.tags
        and not func._schema.is_mutable
    )


def is_plain(value: Any, valued: Container[int]) -> bool:
    """Whether all that there is to know of a tensor without values is its shape."""
    return (
        isinstance(value, FakeTensor)
        and value.constant is None
        and id(value) not in valued
        and value.layout is torch.strided
    )


class Results:
    """Makes results of operations without torch's way to find them.

    Args:
        mode: of the tensors that it makes.
    """

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def view(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """The result of an operation that gives out its first argument's memory."""
        device = args[0].fake_device
        with _KEPT(), _BELOW():  # as torch's `in_kernel_invocation_manager`, which is slower
            self._mode.in_kernel_invocation = True
            torch._C._set_meta_in_tls_dispatch_include(True)
            try:
                result = func._op(*args, **kwargs)
                if isinstance(result, Tensor):
                    return self._wrapped(result, device)
                return type(result)(self._wrapped(one, device) for one in result)
            finally:
                self._mode.in_kernel_invocation = False

    def find(self, key: Key) -> Recipe | None:
        """How to make a result, if it is known."""
        return _RECIPES.get(key)

    def learn(self, key: Key, func: Any, given: Given, result: Any, before: Any) -> Recipe | None:
        """Keep how to make a result the next time.

        Args:
            given: by `given_to`.
            before: `shapes_of` them before the operation.
        """
        if key not in _RECIPES:
            _RECIPES[key] = self._recipe(func, given, result, before)
        return _RECIPES[key]

    def make(self, recipe: Recipe, given: Given) -> Any:
        """The result of an operation with these arguments."""
        made = [None if one is None else self._made(one, given) for one in recipe.outputs]
        return made[0] if recipe.kind is None else recipe.kind(made)

    def collective(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """The result of a collective, whose tensors are those that it was given."""
        with in_kernel_invocation_manager(self._mode):
            result = func(*args, **kwargs)
        given = {id(value) for value in _tensors(args)}
        assert all(id(value) in given for value in _tensors(result)), func
        return result

    def _made(self, output: _Output, given: Given) -> Any:
        if output.given is not None:
            return given[output.given]
        with torch._C._DisableTorchDispatch():
            plain = torch.empty_strided(
                output.shape, output.stride, dtype=output.dtype, device="meta"
            )
            return self._wrapped(plain, output.device)

    def _wrapped(self, plain: Tensor, device: torch.device) -> Any:
        """As torch wraps a tensor of no device, but for the checks."""
        attributes = self._attributes.get(device)
        if attributes is None:
            made = FakeTensor(self._mode, plain, device)
            self._attributes[device] = dict(made.__dict__)
            return made
        made = Tensor._make_subclass(
            FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
        made.__dict__.update(attributes)
        return made

    def _recipe(self, func: Any, given: Given, result: Any, before: Any) -> Recipe | None:
        if func.namespace != "aten" or not _VARIES.isdisjoint(func.tags):
            return None
        if func.overloadpacket.__name__ in _NEVER:
            return None
        if func._schema.is_mutable and (
            before != shapes_of(given)
            or not (result is given.get(0, given) or result is given.get(OUT, given))
        ):
            return None
        several = type(result) in (tuple, list)
        outputs = []
        for one in result if several else (result,):
            output = None if one is None else self._output(one, given)
            if output is None and one is not None:
                return None
            outputs.append(output)
        recipe = Recipe(tuple(outputs), type(result) if several else None)
        return recipe if self._is_like(recipe, given, result) else None

    def _output(self, tensor: Any, given: Given) -> _Output | None:
        if type(tensor) is not FakeTensor or tensor.fake_mode is not self._mode:
            return None
        if tensor.constant is not None or tensor.layout is not torch.strided:
            return None
        if tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
            return None
        storage = tensor.untyped_storage()._cdata
        place = next(
            (name for name, value in given.items() if value.untyped_storage()._cdata == storage),
            None,
        )
        if place is not None and tensor is not given[place]:
            return None
        return _Output(
            given=place,
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.fake_device,
        )

    def _is_like(self, recipe: Recipe, given: Given, result: Any) -> bool:
        """Whether it makes what the operation gave out."""
        if recipe.kind is None:
            pairs = [(self.make(recipe, given), result)]
        else:
            pairs = list(zip(self.make(recipe, given), result, strict=True))
        return all(
            one is two
            or (
                shapes_of({0: one}) == shapes_of({0: two})
                and torch._C._dispatch_key_set(one) == torch._C._dispatch_key_set(two)
            )
            for one, two in pairs
        )


def given_to(args: Any, kwargs: Mapping[str, Any]) -> Given:
    """Tensors without values among an operation's arguments, by their place."""
    given: Given = {i: value for i, value in enumerate(args) if isinstance(value, FakeTensor)}
    out = kwargs.get(OUT)
    return {**given, OUT: out} if isinstance(out, FakeTensor) else given


def shapes_of(given: Given) -> list[Any]:
    """What an operation could change of its arguments, other than their values."""
    return [
        (value.shape, value.stride(), value.storage_offset(), value.untyped_storage().nbytes())
        for value in given.values()
    ]


def are_plain(values: Any, valued: Container[int]) -> bool:
    """Whether `is_plain` holds for all tensors."""
    return all(is_plain(value, valued) for value in _tensors(values))


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values if isinstance(values, list | tuple) else (values,):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
