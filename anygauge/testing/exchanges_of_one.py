"""Checks of what goes from one rank, or to one, in `torch.distributed`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from anygauge.testing.together import LARGE, Together, check_on_ranks, total

MEBIBYTE = 2**20


@check_on_ranks(
    "a reduction to one rank is right on that one, whichever it is",
    means="ZeRO-1 and ZeRO-2 update with wrong gradients; the vendor's library takes the root in "
    "numbers of its own, or always the first.",
)
def reduces_to_one(on: Together) -> None:
    on.asked_by_engines()
    for dtype in on.dtypes():
        for root in on.ranks:
            values = [on.exact((1003,), dtype, rank, salt=root) for rank in on.ranks]
            largest = torch.stack(values).amax(0)
            for name, op, wanted in (
                ("sum", dist.ReduceOp.SUM, total(values)),
                ("maximum", dist.ReduceOp.MAX, largest),
            ):
                tensor = on.put(values[on.rank], dtype)
                dist.reduce(tensor, dst=root, op=op)
                # What the others hold afterwards is left to the library.
                if on.rank == root:
                    on.same(tensor, wanted, f"reduce to rank {root}, a {name}")


@check_on_ranks(
    "one rank gathers from all and scatters to all, whichever it is",
    means="The state that one rank saves for all is that of others; the library lacks these forms, "
    "and what takes their place has another order.",
)
def gathers_to_one(on: Together) -> None:
    on.asked_by_engines()
    for root in on.ranks:
        values = [on.exact((257,), torch.float32, rank, salt=root) for rank in on.ranks]
        mine = on.put(values[on.rank], torch.float32)
        parts = [on.empty((257,), torch.float32) for _ in on.ranks] if on.rank == root else None

        def gathers(root: int = root, mine: Any = mine, parts: Any = parts) -> None:
            dist.gather(mine, parts, dst=root)

        if not on.attempt(gathers, "a gather to one rank"):
            for rank, part in enumerate(parts or []):
                on.same(part, values[rank], f"gather to rank {root}, of rank {rank}")
        part = on.empty((257,), torch.float32)
        each = [on.put(value, torch.float32) for value in values] if on.rank == root else None

        def scatters(root: int = root, part: Any = part, each: Any = each) -> None:
            dist.scatter(part, each, src=root)

        if not on.attempt(scatters, "a scatter from one rank"):
            on.same(part, values[on.rank], f"scatter from rank {root}")


@check_on_ranks(
    "messages between two ranks arrive whole and in the order in which they were sent",
    means="A stage of a pipeline works on the activations of another micro-batch; the library does "
    "not keep the order, or takes messages from any rank.",
)
def messages(on: Together) -> None:
    on.asked_by_engines()
    after, before = (on.rank + 1) % on.world_size, (on.rank - 1) % on.world_size
    sizes = (1, 7, 1003, LARGE)

    def sends() -> None:
        for n, size in enumerate(sizes):
            tensor = on.put(on.exact((size,), torch.float32, on.rank, salt=n), torch.float32)
            dist.send(tensor, dst=after)

    def receives() -> None:
        for n, size in enumerate(sizes):
            tensor = on.empty((size,), torch.float32)
            dist.recv(tensor, src=before)
            wanted = on.exact((size,), torch.float32, before, salt=n)
            on.same(tensor, wanted, f"message {n + 1} of rank {before}")

    def passes() -> None:
        # Around the ring: the first begins, so that nobody waits for a receiver that sends.
        for action in (sends, receives) if on.rank == 0 else (receives, sends):
            action()

    on.required_or_not_asked(passes, "send and recv")


@check_on_ranks(
    "several messages may be under way, and each is complete once it was waited for",
    means="A pipeline that receives ahead works on half of a message; the library's handles of "
    "messages share one event, or one buffer.",
)
def messages_under_way(on: Together) -> None:
    on.asked_by_engines()
    after, before = (on.rank + 1) % on.world_size, (on.rank - 1) % on.world_size
    sizes = (2**18 + 1, 7, 1003)
    leaving = [
        on.put(on.exact((size,), torch.float32, on.rank, salt=n), torch.float32)
        for n, size in enumerate(sizes)
    ]
    arriving = [on.empty((size,), torch.float32) for size in sizes]
    works: dict[str, list[Any]] = {"sent": [], "received": []}

    def sends() -> None:
        works["sent"] = [dist.isend(tensor, dst=after) for tensor in leaving]

    def receives() -> None:
        works["received"] = [dist.irecv(tensor, src=before) for tensor in arriving]

    def passes() -> None:
        # The first begins: a library may do a rank's messages one after the other.
        for action in (sends, receives) if on.rank == 0 else (receives, sends):
            action()
        for n in reversed(range(len(sizes))):
            works["received"][n].wait()
            wanted = on.exact((sizes[n],), torch.float32, before, salt=n)
            on.same(arriving[n], wanted, f"message {n + 1} of {len(sizes)}, the last first")
        for work in works["sent"]:
            work.wait()

    on.required_or_not_asked(passes, "isend and irecv")


@check_on_ranks(
    "messages in both directions, started as one, arrive where they belong",
    means="Stages of a pipeline that exchange activations and gradients hang, or confuse them; the "
    "library starts them one by one, or matches them by their order alone.",
)
def messages_both_ways(on: Together) -> None:
    on.asked_by_engines()
    after, before = (on.rank + 1) % on.world_size, (on.rank - 1) % on.world_size
    forward = on.exact((1003,), torch.float32, on.rank, salt=1)
    backward = on.exact((1003,), torch.float32, on.rank, salt=2)
    arriving = [on.empty((1003,), torch.float32) for _ in range(2)]

    def exchanges() -> None:
        operations = [
            dist.P2POp(dist.isend, on.put(forward, torch.float32), after),
            dist.P2POp(dist.irecv, arriving[0], before),
            dist.P2POp(dist.isend, on.put(backward, torch.float32), before),
            dist.P2POp(dist.irecv, arriving[1], after),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    on.required_or_not_asked(exchanges, "batch_isend_irecv")
    wanted = on.exact((1003,), torch.float32, before, salt=1)
    on.same(arriving[0], wanted, f"what rank {before} sent onwards")
    wanted = on.exact((1003,), torch.float32, after, salt=2)
    on.same(arriving[1], wanted, f"what rank {after} sent back")


@check_on_ranks(
    "objects are broadcast and gathered by way of the device",
    means="Ranks of an engine begin with settings of their own, or stop while they unpack them; "
    "objects travel as bytes on the device, with their length before them.",
)
def object_lists(on: Together) -> None:
    on.asked_by_engines()
    for root in on.ranks:
        text = f"é{root}" * (MEBIBYTE // 2 if root == 1 else 3)
        wanted = [{"of": root, "text": text}, (1, 2.5, None), [root] * 7]
        given = list(wanted) if on.rank == root else [None] * 3
        dist.broadcast_object_list(given, src=root)
        on.hold(given == wanted, f"broadcast_object_list from rank {root} gave something else")

    def report(rank: int) -> object:
        return {"rank": rank, "text": "ß" * (1 + rank * MEBIBYTE // 4)}

    found: list[Any] = [None] * on.world_size
    dist.all_gather_object(found, report(on.rank))
    for rank, got in enumerate(found):
        on.hold(got == report(rank), f"all_gather_object gave something else for rank {rank}")
