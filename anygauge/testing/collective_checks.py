"""The table of what strategies call between ranks, over sizes, views, types, groups and handles.

A line of `FUNCTIONS` is a function of `torch.distributed`, or of the contract's `Collectives`, and
a check. It is called for every type with each line of `CASES`; all that a rank holds is compared
once the next call has run: results, inputs, and what lies around both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anygauge.testing.bounds import LAYOUTS, dtypes
from anygauge.testing.check import TABLE_S, SkipCheck
from anygauge.testing.rank_context import BITS, RankContext, check_on_ranks

WHOLE, WITHIN, GAPS = "contiguous", "sliced", "every second"
"""Of `LAYOUTS`."""
LARGE = 2**21 + 5
"""Elements beyond the buffers of any library: 8 MiB of float32 and a little more."""
MANY = 32
"""Handles that are under way at once: an engine's queue of layers."""


@dataclass(frozen=True, slots=True)
class Case:
    """How the tensors of a call lie, and how many elements they have.

    Attributes:
        size: of what a rank has for one rank.
        waits: the call returns a handle, which is waited for.
        salt: calls of one size and other values come one after the other.
        ranks: of the group; all if there are none.
    """

    layout: str
    size: int
    waits: bool = False
    salt: int = 0
    dtype: torch.dtype = torch.float32
    ranks: tuple[int, ...] = ()


CASES = (
    Case(WITHIN, 7),
    Case(WITHIN, 7, salt=1),
    Case(WITHIN, 64, waits=True),
    Case(WHOLE, 1, waits=True),
    Case(WHOLE, 0),
    Case(WITHIN, 2**16 + 3),
    Case(WHOLE, 2**17, waits=True),
    Case(WHOLE, 2**17, waits=True, salt=1),
)
OF_OTHERS = (Case(WITHIN, 13), Case(WHOLE, 2**16 + 3, waits=True))
GAPPED = (Case(GAPS, 7), Case(GAPS, 2**10))
IN_GROUPS = (Case(WITHIN, 7, salt=2), Case(WHOLE, 1003, waits=True, salt=2))


@dataclass(frozen=True, slots=True)
class Function:
    """A line of the table.

    Attributes:
        name: of the check, too.
        run: makes the tensors of a call, and makes it; returns its handle where it waits.
        means: what users see where it is wrong, and where vendors usually have the cause.
        operators: torch's own by which strategies and the libraries under them come to it, as
            recorded in `tests/strategies/collectives.json`.
        op: what it reduces by: types are those that have sums.
        lacked: a library may refuse it.
        contract: of `Collectives`, which serves gaps, and has no handles.
    """

    name: str
    run: Callable[[Call], Any]
    means: str
    operators: str = ""
    op: str = ""
    lacked: bool = False
    contract: bool = False


class Call:
    """One call of a function on this rank: it makes tensors, and then judges them.

    Attributes:
        ranks: who takes part.
        root: of `ranks`, the one that sends or receives, where there is one.
        mine: `values` of this rank.
        named: arguments that functions of `torch.distributed` have in common.
        made: (on the device, on the host with what it must hold, largest error, what it is): all
            memory of its tensors, and what was returned.
    """

    def __init__(self, on: RankContext, function: Function, case: Case, number: int) -> None:
        self.on, self.function, self.case, self.dtype = on, function, case, case.dtype
        self.ranks = case.ranks or tuple(on.ranks)
        self.root = self.ranks[number % len(self.ranks)]
        self.group = groups(on)[case.ranks] if case.ranks else None
        self.mine = self.values(on.rank)
        self.named: dict[str, Any] = {"group": self.group, "async_op": case.waits}
        self.made: list[tuple[Tensor, Tensor, Any, str]] = []
        of = f" in the group {list(case.ranks)}" if case.ranks else ""
        how = f"{case.layout}{', waited for' * case.waits}"
        self.what = f"{function.name}{of} of {case.size} x {case.dtype} for each rank, {how}"

    def run(self, *, wait: bool = True) -> Any:
        """Make the call where this rank takes part; gives the handle of one that has any."""
        work = self.function.run(self) if self.on.rank in self.ranks else None
        if wait and self.case.waits and work is not None:
            work.wait()
        return work

    def values(self, rank: int, parts: int = 1) -> Tensor:
        """What a rank gives, in float64 or int64 on the host: for one rank, or a part for each."""
        size, floating = self.case.size * parts, self.dtype.is_floating_point
        make = self.on.values if floating else self.on.integers
        return make(size, self.dtype, rank, self.case.salt)

    def stacked(self, parts: int = 1) -> Tensor:
        """`values` of all ranks, a row for each."""
        return torch.stack([self.values(rank, parts) for rank in self.ranks])

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor with a part for each rank."""
        start = self.case.size * self.ranks.index(self.on.rank)
        return whole[start : start + self.case.size]

    def input(self, values: Tensor, wanted: Tensor | None = None, within: Any = 0.0) -> Tensor:
        """A tensor of these values, which must hold those wanted afterwards; an input's stay."""
        memory, view = LAYOUTS[self.case.layout](values)
        there, memory = self.on.to_device(memory, self.dtype), memory.clone()
        error = torch.zeros(memory.shape).double()
        view(memory).copy_(values if wanted is None else wanted)
        view(error).copy_(torch.as_tensor(within))
        name = "input" if wanted is None else "result"
        self.made.append((there, memory, error, f"the memory of its {name}"))
        return view(there)

    def output(self, wanted: Tensor, within: Any = 0.0) -> Tensor:
        """A tensor for a result; it holds what no result is."""
        return self.input(torch.full_like(wanted, 5), wanted, within)

    def add_result(self, result: Tensor, wanted: Tensor, within: Any = 0.0) -> None:
        """Note a tensor that the function gave back."""
        self.made.append((result, wanted, within, "what it returned"))

    def judge(self) -> None:
        """Note each tensor that does not hold what it must, with all that lies around it."""
        for there, wanted, within, name in self.made:
            self.on.match(there, wanted, f"{self.what}, {name}", within)


