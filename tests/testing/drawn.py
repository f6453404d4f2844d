"""Wrong devices drawn by chance: a second proof of the kit, which was not looked at.

The seed, the parts and the ways below were committed before the checks that shall find them. A
drawn device is a simulated card with one operation that is wrong in one way, in some cases:

    always gather scale, of large tensors

`Drawn` makes it so: it changes what the operation gives out, whoever calls it.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

SEEDS = (20261124, 27182818, 31415926)
"""One draw each. The kit was improved by its misses of the first; the second came before that, the
third when nothing was left to improve by the second."""
NUMBER = 120

OPERATIONS = (
    *("mm", "bmm", "addmm", "add", "sub", "mul", "div", "pow", "exp", "log", "rsqrt", "sqrt"),
    *("silu", "silu_backward", "sigmoid", "tanh", "gelu", "neg", "reciprocal", "maximum", "clamp"),
    *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
    *("native_layer_norm", "nll_loss_forward", "linalg_vector_norm", "logsumexp"),
    *("sum", "mean", "amax", "argmax", "cumsum", "sort", "topk", "tril", "triu"),
    *("embedding", "embedding_dense_backward", "index_select", "index", "index_put_", "gather"),
    *("scatter_add_", "index_add_", "where", "masked_fill_", "cat", "copy_", "_to_copy", "clone"),
    *("add_", "mul_", "sub_", "div_", "addcdiv_", "addcmul_", "lerp_"),
)
"""Of torch, by the names of its schemas, as a step of training calls them."""
COLLECTIVES = (
    *("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor"),
    *("reduce_scatter_tensor", "all_to_all_single", "reduce", "scatter", "gather"),
)
"""Of `torch.distributed`."""
COPIES = ("to_device",)
"""Of `Placement`."""

WAYS = ("offset", "type", "scale", "order", "rank", "size")
"""Values stand one place further; went through a shorter type; are too large by a part; two have
changed places; are another rank's, or wrong on one rank alone; the last ones are missing."""
SCALES = (1 + 2**-5, 1 + 2**-3, 2.0)
LARGE = 2**15
_STRIDED = "strided tensors"
CASES: dict[str, Callable[[Sequence[Any]], bool]] = {
    "always": lambda tensors: True,
    "large tensors": lambda tensors: any(t.numel() >= LARGE for t in tensors),
    _STRIDED: lambda tensors: any(not t.is_contiguous() for t in tensors),
    "views with an offset": lambda tensors: any(t.storage_offset() > 0 for t in tensors),
    "two-byte types": lambda tensors: any(t.dtype.itemsize == 2 for t in tensors),
    "sizes that no 16 divides": lambda tensors: any(t.numel() % 16 for t in tensors),
}
_RANK_ALONE = 1
"""Where an operation of one device is wrong on one rank alone."""


@dataclass(frozen=True, slots=True)
class Defect:
    """What is wrong with a drawn device.

    Attributes:
        part: of the kit that should find it: ``device`` or ``ranks``.
        operation: one of the names above.
        way, case: of `WAYS` and `CASES`.
        scale: if the way is ``scale``.
    """

    part: str
    operation: str
    way: str
    case: str
    scale: float

    @property
    def name(self) -> str:
        """Names it to the process that has it."""
        scale = f" {self.scale:g}" if self.way == "scale" else ""
        return f"drawn: {self.operation}, {self.way}{scale}, {self.case}"


@functools.cache
def drawn(seed: int) -> tuple[Defect, ...]:
    """All that a seed gives, none twice and none that an earlier seed gave."""
    chance = random.Random(seed)
    earlier = [one.name for other in SEEDS[: SEEDS.index(seed)] for one in drawn(other)]
    found: dict[str, Defect] = {}
    while len(found) < NUMBER:
        part = chance.choices(("device", "ranks"), (2, 1))[0]
        names = COLLECTIVES if part == "ranks" else (*OPERATIONS, *COPIES)
        one = Defect(
            part,
            chance.choice(names),
            chance.choice([way for way in WAYS if part == "ranks" or way != "rank"]),
            chance.choice(list(CASES)),
            chance.choice(SCALES),
        )
        if one.name not in earlier:
            found.setdefault(one.name, one)
    return tuple(found.values())


def without_effect(defect: Defect) -> str | None:
    """Why no program can meet a drawn defect, if so; None if one can.

    Held by the simulated cards' own ``tests/test_drawn.py``.
    """
    if defect.part == "ranks" and defect.case == _STRIDED:
        return "simulated cards refuse strided tensors in torch.distributed, so that it never runs"
    return None


def changed(tensor: Any, defect: Defect, rank: int, world: int) -> Any:
    """A result as the defect makes it; its shape, type and device stay."""
    import torch

    way = defect.way
    if way == "rank":  # of the operations that `_ranks_mixed_up` does not serve
        return tensor if rank != _RANK_ALONE % world else tensor.roll(1)
    flat = tensor.detach().reshape(-1).clone()
    if not flat.numel():
        return tensor
    if way == "offset":
        flat = flat.roll(1)
    elif way == "order":
        flat[[0, -1]] = flat[[-1, 0]]
    elif way == "size":
        kept = flat.numel() // 16 * 16 if flat.numel() % 16 else flat.numel() - 1
        flat[kept:] = 0
    elif way == "scale" and flat.dtype is not torch.bool:
        flat = (flat * defect.scale).to(flat.dtype)
    elif way == "type":
        flat = _shortened(flat)
    return flat.reshape(tensor.shape)


