"""Every operation of a device, repeated on the host in float64 from the device's own inputs.

The first whose result is out of its bound is where the device leaves the host: its inputs were
still what they should be, or what earlier rounding explains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from anygauge.interface import HOST_DEVICE
from anygauge.testing.place import Place

ROUNDINGS = 8.0
"""Roundings of the accumulator's type that an operation may make for each term's square root."""
LIKE_THE_HOST = 4.0
"""How many times as far from float64 as the host's own kernel of the same type."""

PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "mv", "dot", "convolution"})
LINEAR = PRODUCTS | {
    *("sum", "mean", "cumsum", "add", "add_", "addcmul", "addcmul_", "lerp", "lerp_", "index_add"),
    *("scatter_add", "scatter_add_", "index_add_", "index_put_", "embedding_dense_backward"),
    *("_foreach_add_", "_foreach_addcmul_", "_foreach_lerp_", "_foreach_add", "_foreach_addcmul"),
}
"""Their largest terms are the same operation of absolute values."""
OTHER_STORAGE = frozenset(
    {"as_strided", "as_strided_", "set_", "resize_", "_reshape_alias", "record_stream", "detach"}
)
"""What they give depends on more than their inputs' values, or they compute nothing."""
UNFILLED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
ORDERS = frozenset({"sort", "topk", "argmax", "argmin", "argsort", "max", "min", "mode", "median"})
"""Their indices among equal values are free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Departure:
    """An operation whose result is out of its bound.

    Attributes:
        operation: as torch's schema has it, such as ``aten::mm``.
        dtype, shape: of the result that is wrong, or of its first input's where that is larger.
        why: the largest error and its bound.
    """

    operation: str
    dtype: str
    shape: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        """In words."""
        size = " x ".join(map(str, self.shape)) or "a number"
        return f"{self.operation} ({self.dtype}, {size})"


class Replay(TorchDispatchMode):
    """Repeats what runs within it; see `found`.

    Attributes:
        found: the first departure, and where it was; None as long as there is none.
        compared: operations that were repeated.
        unknown: those that the host cannot repeat in float64, by name: how often.
    """

    def __init__(self, device_type: str, place: Place) -> None:
        super().__init__()
        self._device_type = device_type
        self._place = place
        self.found: tuple[Departure, str] | None = None
        self.compared = 0
        self.unknown: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, then repeat it."""
        kwargs = kwargs or {}
        self._place.note()
        if self.found is not None or not self._is_asked(func, args, kwargs):
            return func(*args, **kwargs)
        before = tree_map(on_host, (args, kwargs))
        result = func(*args, **kwargs)
        try:
            departure = departed(func, before, written(func, args, kwargs), result)
        except Exception:  # whatever the host has no kernel for, in float64
            self.unknown[func.overloadpacket.__name__] += 1
            return result
        self.compared += 1
        if departure is not None:
            self.found = departure, str(self._place)
        return result

    def _is_asked(self, func: Any, args: Any, kwargs: Any) -> bool:
        name = func.overloadpacket.__name__
        if func.namespace != "aten" or name in OTHER_STORAGE | UNFILLED:
            return False
        if torch.Tag.nondeterministic_seeded in func.tags:
            return False
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if any(type(each) not in (Tensor, torch.nn.Parameter) for each in tensors):
            return False
        made = torch.device(kwargs.get("device") or HOST_DEVICE).type
        return self._device_type in {made, *(each.device.type for each in tensors)}


def departed(func: Any, before: Any, changed: Sequence[Tensor], result: Any) -> Departure | None:
    """The first result of an operation that is out of its bound.

    Args:
        before: (args, kwargs) as they were, on the host.
        changed: arguments that it writes to, as they are now.
        result: what it returned.
    """
    name = func.overloadpacket.__name__
    exact, exact_changed = again(func, before, in_float64)
    if _is_random_free_copy(name, before):
        usual, usual_changed = exact, exact_changed
    else:
        usual, usual_changed = again(func, before, lambda leaf: leaf)
    if name in LINEAR:
        terms, terms_changed = again(func, before, lambda leaf: _absolute(in_float64(leaf)))
    else:
        terms, terms_changed = exact, exact_changed
    found = [*changed, *_tensors(result)]
    groups = zip(
        found,
        [*exact_changed, *_tensors(exact)],
        [*usual_changed, *_tensors(usual)],
        [*terms_changed, *_tensors(terms)],
        strict=True,
    )
    inputs = [leaf for leaf in tree_leaves(before) if isinstance(leaf, Tensor)]
    for got, wanted, host, size in groups:
        if name in ORDERS and not got.is_floating_point():
            continue
        count = 1.0
        if name in LINEAR and inputs:
            count = _terms(name, inputs, wanted)
        why = out_of_bound(got, wanted, host, size, count)
        if why:
            shown = max([*inputs[:1], wanted], key=Tensor.numel)
            return Departure(
                operation=f"{func.namespace}::{name}",
                dtype=str(got.dtype).removeprefix("torch."),
                shape=tuple(shown.shape),
                why=why,
            )
    return None


