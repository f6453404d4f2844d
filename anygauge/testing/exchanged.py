"""What ranks exchange in a step, recorded on each and held against what the host makes of it."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from anygauge.testing.replay import on_host, out_of_bound

SUMS = ("all_reduce", "reduce_scatter_tensor")
REDUCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "SUM": lambda parts: parts.sum(0),
    "AVG": lambda parts: parts.mean(0),
    "PRODUCT": lambda parts: parts.prod(0),
    "MAX": lambda parts: parts.amax(0),
    "MIN": lambda parts: parts.amin(0),
}


@dataclass(slots=True)
class Exchange:
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


class _OfReducers(TorchDispatchMode):
    """Sums that torch's own compiled code asks for, past Python's functions."""

    def __init__(self, found: list[Exchange], inside: list[str]) -> None:
        super().__init__()
        self._found = found
        self._inside = inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside or func.overloadpacket.__name__ != "allreduce_":
            return func(*args, **kwargs)
        before = [on_host(tensor) for tensor in args[0]]
        result = func(*args, **kwargs)
        result[1].wait()
        ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(args[1])))
        how = str(dist.ReduceOp.unbox(args[2]).op).rpartition(".")[2]
        for was, now in zip(before, args[0], strict=True):
            self._found.append(Exchange("all_reduce", ranks, how, was, on_host(now)))
        return result


@contextmanager
def recorded() -> Iterator[list[Exchange]]:
    """Every collective of this process while it lasts; each is waited for."""
    found: list[Exchange] = []
    inside: list[str] = []
    usual = {name: getattr(dist, name) for name in _TENSORS}
    for name, function in usual.items():
        setattr(dist, name, _noting(name, function, found, inside))
    try:
        with _OfReducers(found, inside):
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
}


def _noting(
    name: str, usual: Callable[..., Any], found: list[Exchange], inside: list[str]
) -> Callable[..., Any]:
    import inspect

    signature = inspect.signature(usual)

    @functools.wraps(usual)
    def function(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        values = list(given.arguments.values())
        source, target = (values[at] for at in _TENSORS[name])
        before = on_host(source)
        inside.append(name)
        try:
            work = usual(*args, **kwargs)
            if work is not None:
                work.wait()
        finally:
            inside.pop()
        ranks = tuple(dist.get_process_group_ranks(given.arguments.get("group")))
        how = given.arguments.get("op", "")
        if name == "broadcast":
            of_group = given.arguments.get("group_src")
            how = given.arguments["src"] if of_group is None else ranks[of_group]
        how = str(getattr(how, "op", how)).rpartition(".")[2]
        found.append(Exchange(name, ranks, how, before, on_host(target)))
        return work

    return function


def first_wrong(ranks: Sequence[Sequence[Exchange]]) -> tuple[int, str]:
    """(How many collectives of rank 0 were right before it, the first wrong one in words).

    Args:
        ranks: of each rank, in its order.
    """
    members: dict[tuple[int, ...], list[list[Exchange]]] = defaultdict(list)
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


def _wrong(group: Sequence[int], together: Sequence[Exchange]) -> str:
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
            if each.name == "reduce_scatter_tensor":
                exact, terms = (t.chunk(len(parts))[place] for t in (exact, terms))
        elif each.name == "all_gather_into_tensor":
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
