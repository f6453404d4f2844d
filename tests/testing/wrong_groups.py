"""Wrong subgroups and meshes: see `tests.testing.wrong`."""

from __future__ import annotations

from typing import Any

from tests.testing.wrong import Wrong, mutant
from tests.testing.wrong_ranks import on_card


def is_subgroup(group: Any) -> bool:
    """Whether it is one of the device's, and not that of all ranks."""
    import torch.distributed as dist

    if group is None or group is dist.group.WORLD:
        return False
    return bool(dist.get_backend(group) == "simccl")


@mutant(
    "ranks of a subgroup are numbered backwards", part="ranks", check="group_members", base="sim"
)
def _(on: Wrong) -> None:
    @on.distributed("all_gather")
    def gather(usual: Any, parts: Any, mine: Any, group: Any = None, **kwargs: Any) -> Any:
        return usual(parts[::-1] if is_subgroup(group) else parts, mine, group, **kwargs)


@mutant("a subgroup is forgotten", part="ranks", check="group_reductions", base="sim")
def _(on: Wrong) -> None:
    @on.method("collectives.all_reduce")
    def all_reduce(self: Any, usual: Any, tensor: Any, op: str = "sum", group: Any = None) -> Any:
        return usual(tensor, op)


@mutant(
    "the mean in a subgroup divides by all ranks",
    part="ranks",
    check="group_reductions",
    base="sim",
    ranks=4,
)
def _(on: Wrong) -> None:
    @on.method("collectives.all_reduce")
    def all_reduce(self: Any, usual: Any, tensor: Any, op: str = "sum", group: Any = None) -> Any:
        import torch.distributed as dist

        if op == "mean":
            return usual(tensor, "sum", group).div_(dist.get_world_size())
        return usual(tensor, op, group)


