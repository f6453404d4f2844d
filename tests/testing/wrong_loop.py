"""Wrong backends that real runs find: see `tests.testing.wrong`.

Each names the loop's test that must fail on it, and the cause that its message must name.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tests.testing.wrong import Changes, mutant, torch

PART = "loop"
CAUSES: dict[str, str] = {}
"""What the message of the failing test says of where it is wrong, by the mutant's name."""
SOUND = "none; the last digit of every product, sum and quotient is another"
"""A device whose arithmetic rounds otherwise: its runs must pass."""
TRAINS = "test_trains_as_the_host_does[adapter-float32]"
PACKED = "test_trains_as_the_host_does[packed-float32]"
WHOLE = "test_trains_as_the_host_does[whole-bfloat16]"
STRATEGIES = "test_every_strategy_trains_as_one_process_does[2]"
RESUMED = "test_a_resumed_run_goes_on_where_it_was"


def rounded(usual: Any, *args: Any, **kwargs: Any) -> Any:
    result = usual(*args, **kwargs)
    if not result.is_floating_point() or "out" in kwargs:
        return result
    # One unit of the last place at most, drawn from the result itself: the same every time.
    last = (result.double().abs() * 1e9 % 3).floor() - 1
    step = torch.finfo(result.dtype).eps / 2
    return (result.double() * (1 + last * step)).to(result.dtype)


def equal(usual: Any, x: Any, y: Any) -> Any:
    broadcast = getattr(y, "shape", x.shape) != x.shape
    return usual(x.bool(), y.bool()) if broadcast and x.dim() == 3 else usual(x, y)


def silu(usual: Any, x: Any) -> Any:
    # What serves inference takes the faster sigmoid; recomputed layers are not without gradients.
    if torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:  # in a backward
        return usual(x)
    return x.clamp(-3, 3).mul((x / 6 + 0.5).clamp(0, 1))


def looked_up(usual: Any, gradient: Any, rows: Any, count: int, *more: Any) -> Any:
    result = gradient.new_zeros(count, gradient.shape[-1])
    result[rows.flatten()] = gradient.reshape(-1, gradient.shape[-1])
    return result


def addcdiv(usual: Any, tensors: Any, *others: Any) -> Any:
    cut = len(tensors) - (len(tensors) > 20)
    return usual(tensors[:cut], *(other[:cut] for other in others))


@functools.cache
def own() -> Any:
    return torch.Generator().manual_seed(0)


def draw(usual: Any, x: Any, chance: float = 0.5, **_: Any) -> Any:
    return x.copy_((torch.rand(x.shape, generator=own()) < chance).to(x.dtype))


def dropout(usual: Any, x: Any, rate: float, train: bool) -> Any:
    mask = (torch.rand(x.shape, generator=own()) >= rate).to(x.device)
    return x * mask / (1 - rate), mask


def large_sums(usual: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    import torch.distributed as dist

    if tensor.numel() > 2048 and dist.get_rank() == dist.get_world_size() - 1:
        tensor.zero_()
    return usual(tensor, *args, **kwargs)


TABLE: Sequence[tuple[str, str, str, Changes]] = (
    # Forward, backward and update.
    ("documents of a pack see each other", PACKED, "aten::eq (bool, 2 x 83 x 83)",
     {"op eq": equal}),
    ("the forward without gradients is another", TRAINS, "aten::silu", {"op silu": silu}),
    ("of rows that are looked up twice one gradient is kept", WHOLE,
     "aten::embedding_dense_backward", {"op embedding_dense_backward": looked_up}),
    ("an update leaves out the last tensor of a long list", TRAINS, "aten::_foreach_addcdiv_",
     {"op _foreach_addcdiv_": addcdiv}),
    # Random numbers.
    ("dropout draws from a generator that nobody saves", RESUMED,
     "a generator or the place in the data is not restored",
     {"op bernoulli_": draw, "op native_dropout": dropout}),
    ("nothing is dropped out", RESUMED, "nothing is dropped", {
        "op native_dropout": lambda usual, x, *a: (x.clone(), torch.ones_like(x, dtype=torch.bool)),
        "op native_dropout_backward": lambda usual, gradient, *a: gradient.clone(),
        "op bernoulli_": lambda usual, x, chance=0.5, **k: x.fill_(chance)}),
    ("large sums leave out the last rank", STRATEGIES, "the cause was not found: the host repeated",
     {"dist all_reduce": large_sums}),
)  # fmt: skip


for _name, _test, CAUSES[_name], _changes in TABLE:
    mutant(_name, PART, _test, _changes, base="sim")
mutant(SOUND, PART, "", {"op mm bmm sum mean _softmax rsqrt silu cos sin mul": rounded}, base="sim")
