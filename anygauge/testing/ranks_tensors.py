"""Checks of the contract's collectives on tensors that are not plain: large, empty, views, special
values; what they leave alone; and that results last."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch

from anygauge.interface import HOST_DEVICE
from anygauge.testing.together import LARGE, Together, bound, check_on_ranks, total

ROUNDS = 3
"""Calls in a row of which all results are kept."""


@check_on_ranks(
    "tensors larger than a library's buffers are reduced, sent and gathered whole",
    means="Large gradients or weights are wrong from some element on; vendors cut a message into "
    "parts, and lose the last or take it twice.",
)
def large_tensors(on: Together) -> None:
    dtype = torch.float32
    values = [on.exact((LARGE,), dtype, rank) for rank in on.ranks]
    mine = on.put(values[on.rank], dtype)
    on.same(on.collectives.all_reduce(mine.clone()), total(values), "all_reduce sum")
    largest = torch.stack(values).amax(0)
    on.same(on.collectives.all_reduce(mine.clone(), op="max"), largest, "all_reduce max")
    for rank, part in enumerate(on.collectives.all_gather(mine)):
        on.same(part, values[rank], f"all_gather, of rank {rank}")
    last = on.world_size - 1
    on.same(on.collectives.broadcast(mine, source=last), values[last], f"broadcast from {last}")
    for dtype in on.dtypes()[1:]:
        values = [on.exact((LARGE,), dtype, rank) for rank in on.ranks]
        result = on.collectives.all_reduce(on.put(values[on.rank], dtype))
        on.same(result, total(values), "all_reduce sum")


@check_on_ranks(
    "tensors without elements pass, or are refused by all ranks",
    means="A run stops where a rank has nothing to send, such as an expert without tokens; "
    "vendors return early on one rank, and the others wait.",
)
def empty_tensors(on: Together) -> None:
    for shape in ((0,), (3, 0, 2)):
        nothing = torch.zeros(shape).double()

        def fresh(shape: tuple[int, ...] = shape) -> torch.Tensor:
            return torch.zeros(shape, device=on.device)

        def reduces(shape: tuple[int, ...] = shape, nothing: torch.Tensor = nothing) -> None:
            for op in ("sum", "mean", "max"):
                on.same(on.collectives.all_reduce(fresh(shape), op=op), nothing, f"all_reduce {op}")

        def moves(shape: tuple[int, ...] = shape, nothing: torch.Tensor = nothing) -> None:
            on.same(on.collectives.broadcast(fresh(shape), source=1), nothing, "broadcast")
            parts = on.collectives.all_gather(fresh(shape))
            on.hold(len(parts) == on.world_size, f"all_gather gave {len(parts)} parts")
            for part in parts:
                on.same(part, nothing, "all_gather")

        on.attempt(reduces, f"reductions of {shape}")
        on.attempt(moves, f"broadcast and gather of {shape}")
    # The next one is whole, so nobody is a call behind.
    tensor = torch.full((3,), float(on.rank), device=on.device)
    wanted = torch.full((3,), float(sum(on.ranks))).double()
    on.same(on.collectives.all_reduce(tensor), wanted, "all_reduce after empty ones")


@check_on_ranks(
    "NaN and infinities are moved and summed as they are",
    means="A gradient that overflowed looks finite, so the step is not skipped; vendors' kernels "
    "take NaN as a filler, or saturate.",
)
def special_values_are_reduced(on: Together) -> None:
    inf, nan = math.inf, math.nan
    rows = {0: [nan, inf, -inf, inf, 1.0, 0.0, nan], 1: [1.0, 1.0, 1.0, -inf, inf, nan, nan]}
    for dtype in on.dtypes():
        values = [
            torch.tensor([*rows.get(rank, [2.0] * 7), 1.5 * rank]).double() for rank in on.ranks
        ]
        mine = on.put(values[on.rank], dtype)
        for rank, part in enumerate(on.collectives.all_gather(mine)):
            on.same(part, values[rank], f"all_gather, of rank {rank}")
        for source in (0, 1):
            result = on.collectives.broadcast(mine.clone(), source=source)
            on.same(result, values[source], f"broadcast from rank {source}")
        on.same(on.collectives.all_reduce(mine.clone()), total(values), "all_reduce sum")
        mean = total(values) / on.world_size
        within = torch.full_like(mean, 0.01)  # of the last element, which is finite
        on.same(
            on.collectives.all_reduce(mine.clone(), op="mean"),
            mean,
            "all_reduce mean",
            within=within,
        )
        # Which of NaN and a number is larger is left to the library.
        result = on.collectives.all_reduce(mine[1:3].clone(), op="max")
        on.same(result, torch.stack(values)[:, 1:3].amax(0), "all_reduce max")


@check_on_ranks(
    "a tensor that begins within another is served, and what lies around it stays",
    means="Neighbours of a gradient in a flat buffer change, or the wrong part is sent; vendors "
    "take the address of the storage instead of the tensor's, or round sizes up to 16 bytes.",
)
def offset_views(on: Together) -> None:
    for dtype in on.dtypes():
        for shape in ((), (1,), (7,), (33, 31)):
            values = [on.exact(shape, dtype, rank, salt=1) for rank in on.ranks]
            actions: dict[str, tuple[Callable[[torch.Tensor], object], torch.Tensor]] = {
                "all_reduce": (on.collectives.all_reduce, total(values)),
                "broadcast": (lambda t: on.collectives.broadcast(t, source=1), values[1]),
                "all_gather": (on.collectives.all_gather, values[on.rank]),
            }
            for name, (action, wanted) in actions.items():
                memory, view = on.guarded(shape, dtype)
                view.copy_(on.put(values[on.rank], dtype))
                result = action(view)
                on.same(view, wanted, f"{name} of a view")
                on.unharmed(memory, f"{name} of a view {shape} of {dtype}")
                if isinstance(result, list):
                    for rank, part in enumerate(result):
                        on.same(part, values[rank], f"all_gather of a view, of rank {rank}")


@check_on_ranks(
    "views with gaps, of another order or expanded are served right, or refused",
    means="A transposed or sliced weight is wrong after a broadcast, without an error; the "
    "library moves the memory from the first element on, and nobody made it contiguous.",
)
def strided_views(on: Together) -> None:
    dtype = torch.float32
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "transposed": lambda base: base.t(),
        "every second column": lambda base: base[:, ::2],
        "one column": lambda base: base[:, 1],
        "expanded": lambda base: base[:1].expand(5, -1),
        "folded": lambda base: base.view(-1)[:6].as_strided((2, 3), (1, 2)),
    }
    for name, view in views.items():
        bases = [on.exact((6, 8), dtype, rank, salt=2) for rank in on.ranks]
        values = [view(base) for base in bases]
        for op, wanted in {
            "sum": total(values),
            "mean": torch.stack(values).mean(0),
            "max": torch.stack(values).amax(0),
            "broadcast": values[1],
            "gather": values[on.rank],
        }.items():
            base = on.put(bases[on.rank], dtype)
            results: list[torch.Tensor] = []
            given = view(base)

            def served(
                op: str = op,
                tensor: torch.Tensor = given,
                results: list[torch.Tensor] = results,
            ) -> None:
                if op == "broadcast":
                    results.append(on.collectives.broadcast(tensor, source=1))
                elif op == "gather":
                    results.extend(on.collectives.all_gather(tensor))
                else:
                    results.append(on.collectives.all_reduce(tensor, op=op))

            what = f"{op} of a view that is {name}"
            if on.attempt(served, what):
                continue
            within = bound(values, dtype, on.world_size + 1)
            if op == "gather":
                for rank, part in enumerate(results):
                    on.same(part, values[rank], f"{what}, of rank {rank}")
            else:
                on.same(results[0], wanted, what, within=within if op == "mean" else None)
            # In place means in the memory of the view, and in nothing beside it.
            after, left = bases[on.rank].clone(), base.to(HOST_DEVICE).double()
            if name != "expanded":
                view(after).copy_(wanted)
                error = float((left - after).abs().max())
                on.hold(error <= float(within.max()), f"{what}: its memory is off by {error}")


@check_on_ranks(
    "all_gather leaves its input as it was",
    means="A tensor that is gathered for a log has other values afterwards; vendors use the input "
    "as working memory.",
)
def inputs_unchanged(on: Together) -> None:
    for dtype in [*on.dtypes(), torch.int64]:
        floating = dtype.is_floating_point
        for size in (1, 7, 4099):
            make = on.exact if floating else on.whole
            values = [make((size,), dtype, rank) for rank in on.ranks]
            mine = on.put(values[on.rank], dtype)
            parts = on.collectives.all_gather(mine)
            on.same(mine, values[on.rank], "input of all_gather, afterwards")
            # A result is nobody's input: to change it changes nothing else.
            for part in parts:
                part.zero_()
            on.same(mine, values[on.rank], "input of all_gather, after its results were changed")


@check_on_ranks(
    "results stay as they are while later calls run",
    means="The result of one collective takes the values of the next; vendors hand out a buffer of "
    "their own instead of the tensor that they were given.",
)
def results_kept(on: Together) -> None:
    dtype = torch.float32
    kept = []
    for turn in range(ROUNDS):
        values = [on.exact((1031,), dtype, rank, salt=turn) for rank in on.ranks]
        mine = on.put(values[on.rank], dtype)
        kept.append((on.collectives.all_gather(mine), values))
        kept.append(([on.collectives.all_reduce(mine.clone())], [total(values)]))
        turned = (turn + 1) % on.world_size
        kept.append(([on.collectives.broadcast(mine.clone(), source=turned)], [values[turned]]))
    for n, (results, wanted) in enumerate(kept):
        for part, right in zip(results, wanted, strict=True):
            on.same(part, right, f"the result of call {n + 1} of {len(kept)}, after the others")


@check_on_ranks(
    "after a reduction all ranks hold the same bits",
    means="Replicas drift apart by a last digit in each step, until they are different models; "
    "vendors sum in another order on each rank.",
)
def ranks_agree(on: Together) -> None:
    for dtype in on.dtypes():
        for op in ("sum", "mean", "max"):
            for size in (7, 4099, 2**16 + 3):
                tensor = on.put(on.fractions((size,), dtype, on.rank), dtype)
                result = on.collectives.all_reduce(tensor, op=op).to(HOST_DEVICE)
                bits = result.view(torch.uint8).numpy().tobytes()
                digests = on.collectives.gather_objects(hashlib.sha256(bits).hexdigest())
                on.hold(
                    len(set(digests)) == 1,
                    f"all_reduce {op} of {size} x {dtype} differs between ranks",
                )


@check_on_ranks(
    "collectives work within backward",
    means="Gradients are summed too early, or not at all, where a hook does it; backward runs in "
    "a thread of its own, in which vendors' libraries have no current device or stream.",
)
def backward_reduces(on: Together) -> None:
    dtype = torch.float32
    values = [on.exact((257,), dtype, rank, salt=5) for rank in on.ranks]
    weights = [torch.ones(257, device=on.device, requires_grad=True) for _ in range(2)]
    gathered: list[torch.Tensor] = []

    def gathers(gradient: torch.Tensor) -> None:
        gathered.extend(on.collectives.all_gather(gradient))

    weights[0].register_hook(lambda gradient: on.collectives.all_reduce(gradient.clone()))
    weights[1].register_hook(gathers)
    mine = on.put(values[on.rank], dtype)
    # The second depends on the first, so that hooks run in one order on all ranks.
    ((weights[0] * weights[1]) * mine).sum().backward()
    assert weights[0].grad is not None
    on.same(weights[0].grad, total(values), "all_reduce in a hook of backward")
    on.hold(len(gathered) == on.world_size, "the hook of backward gathered nothing")
    for rank, part in enumerate(gathered):
        on.same(part, values[rank], f"all_gather in a hook of backward, of rank {rank}")
    result = on.collectives.all_reduce(mine.clone())
    on.same(result, total(values), "all_reduce after backward")
