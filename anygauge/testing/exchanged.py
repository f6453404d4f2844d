"""What ranks exchange in a step, recorded on each and held against what the host makes of it."""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anygauge.testing.replay import on_host, out_of_bound

SUMS = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single")
REDUCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "SUM": lambda parts: parts.sum(0),
    "AVG": lambda parts: parts.mean(0),
    "PRODUCT": lambda parts: parts.prod(0),
    "MAX": lambda parts: parts.amax(0),
    "MIN": lambda parts: parts.amin(0),
}


@dataclass(slots=True)
class ExchangeRecord:
    """One collective of one rank, with what it held, on the host.

    Attributes:
        ranks: of its group, in order.
        how: of a sum, what is made of the parts; of a broadcast, the source.
    """

    name: str
    ranks: tuple[int, ...]
    how: str
    before: Tensor
    after: Tensor


@contextmanager
def recorded() -> Iterator[list[ExchangeRecord]]:
    """Every collective of this process while it lasts; each is waited for."""
    found: list[ExchangeRecord] = []
    usual = {name: getattr(dist, name) for name in _TENSORS if hasattr(dist, name)}
    for name, function in usual.items():
        setattr(dist, name, _noting(name, function, found))
    try:
        yield found
    finally:
        for name, function in usual.items():
            setattr(dist, name, function)


_TENSORS: Mapping[str, tuple[int, int]] = {
    # Where a function has its input and its output among its arguments.
    "all_reduce": (0, 0),
    "broadcast": (0, 0),
    "all_gather_into_tensor": (1, 0),
    "reduce_scatter_tensor": (1, 0),
    "all_gather_single": (1, 0),  # new names of these two
    "reduce_scatter_single": (1, 0),
}
_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    # Torch's own, for a vendor's function in its place that shows none.
    "all_reduce": ("tensor", "op", "group"),
    "broadcast": ("tensor", "src", "group", "async_op", "group_src"),
    "all_gather_into_tensor": ("output_tensor", "input_tensor", "group"),
    "reduce_scatter_tensor": ("output", "input", "op", "group"),
    "all_gather_single": ("output_tensor", "input_tensor", "group"),
    "reduce_scatter_single": ("output", "input", "op", "group"),
}


def _given(name: str, usual: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name, in the order of torch's."""
    signature = inspect.signature(usual)
    if "group" in signature.parameters:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)
    passed = dict(zip(_ARGUMENTS[name], args, strict=False)) | kwargs
    usually = {"op": dist.ReduceOp.SUM}
    return {each: passed.get(each, usually.get(each)) for each in _ARGUMENTS[name]}


def _noting(
    name: str, usual: Callable[..., Any], found: list[ExchangeRecord]
) -> Callable[..., Any]:
    @functools.wraps(usual)
    def function(*args: Any, **kwargs: Any) -> Any:
        given = _given(name, usual, args, kwargs)
        values = list(given.values())
        source, target = (values[at] for at in _TENSORS[name])
        before = on_host(source)
        work = usual(*args, **kwargs)
        if work is not None:
            work.wait()
        ranks = tuple(dist.get_process_group_ranks(given.get("group")))
        how = given.get("op", "")
        if name == "broadcast":
            of_group = given.get("group_src")
            how = given["src"] if of_group is None else ranks[of_group]
        how = str(getattr(how, "op", how)).rpartition(".")[2]
        found.append(ExchangeRecord(name, ranks, how, before, on_host(target)))
        return work

    return function


def first_wrong(ranks: Sequence[Sequence[ExchangeRecord]]) -> tuple[int, str]:
    """(How many collectives of rank 0 were right before it, the first wrong one in words).

    Args:
        ranks: of each rank, in its order.
    """
    members: dict[tuple[int, ...], list[list[ExchangeRecord]]] = defaultdict(list)
    for group in {each.ranks for exchanges in ranks for each in exchanges}:
        members[group] = [[e for e in ranks[rank] if e.ranks == group] for rank in group]
    numbers = {id(each): at for at, each in enumerate(ranks[0])}
    wrong = []
    for group, exchanges in members.items():
        for number, together in enumerate(zip(*exchanges, strict=False)):
            why = _wrong(group, together)
            if why:
                wrong.append((min(numbers.get(id(e), number) for e in together), why))
                break
    return min(wrong, default=(len(ranks[0]), ""))


def _wrong(group: Sequence[int], together: Sequence[ExchangeRecord]) -> str:
    """Why a collective is wrong, from what each rank gave and got; empty if it is right."""
    first = together[0]
    kinds = {(each.name, each.how) for each in together}
    if len(kinds) > 1:
        return f"ranks {_list(group)} are not in the same collective: {sorted(kinds)}"
    for place, (rank, each) in enumerate(zip(group, together, strict=True)):
        parts = [_wide(one.before) for one in together]
        terms = exact = torch.empty(0)
        count = 1.0
        if each.name in SUMS and each.how in REDUCTIONS:
            exact = REDUCTIONS[each.how](torch.stack(parts))
            terms = torch.stack(parts).abs().sum(0)
            count = float(len(parts) + 1)
            if each.name != "all_reduce":
                exact, terms = (t.chunk(len(parts))[place] for t in (exact, terms))
        elif each.name.startswith("all_gather"):
            exact = torch.cat([part.flatten() for part in parts])
        elif each.name == "broadcast":
            exact = parts[list(group).index(int(each.how))]
        else:
            continue
        exact = exact.reshape(each.after.shape)
        terms = exact if count == 1.0 else terms.reshape(each.after.shape)
        why = out_of_bound(each.after, exact, exact, terms, count)
        if why:
            size = " x ".join(map(str, each.after.shape)) or "a number"
            dtype = str(each.after.dtype).removeprefix("torch.")
            how = f" ({each.how.lower()})" if each.name in SUMS else ""
            return (
                f"{first.name}{how} of ranks {_list(group)} ({dtype}, {size}): rank {rank} got "
                f"{why}"
            )
    return ""


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