def _reduce(call: Call, parts: int = 1) -> tuple[Tensor, Tensor, Any]:
    """(What a reduction gives, its largest error, torch's name of it)."""
    stacked, op = call.stacked(parts), call.function.op
    wanted = stacked.amax(0) if op == "max" else stacked.mean(0) if op == "mean" else stacked.sum(0)
    # Nothing is rounded but a mean, which is divided.
    roundings = 1.1 * (len(call.ranks) + 1) * 2.0 ** -BITS[call.dtype] if op == "mean" else 0.0
    within = roundings * stacked.abs().sum(0) / len(call.ranks)
    return wanted, within, getattr(dist.ReduceOp, {"mean": "AVG"}.get(op, op.upper()))


def _all_reduce(call: Call) -> Any:
    wanted, within, op = _reduce(call)
    tensor = call.input(call.mine, wanted, within)
    if not call.function.contract:
        return dist.all_reduce(tensor, op=op, **call.named)
    result = call.on.collectives.all_reduce(tensor, op=call.function.op, group=call.group)
    return call.add_result(result, wanted, within)


def _broadcast(call: Call) -> Any:
    wanted = call.values(call.root)
    tensor = call.input(call.mine, wanted)
    if not call.function.contract:
        return dist.broadcast(tensor, src=call.root, **call.named)
    return call.add_result(call.on.collectives.broadcast(tensor, source=call.root), wanted)


def _contract_all_gather(call: Call) -> None:
    tensor = call.input(call.mine)
    parts = call.on.collectives.all_gather(tensor)
    call.on.expect(len(parts) == len(call.ranks), f"{call.what} gave {len(parts)} parts")
    for part, wanted in zip(parts, call.stacked(), strict=False):
        own = part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        call.on.expect(not (own and part.numel()), f"{call.what}: a part is the input itself")
        call.add_result(part, wanted)


def _reduce_scatter(call: Call) -> Any:
    wanted, within, op = _reduce(call, len(call.ranks))
    part = call.output(call.part(wanted), call.part(within))
    whole = call.input(call.values(call.on.rank, len(call.ranks)))
    return dist.reduce_scatter_tensor(part, whole, op=op, **call.named)


def _all_gather(call: Call) -> Any:
    parts = [call.output(wanted) for wanted in call.stacked()]
    return dist.all_gather(parts, call.input(call.mine), **call.named)


def _all_gather_into_tensor(call: Call) -> Any:
    """Now and then the own part is a slice of the result, where an engine keeps its shard."""
    wanted = call.stacked().flatten()
    held = torch.full_like(wanted, 5)
    if call.case.salt % 2:
        call.what += ", from a slice of the result"
        call.part(held).copy_(call.mine)
    whole = call.input(held, wanted)
    mine = call.part(whole) if call.case.salt % 2 else call.input(call.mine)
    return dist.all_gather_into_tensor(whole, mine, **call.named)


