"""Wrong backends that real runs find: see `tests.testing.wrong`.

Each names the loop's test that must fail on it, and the cause that its message must name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tests.testing.wrong import Wrong, mutant

PART = "loop"
CAUSES: dict[str, str] = {}
"""What the message of the failing test says of where it is wrong, by the mutant's name."""

TRAINS = "test_trains_as_the_host_does[float32]"
PACKED = "test_trains_packed_rows_as_the_host_does"
WHOLE = "test_trains_all_weights_as_the_host_does"
STRATEGIES = "test_every_strategy_trains_as_one_process_does"
RESUMED = "test_a_resumed_run_goes_on_where_it_was"


def wrong_in_a_run(
    name: str, *, test: str, cause: str
) -> Callable[[Callable[[Wrong], None]], Callable[[Wrong], None]]:
    """Decorator: a line of the table."""
    CAUSES[name] = cause
    return mutant(name, part=PART, check=test, base="sim")


SOUND = "none; the last digit of every product, sum and quotient is another"
"""A device whose arithmetic rounds otherwise: its runs must pass."""


@mutant(SOUND, part=PART, check="", base="sim")
def _(on: Wrong) -> None:
    @on.operation("mm", "bmm", "sum", "mean", "_softmax", "rsqrt", "silu", "cos", "sin", "mul")
    def rounded(usual: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        result = usual(*args, **kwargs)
        if not result.is_floating_point() or "out" in kwargs:
            return result
        # One unit of the last place at most, drawn from the result itself: the same every time.
        last = (result.double().abs() * 1e9 % 3).floor() - 1
        step = torch.finfo(result.dtype).eps / 2
        return (result.double() * (1 + last * step)).to(result.dtype)


# -- forward and backward -------------------------------------------------------------------------


@wrong_in_a_run(
    "softmax's gradient is wrong for packed rows alone",
    test=PACKED,
    cause="aten::_softmax_backward_data (float32, 2 x 4 x 83 x 83)",
)
def _(on: Wrong) -> None:
    @on.operation("_softmax_backward_data")
    def backward(usual: Any, gradient: Any, output: Any, dim: int, dtype: Any) -> Any:
        result = usual(gradient, output, dim, dtype)
        # A kernel for several rows of keys, whose second half begins with the first one's sum.
        return result * 1.25 if output.dim() == 4 and len(output) > 1 else result


@wrong_in_a_run(
    "documents of a pack see each other",
    test=PACKED,
    cause="aten::eq (bool, 2 x 83 x 83)",
)
def _(on: Wrong) -> None:
    @on.operation("eq")
    def equal(usual: Any, x: Any, y: Any) -> Any:
        broadcast = getattr(y, "shape", x.shape) != x.shape
        return usual(x.bool(), y.bool()) if broadcast and x.dim() == 3 else usual(x, y)


@wrong_in_a_run(
    "the forward without gradients is another",
    test=TRAINS,
    cause="aten::silu",
)
def _(on: Wrong) -> None:
    @on.operation("silu")
    def silu(usual: Any, x: Any) -> Any:
        import torch

        # What serves inference takes the faster sigmoid; recomputed layers are not without.
        return (
            usual(x)
            if torch.is_grad_enabled() or _in_backward()
            else x.clamp(-3, 3).mul((x / 6 + 0.5).clamp(0, 1))
        )


@wrong_in_a_run(
    "of rows that are looked up twice one gradient is kept",
    test=WHOLE,
    cause="aten::embedding_dense_backward",
)
def _(on: Wrong) -> None:
    @on.operation("embedding_dense_backward")
    def backward(
        usual: Any, gradient: Any, rows: Any, count: int, padding: int, scaled: bool
    ) -> Any:
        result = gradient.new_zeros(count, gradient.shape[-1])
        result[rows.flatten()] = gradient.reshape(-1, gradient.shape[-1])
        return result


# -- updates -------------------------------------------------------------------------------------


@wrong_in_a_run(
    "AdamW's second moment is not corrected",
    test=TRAINS,
    cause="aten::_foreach_div_",
)
def _(on: Wrong) -> None:
    @on.operation("_foreach_div_")
    def div(usual: Any, tensors: Any, by: Any) -> Any:
        if isinstance(by, (list, tuple)) and isinstance(by[0], float):
            return None
        return usual(tensors, by)


@wrong_in_a_run(
    "an update leaves out the last tensor of a long list",
    test=TRAINS,
    cause="aten::_foreach_addcdiv_",
)
def _(on: Wrong) -> None:
    @on.operation("_foreach_addcdiv_")
    def addcdiv(usual: Any, tensors: Any, *others: Any) -> Any:
        cut = len(tensors) - (len(tensors) > 20)
        return usual(tensors[:cut], *(other[:cut] for other in others))


@wrong_in_a_run(
    "gradients of later micro-batches are lost",
    test=TRAINS,
    cause="aten::add_",
)
def _(on: Wrong) -> None:
    @on.operation("add_")
    def add(usual: Any, x: Any, other: Any, **kwargs: Any) -> Any:
        if getattr(other, "shape", None) == (4, 32) == tuple(x.shape) and not kwargs:
            return x
        return usual(x, other, **kwargs)


# -- ranks and random numbers --------------------------------------------------------------------


@wrong_in_a_run(
    "large sums leave out the last rank",
    test=STRATEGIES,
    cause="one process on the device is as on the host; the cause was not found: the host repeated",
)
def _(on: Wrong) -> None:
    @on.distributed("all_reduce")
    def sums(usual: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        if tensor.numel() > 2048 and dist.get_rank() == dist.get_world_size() - 1:
            tensor.zero_()
        return usual(tensor, *args, **kwargs)


@wrong_in_a_run(
    "dropout draws from a generator that nobody saves",
    test=RESUMED,
    cause="a generator or the place in the data is not restored",
)
def _(on: Wrong) -> None:
    @on.when_opened
    def own() -> None:
        import torch

        on.generator = torch.Generator().manual_seed(0)  # type: ignore[attr-defined]

    def draw(usual: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        chance = next((a for a in args if isinstance(a, float)), 0.5)
        drawn = torch.rand(x.shape, generator=on.generator)  # type: ignore[attr-defined]
        return x.copy_((drawn < chance).to(x.dtype))

    on.operation("bernoulli_")(draw)

    @on.operation("native_dropout")
    def dropout(usual: Any, x: Any, p: float, train: bool) -> Any:
        import torch

        kept = torch.rand(x.shape, generator=on.generator) >= p  # type: ignore[attr-defined]
        mask = kept.to(x.device)
        return x * mask / (1 - p), mask


@wrong_in_a_run(
    "nothing is dropped out",
    test=RESUMED,
    cause="nothing is dropped",
)
def _(on: Wrong) -> None:
    @on.operation("native_dropout")
    def dropout(usual: Any, x: Any, p: float, train: bool) -> Any:
        import torch

        return x.clone(), torch.ones_like(x, dtype=torch.bool)

    @on.operation("native_dropout_backward")
    def backward(usual: Any, gradient: Any, mask: Any, scale: float) -> Any:
        return gradient.clone()

    @on.operation("bernoulli_")
    def bernoulli(usual: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x.fill_(next((a for a in args if isinstance(a, float)), 0.5))


@functools.cache
def _engine() -> Any:
    import torch

    return torch._C


def _in_backward() -> bool:
    return bool(_engine()._current_graph_task_id() != -1)