def _shortened(flat: Any) -> Any:
    """Through half of the bits."""
    import torch

    if flat.dtype.is_floating_point:
        if flat.dtype.itemsize > 2:
            return flat.to(torch.bfloat16).to(flat.dtype)
        bits = flat.view(torch.int16)
        return (bits & -16).view(flat.dtype)
    if flat.dtype is torch.int64:
        return flat.to(torch.int32).to(torch.int64)
    return flat.clamp(-128, 127) if flat.dtype is not torch.bool else flat


_installed: list[Defect] = []


def install(name: str, rank: int, world: int) -> None:
    """Make this process's torch wrong in the way of that name, if any; its cards' tensors alone."""
    defect = next((one for seed in SEEDS for one in drawn(seed) if one.name == name), None)
    # A second time, as each opening asks for it, an exchange of two values would undo the first.
    if defect is None or _installed:
        return
    _installed.append(defect)
    if defect.part == "ranks":  # there are two that are called gather
        _collective(defect, rank, world)
    elif defect.operation in OPERATIONS:
        _operations(defect, rank, world).__enter__()
    else:
        _copies(defect, rank, world)


def on_card(tensor: Any) -> bool:
    """Whether a tensor is a simulated card's."""
    import torch

    return isinstance(tensor, torch.Tensor) and tensor.device.type == "sim"


def _operations(defect: Defect, rank: int, world: int) -> Any:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Wrong(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.namespace != "aten" or func.overloadpacket.__name__ != defect.operation:
                return result
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            first = result[0] if isinstance(result, tuple | list) else result
            # Also a copy from a card, or to one.
            if not any(map(on_card, (*given, first))) or not CASES[defect.case](given):
                return result
            wrong = changed(first, defect, rank, world)
            first.detach().copy_(wrong)
            return result

    return Wrong()


def _copies(defect: Defect, rank: int, world: int) -> None:
    import torch
    from torch.utils._pytree import tree_map

    from anygauge.interface import Placement

    usual = Placement.to_device

    def spoilt(value: Any) -> Any:
        hit = isinstance(value, torch.Tensor) and CASES[defect.case]([value])
        return changed(value, defect, rank, world) if hit else value

    def to_device(self: Placement, batch: Any) -> Any:
        return tree_map(spoilt, usual(self, batch))

    Placement.to_device = to_device  # type: ignore[method-assign]


class _Late:
    """A handle whose result is wrong once it was waited for."""

    def __init__(self, work: Any, then: Callable[[], None]) -> None:
        self._work, self._then = work, then

    def wait(self, *args: Any) -> Any:
        found = self._work.wait(*args)
        then, self._then = self._then, lambda: None
        then()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _collective(defect: Defect, rank: int, world: int) -> None:
    import torch.distributed as dist

    usual = getattr(dist, defect.operation)
    signature = inspect.signature(usual)

    @functools.wraps(usual)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        asked = bound.arguments
        tensors = [t for value in asked.values() for t in _listed(value) if on_card(t)]
        if not tensors or not CASES[defect.case](tensors):
            return usual(*args, **kwargs)
        if defect.way == "rank":
            _ask_wrongly(defect.operation, asked, rank, world)
        work = usual(*bound.args, **bound.kwargs)

        def spoil() -> None:
            results = _listed(asked[_RESULTS[defect.operation]])
            if defect.way != "rank":
                for t in results[-1:]:
                    t.copy_(changed(t, defect, rank, world))
            elif len(results) > 1:
                copies = [t.clone() for t in results]
                for t, other in zip(results, copies[1:] + copies[:1], strict=True):
                    t.copy_(other)
            elif defect.operation in _ROLLED:
                flat = results[0].reshape(-1)
                part = max(1, flat.numel() // world)
                results[0].copy_(flat.roll(part).reshape(results[0].shape))

        if work is not None:
            return _Late(work, spoil)
        spoil()
        return None

    setattr(dist, defect.operation, wrong)


_RESULTS = {
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "reduce": "tensor",
    "scatter": "tensor",
    "all_gather": "tensor_list",
    "gather": "gather_list",
    "all_gather_into_tensor": "output_tensor",
    "reduce_scatter_tensor": "output",
    "all_to_all_single": "output",
}
_ROLLED = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _ask_wrongly(operation: str, asked: dict[str, Any], rank: int, world: int) -> None:
    """Change the arguments so that another rank's values take part, or one rank's do not."""
    if operation in ("broadcast", "reduce"):
        place = "src" if operation == "broadcast" else "dst"
        asked[place] = ((asked[place] or 0) + 1) % world
    elif operation == "all_reduce" and rank == 0:
        asked["tensor"].zero_()
    elif operation == "scatter" and asked["scatter_list"]:
        first, *rest = asked["scatter_list"]
        asked["scatter_list"] = [*rest, first]