def _functional_all_gather(call: Call) -> None:
    """Gather as DTensor does: the result is a new tensor, complete once it was waited for."""
    group: Any = call.group or dist.group.WORLD
    mine, operators = call.input(call.mine), torch.ops._c10d_functional
    result = operators.all_gather_into_tensor(mine, len(call.ranks), group.group_name)
    call.add_result(operators.wait_tensor(result), call.stacked().flatten())


def _all_to_all_single(call: Call) -> Any:
    every = len(call.ranks)
    received = call.output(torch.cat([call.part(each) for each in call.stacked(every)]))
    sent = call.input(call.values(call.on.rank, every))
    return dist.all_to_all_single(received, sent, **call.named)


def _messages(call: Call) -> Any:
    """Send from the root to the next rank; the others have none."""
    after = call.ranks[(call.ranks.index(call.root) + 1) % len(call.ranks)]
    if len(call.ranks) == 1 or call.on.rank not in (call.root, after):
        return None
    if call.on.rank == call.root:
        send = dist.isend if call.case.waits else dist.send
        return send(call.input(call.mine), after, group=call.group)
    receive = dist.irecv if call.case.waits else dist.recv
    return receive(call.output(call.values(call.root)), call.root, group=call.group)


SUMS = (
    "Gradients are wrong for some layers alone, and training departs from that of one rank: the "
    "library reduces in a shorter type, cuts large messages, or divides by the wrong number"
)
MAXIMA = "Ranks disagree on whether a step overflowed: vendors start from zero, or in another type"
PARTS = (
    "Layers compute with weights of other ranks, or of the layer before: the library orders by its "
    "topology, reads the storage instead of the view, or reuses a buffer too early"
)
_REDUCE_SCATTER, _GATHER = "c10d::_reduce_scatter_base_", "_c10d_functional::all_gather_into_tensor"
FUNCTIONS = (
    Function("contract_sum", _all_reduce, SUMS, op="sum", contract=True),
    Function("contract_mean", _all_reduce, SUMS, op="mean", contract=True),
    Function("contract_max", _all_reduce, MAXIMA, op="max", contract=True),
    Function("contract_broadcast", _broadcast, PARTS, contract=True),
    Function("contract_all_gather", _contract_all_gather, PARTS, contract=True),
    Function("all_reduce", _all_reduce, SUMS, "c10d::allreduce_", op="sum"),
    Function("all_reduce_mean", _all_reduce, SUMS, op="mean", lacked=True),
    Function("reduce_scatter", _reduce_scatter, SUMS, _REDUCE_SCATTER, op="sum"),
    Function("reduce_scatter_mean", _reduce_scatter, SUMS, op="mean", lacked=True),
    Function("broadcast", _broadcast, PARTS, "c10d::broadcast_"),
    Function("all_gather", _all_gather, PARTS, "c10d::allgather_"),
    Function("all_gather_into_tensor", _all_gather_into_tensor, PARTS, "c10d::_allgather_base_"),
    Function("functional_all_gather", _functional_all_gather, PARTS, _GATHER),
    Function("all_to_all_single", _all_to_all_single, PARTS, "c10d::alltoall_base_"),
    Function("send_and_recv", _messages, PARTS, "c10d::send c10d::recv_", lacked=True),
)


def groups(on: RankContext) -> dict[tuple[int, ...], Any]:
    """Every subgroup by its ranks: each alone, pairs, all but one, all. They are made once, and
    kept: one that is dropped may be taken down."""
    found: dict[tuple[int, ...], Any] = on.kept.setdefault("groups", {})
    if not found:
        ranks = tuple(on.ranks)
        sets = {*((rank,) for rank in ranks), *itertools.combinations(ranks, 2), ranks[-3:], ranks}
        found.update((each, dist.new_group(list(each))) for each in sorted(sets))
    return found