def out_of_bound(found: Tensor, exact: Tensor, host: Tensor, terms: Tensor, count: float) -> str:
    """Why a result is wrong; empty if rounding explains it.

    The bound of each element is two roundings of the result's type u, those of a sum of `count`
    terms that is kept in float32 at least, ``8 sqrt(count) 2^-24`` of the terms' size, and four
    times what the host's kernel of the same type is away from float64.

    Args:
        found: on the device.
        exact: in float64.
        host: of the host's kernel in the device's type.
        terms: the size of the terms that each element is summed from.
    """
    here = found.detach().to(HOST_DEVICE)
    if here.shape != exact.shape:
        return f"its shape is {tuple(here.shape)}, not {tuple(exact.shape)}"
    if not here.numel() or here.is_complex():
        return ""
    if not here.is_floating_point():
        wrong = int((here != exact.to(here.dtype)).sum())
        return f"{wrong} of {here.numel()} values are wrong" if wrong else ""
    limits = torch.finfo(here.dtype)
    wide = here.double()
    finite = exact.isfinite() & (exact.abs() < limits.max)
    if bool((~wide.isfinite() & finite).any()):
        return f"{int((~wide.isfinite() & finite).sum())} values are not finite"
    if not bool(finite.any()):
        return ""
    error = torch.where(finite, wide - exact, 0.0).abs()
    accumulator = min(torch.finfo(torch.float32).eps, limits.eps) / 2
    own = torch.where(finite & host.double().isfinite(), host.double() - exact, 0.0).abs().max()
    size = torch.where(terms.isfinite(), terms, 0.0).abs()
    if count == 1.0:
        size = size.max().expand_as(size)
    bound = (
        2 * limits.eps / 2 * exact.abs()
        + ROUNDINGS * count**0.5 * accumulator * size
        + LIKE_THE_HOST * own
        + limits.smallest_normal
    )
    over = error > torch.where(finite, bound, 0.0)
    if not bool((over & finite).any()):
        return ""
    at = int((error / bound.clamp(min=1e-300)).argmax())
    return (
        f"{wide.flatten()[at]:.6g} where float64 gives {exact.flatten()[at]:.6g}; rounding "
        f"explains {bound.flatten()[at]:.1g}"
    )


def again(func: Any, before: Any, change: Callable[[Any], Any]) -> tuple[Any, list[Tensor]]:
    """Run an operation on the host: (what it returned, the arguments that it wrote to)."""
    args, kwargs = tree_map(lambda leaf: change(_copied(leaf)), before)
    if func.overloadpacket.__name__ in ("_softmax", "_log_softmax"):
        args = (*args[:2], False)  # a type of its own for the result: here both have one
    result = func(*args, **kwargs)
    return result, written(func, args, kwargs)


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes to."""
    found: list[Tensor] = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        found += _tensors(value)
    return found


def on_host(leaf: Any) -> Any:
    """A value as it is now, on the host; other devices become the host."""
    if isinstance(leaf, Tensor):
        return leaf.detach().to(HOST_DEVICE, copy=True)
    return torch.device(HOST_DEVICE) if isinstance(leaf, torch.device) else leaf


def in_float64(leaf: Any) -> Any:
    """A number, or the type of one, in float64; whole numbers stay."""
    if isinstance(leaf, Tensor):
        return leaf.double() if leaf.is_floating_point() else leaf
    if isinstance(leaf, torch.dtype) and leaf.is_floating_point:
        return torch.float64
    return leaf


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _absolute(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.abs() if leaf.is_floating_point() else leaf
    return abs(leaf) if isinstance(leaf, float) else leaf


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _is_random_free_copy(name: str, before: Any) -> bool:
    """Whether the host's kernel in the device's type would give what float64 does."""
    leaves = [leaf for leaf in tree_leaves(before) if isinstance(leaf, Tensor)]
    return not any(leaf.is_floating_point() for leaf in leaves) or name in ("_to_copy", "copy_")


def _terms(name: str, inputs: Sequence[Tensor], result: Tensor) -> float:
    """How many terms each element of a result is summed from, at most."""
    if name in PRODUCTS and inputs[-1].dim() >= 2:
        return max(2.0, float(inputs[-1].shape[-2]))
    return max(2.0, inputs[0].numel() / max(1, result.numel()), inputs[-1].numel() ** 0.5)