@mutant(
    "the library's mean in a subgroup divides by all ranks",
    part="ranks",
    check="group_reductions",
    base="sim",
    ranks=3,
)
def _(on: Wrong) -> None:
    @on.distributed("all_reduce")
    def all_reduce(usual: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        if kwargs.get("op") != dist.ReduceOp.AVG:
            return usual(tensor, *args, **kwargs)
        work = usual(tensor, *args, **{**kwargs, "op": dist.ReduceOp.SUM})
        tensor.div_(dist.get_world_size())
        return work


@mutant(
    "the source in a subgroup is mapped twice",
    part="ranks",
    check="group_sources",
    base="sim",
    ranks=3,
)
def _(on: Wrong) -> None:
    @on.distributed("broadcast")
    def broadcast(usual: Any, tensor: Any, src: int = 0, group: Any = None, **kwargs: Any) -> Any:
        import torch.distributed as dist

        if is_subgroup(group):
            ranks = dist.get_process_group_ranks(group)
            src = ranks[src % len(ranks)]
        return usual(tensor, src, group, **kwargs)


@mutant(
    "a reduction in a subgroup goes to its first rank",
    part="ranks",
    check="group_sources",
    base="sim",
    ranks=4,
)
def _(on: Wrong) -> None:
    @on.distributed("reduce")
    def reduce(
        usual: Any, tensor: Any, dst: int = 0, op: Any = None, group: Any = None, **kwargs: Any
    ) -> Any:
        import torch.distributed as dist

        op = dist.ReduceOp.SUM if op is None else op
        first = dist.get_process_group_ranks(group)[0] if is_subgroup(group) else dst
        return usual(tensor, first, op, group, **kwargs)


@mutant(
    "the part in a subgroup is that of the rank among all",
    part="ranks",
    check="group_buffers",
    base="sim",
    ranks=3,
)
def _(on: Wrong) -> None:
    @on.distributed("reduce_scatter_tensor")
    def scatter(usual: Any, output: Any, whole: Any, *args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        group = kwargs.get("group")
        if not is_subgroup(group):
            return usual(output, whole, *args, **kwargs)
        summed = whole.clone()
        dist.all_reduce(summed, group=group)
        place = dist.get_rank() % dist.get_world_size(group)
        return output.copy_(summed.chunk(dist.get_world_size(group))[place])


@mutant(
    "rows and columns of a mesh are swapped",
    part="ranks",
    check="mesh_layouts",
    base="sim",
    ranks=4,
)
def _(on: Wrong) -> None:
    @on.when_opened
    def swap() -> None:
        from torch.distributed.device_mesh import DeviceMesh

        usual = DeviceMesh.get_group
        other = {"dp": "cp", "cp": "dp"}

        def get_group(self: Any, name: Any = None) -> Any:
            return usual(self, other[name] if self.mesh.shape == (2, 2) else name)

        setattr(DeviceMesh, "get_group", get_group)  # noqa: B010  (a method is replaced)


@mutant("all groups have one buffer for results", part="ranks", check="groups_at_once", base="sim")
def _(on: Wrong) -> None:
    buffers: dict[Any, Any] = {}

    @on.distributed("all_reduce")
    def all_reduce(usual: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        from tests.testing.wrong_handles import Handle, is_asynchronous, summed_apart

        if not is_asynchronous(tensor, kwargs):
            return usual(tensor, *args, **kwargs)
        buffers[tensor.shape] = summed_apart(usual, tensor, args, kwargs)
        return Handle(lambda: tensor.copy_(buffers[tensor.shape]))


@mutant(
    "calls of all groups are counted together",
    part="ranks",
    check="groups_are_independent",
    base="sim",
    ranks=3,
)
def _(on: Wrong) -> None:
    calls: list[None] = []

    @on.distributed("all_reduce")
    def all_reduce(usual: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_subgroup(kwargs.get("group")):
            return usual(tensor, *args, **kwargs)
        calls.append(None)
        # Its library has room for so many calls before all ranks must meet.
        return usual(tensor.clone() if len(calls) > 8 else tensor, *args, **kwargs)


@mutant(
    "messages in a subgroup are one element short", part="ranks", check="group_messages", base="sim"
)
def _(on: Wrong) -> None:
    @on.distributed("recv")
    def recv(usual: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        sender = usual(tensor, *args, **kwargs)
        if is_subgroup(kwargs.get("group")):
            tensor[-1:].zero_()
        return sender


@mutant("a subgroup's barrier returns at once", part="ranks", check="group_barriers", base="sim")
def _(on: Wrong) -> None:
    @on.distributed("barrier")
    def barrier(usual: Any, group: Any = None, **kwargs: Any) -> Any:
        return None if is_subgroup(group) else usual(group, **kwargs)


@mutant(
    "a subgroup's barrier is one of all ranks", part="ranks", check="group_barriers", base="sim"
)
def _(on: Wrong) -> None:
    @on.distributed("barrier")
    def barrier(usual: Any, group: Any = None, **kwargs: Any) -> Any:
        return usual(None if is_subgroup(group) else group, **kwargs)


@mutant("the limit of groups is set for none", part="ranks", check="limits_hold", base="sim")
def _(on: Wrong) -> None:
    @on.method("collectives.limit")
    def limit(self: Any, usual: Any, seconds: float) -> tuple[str, ...]:
        return ()


@mutant("a group's own limit is that of all", part="ranks", check="limits_hold")
def _(on: Wrong) -> None:
    @on.distributed("new_group")
    def new_group(usual: Any, ranks: Any = None, timeout: Any = None, **kwargs: Any) -> Any:
        return usual(ranks, **kwargs)


@mutant(
    "the first group taken down takes the others with it",
    part="ranks",
    check="groups_are_taken_down",
    base="sim",
)
def _(on: Wrong) -> None:
    gone: list[None] = []

    @on.distributed("destroy_process_group")
    def destroy(usual: Any, group: Any = None) -> None:
        gone.append(None)
        usual(group)

    @on.distributed("all_reduce")
    def all_reduce(usual: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return usual(tensor.clone() if gone and on_card(tensor) else tensor, *args, **kwargs)