def _cases(on: RankContext, function: Function) -> Iterator[Case]:
    own = (*CASES, *GAPPED * function.contract)
    yield from (replace(case, dtype=dtype) for dtype in dtypes(on) for case in own)
    yield Case(WHOLE, LARGE // (1 if function.contract else 4))
    if function.op != "mean":
        whole = (torch.int64, *(() if function.op else (torch.int32, torch.uint8)))
        others = (torch.float64, *whole)
        yield from (replace(case, dtype=dtype) for case in OF_OTHERS for dtype in others)
    if function.op or not function.contract:  # the contract's others take no group
        yield from (replace(case, ranks=ranks) for case in IN_GROUPS for ranks in groups(on))


def _check_cases(function: Function, on: RankContext) -> None:
    if not function.contract:
        on.asked_by_engines()
    earlier: list[Call] = []
    refusals: list[str] = []
    for number, case in enumerate(_cases(on, function)):
        call = Call(on, function, case, number)
        refusals.append("")
        if function.lacked or case.layout == GAPS or not case.size or case.dtype not in dtypes(on):
            refusals[-1] = on.attempt(call.run, call.what, call.ranks)
        else:
            call.run()
        if earlier:  # results must stay as they are while the next call runs
            earlier.pop().judge()
        if not refusals[-1]:
            earlier.append(call)
    if earlier:
        earlier.pop().judge()
    if all(refusals):
        raise SkipCheck(f"the library refuses it: {refusals[0]}")


for _function in FUNCTIONS:
    _title = _function.name.replace("contract_", "the contract's ") + " is right for all sizes, "
    check_on_ranks(
        f"{_title}views, types, groups and handles, whatever comes next",
        means=_function.means,
        name=_function.name,
        limit_s=TABLE_S,
    )(partial(_check_cases, _function))


def _begin(on: RankContext, count: int, *names: str) -> list[tuple[Call, Any]]:
    """(Call, its handle) of so many calls, in turn of these functions."""
    functions = [function for function in FUNCTIONS if function.name in names]
    begun = []
    for turn in range(count):
        size = 2**18 + 1 if turn == 2 else 1003 + turn  # one takes longer than those after it
        case = Case(WHOLE, size, waits=True, salt=turn)
        call = Call(on, functions[turn % len(functions)], case, turn)
        call.what += f", handle {turn + 1} of {count}"
        begun.append((call, call.run(wait=False)))
    return begun


@check_on_ranks(
    f"{MANY} handles are under way at once: each means its own work, in whatever order, for good; "
    "what is to follow one finds its result",
    means="Engines that prefetch weights and overlap sums read what is not there yet; handles of "
    "the library share an event or a buffer, or are done when their work has begun.",
)
def handles(on: RankContext) -> None:
    on.asked_by_engines()
    begun = _begin(on, MANY, "all_reduce", "all_gather_into_tensor", "reduce_scatter", "broadcast")
    for n in range(MANY):
        call, work = begun[7 * (n + 1) % MANY]  # 7 and their number have no common divisor
        work.wait()
        work.wait()
        call.judge()
        for there, memory, _, name in call.made:
            if name.endswith("result"):
                # It is this rank's now: later work must neither see nor undo the change.
                there.neg_()
                memory.neg_()
    on.backend.placement.synchronize()
    on.collectives.barrier()
    for call, _ in begun:
        call.what += ", changed after its wait and read later"
        call.judge()
    for call, work in _begin(on, 3, "all_reduce"):
        tensor, wanted = call.made[0][:2]
        doubled = work.get_future().then(lambda _, tensor=tensor: tensor * 2).wait()
        on.match(doubled, wanted * 2, "what a function that follows a collective computed")


@check_on_ranks(
    "collectives, the device's own work and its allocator follow the order of the calls",
    means="A sum holds gradients of the step before, or of another layer, now and then; streams do "
    "not wait for each other, or memory is given away that a collective still reads.",
)
def in_order_with_work(on: RankContext) -> None:
    on.asked_by_engines()
    size = 2**18 + 3
    values = [on.values(size, torch.float32, rank) for rank in on.ranks]
    # The input has no other name: it is free as soon as the library lets it go.
    whole = on.to_device(torch.zeros(size * on.world_size), torch.float32)
    mine = on.to_device(values[on.rank], torch.float32)
    work = dist.all_gather_into_tensor(whole, mine, async_op=True)
    del mine
    _others = [torch.full((size,), -1.0, device=on.device) for _ in range(4)]
    work.wait()
    on.match(whole, torch.cat(values), "a gather of a tensor that nobody holds")
    tensor = on.to_device(values[on.rank], torch.float32)
    wanted = torch.stack(values)
    for _ in range(4):
        # Nothing here waits for the device: only the order of calls tells what is to be summed.
        tensor.mul_(2.0).sub_(1.0)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        tensor.mul_(1.0 / 16)
        wanted = ((wanted * 2.0 - 1.0).sum(0) / 16).expand_as(wanted)
    on.match(tensor, wanted[0], "sums between computations", wanted[0].abs().max() * 2.0**-18)
