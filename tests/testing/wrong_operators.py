"""Wrong devices in operators, copies, memory and random numbers: one table.

A line names what is wrong, the check that finds it, the operations of torch that are wrong and how:
a function that gets the usual operation and its arguments (see `tests.testing.wrong`). Each is a
simulated card, whose tensors can be told from the host's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.testing.wrong import Wrong, mutant, torch

Case = Callable[[Sequence[Any]], bool]
Way = Callable[..., Any]


# -- how an operation is wrong --------------------------------------------------------------------


def tensors_of(args: Sequence[Any]) -> list[Any]:
    return [each for each in args if isinstance(each, torch.Tensor)]


def always(tensors: Sequence[Any]) -> bool:
    return True


def above(count: int) -> Case:
    return lambda tensors: any(each.numel() > count for each in tensors)


def wide(tensors: Sequence[Any]) -> bool:
    return any(each.dim() and each.shape[-1] > 4096 for each in tensors)


def result(change: Callable[[Any], Any], case: Case = always) -> Way:
    """Its first result is changed."""

    def way(usual: Any, *args: Any, **kwargs: Any) -> Any:
        out = usual(*args, **kwargs)
        first = out[0] if isinstance(out, tuple | list) else out
        if first.numel() and case(tensors_of(args)):
            first.detach().copy_(change(first.detach()))
        return out

    return way


def given(change: Callable[[Any], Any], case: Case = always, at: int = 0) -> Way:
    """It reads something else than one of its inputs."""

    def way(usual: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = args[at] if len(args) > at else None
        if isinstance(tensor, torch.Tensor) and tensor.numel() and case(tensors_of(args)):
            args = (*args[:at], change(tensor), *args[at + 1 :])
        return usual(*args, **kwargs)

    return way


def scaled(by: float) -> Callable[[Any], Any]:
    return lambda x: (x * by).to(x.dtype)


def through(name: str) -> Callable[[Any], Any]:
    return lambda x: x.to(getattr(torch, name)).to(x.dtype)


def rolled(x: Any) -> Any:
    return x.reshape(-1).roll(1).reshape(x.shape)


def without_last(x: Any) -> Any:
    flat = x.reshape(-1).clone()
    flat[-1:] = 0
    return flat.reshape(x.shape)


def first_columns(x: Any) -> Any:
    x = x.clone()
    x[..., 4096:] = 0
    return x


def cut(x: Any, bits: int) -> Any:
    """Float32 values without their last bits."""
    return (x.float().contiguous().view(torch.int32) & -(2**bits)).view(torch.float32)


def as_it_lies(x: Any) -> Any:
    """A tensor whose strides were forgotten."""
    if not x.numel() or 0 in x.stride():
        return x
    from_start = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return from_start[x.storage_offset() :][: x.numel()].reshape(x.shape)


def from_start(x: Any) -> Any:
    """A view whose offset was forgotten."""
    return x.as_strided(x.shape, x.stride(), 0)


def in_blocks(a: Any, b: Any, name: str, block: int = 64) -> Any:
    """A product whose sum is kept in a type."""
    dtype = getattr(torch, name)
    total = torch.zeros(a.shape[0], b.shape[1], dtype=dtype, device=a.device)
    for start in range(0, a.shape[1], block):
        total = total + (a[:, start : start + block] @ b[start : start + block]).to(dtype)
    return total.to(a.dtype)


def summed_in(name: str, block: int) -> Way:
    """A sum that is kept in a type."""

    def way(usual: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if x.dtype is not getattr(torch, name):
            return usual(x, *args, **kwargs)
        dim = args[0][0] if args else 0
        x = x if args else x.reshape(-1)
        total = torch.zeros_like(x.select(dim, 0))
        for part in x.split(block, dim):
            total = total + part.sum(dim)
        return total.to(kwargs.get("dtype") or x.dtype)

    return way


def listed(change: Callable[[list[Any]], list[Any]]) -> Way:
    """Lists of tensors are others."""

    def way(usual: Any, *args: Any, **kwargs: Any) -> Any:
        changed = (change(list(a)) if isinstance(a, list | tuple) else a for a in args)
        return usual(*changed, **kwargs)

    return way


def norms_again(usual: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """The norms of a list begin anew after 64."""
    found = list(usual(tensors, *args, **kwargs))
    return [found[number % 64] for number in range(len(found))]


def into_given(change: Callable[[Any, Any], None]) -> Way:
    """What was written into a given tensor is changed; it gets that, and what stood there."""

    def way(usual: Any, *args: Any, **kwargs: Any) -> Any:
        target = kwargs.get("out")
        before = None if target is None else target.clone()
        out = usual(*args, **kwargs)
        if target is not None:
            change(target, before)
        return out

    return way


def _one_further(target: Any, before: Any) -> None:
    if not target.is_contiguous():
        target.copy_(rolled(target.clone()))


def sum_of_some(count: int) -> Way:
    def way(usual: Any, x: Any, dims: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dims is None:
            return usual(x, **kwargs)
        kept = x.narrow(dims[0], 0, min(count, x.shape[dims[0]]))
        return usual(kept, dims, *args, **kwargs)

    return way


# -- the table ------------------------------------------------------------------------------------

DIGITS, ROW, LIST = "products_keep_their_digits", "products_of_one_row", "lists_of_tensors"
SUMS, LEAN, ROWS = "long_sums", "rounding_leans_to_no_side", "wide_rows"
UPDATES, OFTEN, LENGTHS = "updates_of_many_tensors", "one_index_many_times", "odd_lengths"
WRITES, ROUND = "forms_that_write", "conversions_round"
FAR, SPECIAL = "far_places", "special_values"
DROPOUT, NUMBERS, SAVED = "dropout_is_sound", "random_numbers_are_sound", "every_generator_is_saved"
COPIES, ORDER, OP = "copies_keep_values", "copies_are_ordered", "operator_"

TABLE: Sequence[tuple[str, str, str, Way]] = (
    # Long sums and their rounding.
    ("sums of bfloat16 are kept in bfloat16", SUMS, "sum", summed_in("bfloat16", 256)),
    ("a mean divides by a count of 16 bits", SUMS, "mean",
     result(scaled(1.2), lambda t: t[0].numel() >= 2**16 and t[0].dim() == 2)),
    ("a sum along the first dimension ends at 8192", SUMS, "sum", sum_of_some(8192)),
    ("bfloat16 is multiplied with truncation", LEAN, "mul", lambda usual, x, y:
     cut(x.float() * y, 16).to(x.dtype) if x.dtype is torch.bfloat16 else usual(x, y)),
    ("in place, bfloat16 is added with truncation", LEAN, "add_", lambda usual, x, y, **k:
     x.copy_(cut(x.float() + k.get("alpha", 1) * y, 16)) if x.dtype is torch.bfloat16
     else usual(x, y, **k)),
    # Products.
    ("float32 products are summed in bfloat16", DIGITS, "mm", lambda usual, a, b:
     in_blocks(a, b, "bfloat16")),
    ("bfloat16 products are truncated", DIGITS, "mm", lambda usual, a, b:
     cut(a.float() @ b.float(), 16).to(a.dtype)),
    ("float32 products have factors of 16 bits", DIGITS, "mm", lambda usual, a, b:
     usual(cut(a, 8), cut(b, 8)) if a.dtype is torch.float32 else usual(a, b)),
    ("the last term of a long product is left out", DIGITS, "mm", lambda usual, a, b:
     usual(a[:, :-1], b[:-1]) if a.shape[1] > 4096 else usual(a, b)),
    ("a product of one row ends at 16,384 terms", ROW, "mm", lambda usual, a, b:
     usual(a[:, : 2**14], b[: 2**14]) if a.shape[0] == 1 else usual(a, b)),
    ("one long row of bfloat16 is summed in bfloat16", ROW, "mm", lambda usual, a, b:
     in_blocks(a, b, "bfloat16") if a.shape[0] == 1 and a.dtype is torch.bfloat16
     else usual(a, b)),
    ("a batch of products of one row is the first again", ROW, "bmm", lambda usual, a, b:
     usual(a[:1].expand(a.shape) if a.shape[1] == 1 else a, b)),
    ("rows of a product beyond 1280 stay 0", DIGITS, "mm", lambda usual, a, b:
     usual(torch.where(torch.arange(a.shape[0], device=a.device)[:, None] < 1280, a, 0), b)),
    # Rows above 4,096 columns.
    ("the gradient of a wide softmax ends at 4,096", ROWS, "_softmax_backward_data",
     result(first_columns, wide)),
    ("a wide log_softmax is of bfloat16", ROWS, "_log_softmax", result(through("bfloat16"), wide)),
    ("the loss has no gradient for classes beyond 4,096", ROWS, "nll_loss_backward",
     result(first_columns, wide)),
    ("a wide logsumexp leaves out its end", ROWS, "logsumexp", lambda usual, x, dim, *a:
     usual(x[..., :4096] if wide([x]) else x, dim, *a)),
    ("the place of the largest has 16 bits", ROWS, "argmax", lambda usual, x, *a:
     usual(x, *a) % 2**16),
    # Lists of tensors.
    ("_foreach_add_ ends at tensor 110", LIST, "_foreach_add_", listed(lambda x: x[:110])),
    ("a list takes the second tensors in the order of the first launch", LIST, "_foreach_lerp_",
     lambda usual, x, y, *a: usual(x, [*y[:64], *y[:64], *y[128:]] if len(y) > 128 else y, *a)),
    ("the norms of a list begin anew after 64", LIST, "_foreach_norm", norms_again),
    ("the last tensor of a list is not updated", UPDATES, "_foreach_addcdiv_",
     listed(lambda x: x[:-1] if len(x) > 110 else x)),
    ("gradients of long lists are clipped in part", UPDATES, "_foreach_mul_",
     listed(lambda x: x[:192])),
    # Indices that come often, odd lengths.
    ("an index is added 65,536 times at most", OFTEN, "index_add_",
     lambda usual, x, dim, at, y, **k:
     usual(x, dim, at[: 2**16], y[: 2**16], **k)),
    ("a token counts 65,536 times at most", OFTEN, "embedding_dense_backward",
     lambda usual, grad, at, *a: usual(grad[: 2**16], at[: 2**16], *a)),
    ("the last of 999 elements stays 0", LENGTHS, "mul",
     result(without_last, lambda t: t[0].numel() == 999)),
    ("the last of 511 is not summed", LENGTHS, "sum",
     given(without_last, lambda t: t[0].numel() == 511)),
    ("a product leaves out terms that 16 does not divide", LENGTHS, "mm", lambda usual, a, b:
     usual(a[:, : a.shape[1] // 16 * 16], b[: a.shape[1] // 16 * 16]) if a.shape[1] > 16
     else usual(a, b)),
    # Forms that write.
    ("adding in place goes to the start of memory", WRITES, "add_", lambda usual, x, *a, **k:
     (usual(from_start(x), *a, **k), x)[1]),
    ("multiplying a view in place is lost", WRITES, "mul_", lambda usual, x, y:
     usual(x, y) if x.is_contiguous() else x),
    ("a mask is read as it lies", WRITES, "masked_fill_", given(as_it_lies, at=1)),
    ("a given view with gaps is filled one place further", WRITES, "add", into_given(_one_further)),
    # Overflow, conversions, integers, far places, what is not a number.
    ("what overflows becomes the largest number", SPECIAL, "mul", lambda usual, *a:
     usual(*a).nan_to_num(nan=float("nan"))),
    ("bfloat16 is float32 cut off", ROUND, "_to_copy", lambda usual, x, **k:
     usual(cut(x, 16) if x.dtype is torch.float32 and k.get("dtype") is torch.bfloat16 else x,
     **k)),
    ("integers are rounded", ROUND, "_to_copy", lambda usual, x, **k:
     usual(x.round() if k.get("dtype") is torch.int64 and x.is_floating_point() else x, **k)),
    ("a conversion forgets strides", ROUND, "_to_copy", lambda usual, x, **k:
     usual(as_it_lies(x) if k.get("dtype") not in (None, x.dtype) and x.device.type == "sim"
           else x, **k)),
    ("rows beyond 2^31 elements are counted in 32 bits", FAR, "index_select",
     lambda usual, x, dim, at: usual(x, dim, (at * x.stride(0) % 2**31) // x.stride(0))),
    ("sums of float16 are kept in float16", SPECIAL, "sum", summed_in("float16", 2)),
    ("a maximum ignores what is not a number", SPECIAL, "maximum", lambda usual, x, y:
     torch.fmax(x, y)),
    ("a softmax of minus infinity alone is 0", SPECIAL, "_softmax", lambda usual, x, *a:
     usual(x, *a).nan_to_num(0)),
    ("a softmax is not shifted", SPECIAL, "_softmax", lambda usual, x, dim, *a:
     x.exp() / x.exp().sum(dim, keepdim=True)),
    # What torch's own samples find: strides, offsets, formulas, dimensions, indices, gradients.
    ("strides are forgotten", OP + "nn_functional_silu", "silu", given(as_it_lies)),
    ("an offset in memory is forgotten", OP + "tanh", "tanh", given(from_start)),
    ("the second input is read in the order of the first", OP + "mul", "mul",
     given(as_it_lies, at=1)),
    ("exp has three digits", OP + "exp", "exp", result(scaled(1.001))),
    ("the gradient of silu forgets a term", OP + "nn_functional_silu", "silu_backward",
     lambda usual, grad, x: grad * torch.sigmoid(x)),
    ("the gradient from above is read as it lies", OP + "tanh", "tanh_backward",
     given(as_it_lies)),
    ("joining swaps the parts", OP + "cat", "cat", lambda usual, parts, dim=0:
     usual(list(parts)[::-1], dim)),
    ("values for one place are not added up", OP + "index_add", "index_add_ index_add",
     lambda usual, x, dim, at, y, **k: usual(x, dim, at[:1], y.narrow(dim, 0, 1), **k)
     if x.dim() else usual(x, dim, at, y, **k)),
    ("gradients of tokens that come twice count once", OP + "nn_functional_embedding",
     "embedding_dense_backward", lambda usual, grad, at, rows, *a:
     torch.zeros(rows, grad.shape[-1], dtype=grad.dtype, device=grad.device).index_copy_(
         0, at.reshape(-1), grad.reshape(-1, grad.shape[-1]))),
    ("the last odd column of a product stays 0", OP + "mm", "mm",
     result(lambda x: torch.cat((x[:, :-1], torch.zeros_like(x[:, -1:])), 1))),
    ("strides of a batch are forgotten", OP + "bmm", "bmm", given(as_it_lies)),
    ("addmm forgets beta", OP + "addmm", "addmm", lambda usual, c, a, b, **k:
     usual(c, a, b, alpha=k.get("alpha", 1))),
    # A block of a model.
    ("softmax over the wrong dimension", "float32_arithmetic", "_softmax",
     lambda usual, x, dim, to_float: usual(x, 0, to_float)),
    ("silu of bfloat16 is a ramp", "bfloat16_arithmetic", "silu", lambda usual, x:
     x.relu() if x.dtype is torch.bfloat16 else usual(x)),
    # Copies, and memory that tensors share.
    ("a slice is a copy", WRITES, "slice", lambda usual, x, *a: usual(x, *a).clone()),
    ("a selected row is a copy", WRITES, "select", lambda usual, x, *a: usual(x, *a).clone()),
    ("a clone is the tensor itself", ORDER, "clone", lambda usual, x, **k: x.as_strided(
     x.shape, x.stride(), x.storage_offset())),
    ("copies end at 4 MiB", COPIES, "_to_copy", lambda usual, x, **k:
     _until(usual(x, **k), 2**22) if _comes(x, k) else usual(x, **k)),
    ("copies to the host begin where memory does", COPIES, "_to_copy", lambda usual, x, **k:
     usual(from_start(x) if _leaves(x, k) and x.numel() else x, **k)),
    ("copies onto the device forget strides", COPIES, "_to_copy", lambda usual, x, **k:
     usual(as_it_lies(x) if _comes(x, k) else x, **k)),
    ("the last bytes of a queued copy are lost", COPIES, "_to_copy", lambda usual, x, **k:
     without_last(usual(x, **k)) if _comes(x, k) and k.get("non_blocking") and x.numel()
     else usual(x, **k)),
    # Random numbers.
    ("dropout has rates in eighths", DROPOUT, "native_dropout", lambda usual, x, rate, train:
     usual(x, round(rate * 8) / 8, train)),
    ("dropout does not scale", DROPOUT, "native_dropout", lambda usual, x, rate, train:
     (usual(x, rate, train)[0] * (1 - rate), usual(x, rate, train)[1])),
    ("dropout repeats its mask after 256 values", DROPOUT, "native_dropout",
     lambda usual, x, rate, train: _masked(x, rate, usual(x.reshape(-1)[:256], rate, train)[1]
     .repeat(x.numel() // 256 + 1)[: x.numel()].reshape(x.shape))),
    ("the gradient of dropout has no mask", DROPOUT, "native_dropout_backward",
     lambda usual, grad, mask, scale: grad * scale),
    ("rand has 8 bits", NUMBERS, "rand",
     lambda usual, *a, **k: (usual(*a, **k) * 256).floor() / 256),
    ("rand repeats itself after 1024 numbers", NUMBERS, "rand", lambda usual, size, **k:
     usual([1024], **k).repeat(torch.Size(size).numel() // 1024 + 1)[: torch.Size(size).numel()]),
    ("randn is 2% too wide", NUMBERS, "randn", result(scaled(1.02))),
    ("uniform_ begins at 0", NUMBERS, "uniform_", lambda usual, x, low=0, high=1, **k:
     usual(x, 0, high, **k)),
    ("randint never gives its last number", NUMBERS, "randint", lambda usual, low, high, *a, **k:
     usual(low, high - 1, *a, **k)),
    ("bernoulli is even", NUMBERS, "bernoulli", given(lambda x: torch.full_like(x, 0.5))),
    ("large dropouts are drawn from the seed again", SAVED, "native_dropout",
     lambda usual, x, rate, train: _masked(x, rate, _fixed(x, rate)) if x.numel() >= 2**22
     else usual(x, rate, train)),
    ("multinomial has a generator of its own", SAVED, "multinomial", lambda usual, x, *a, **k:
     torch.multinomial(x.cpu(), *a, **{**k, "generator": _own()}).to("sim")),
)  # fmt: skip


def _masked(x: Any, rate: float, mask: Any) -> tuple[Any, Any]:
    return (x * mask / (1 - rate)).to(x.dtype), mask


def _fixed(x: Any, rate: float) -> Any:
    same = torch.Generator().manual_seed(torch.sim.initial_seed())
    return (torch.rand(x.shape, generator=same) >= rate).to(x.device)


_generators: list[Any] = []


def _own() -> Any:
    if not _generators:
        _generators.append(torch.Generator().manual_seed(5))
    return _generators[0]


def _leaves(x: Any, kwargs: Any) -> bool:
    """Whether a conversion is a copy from the device to the host."""
    return x.device.type == "sim" and torch.device(kwargs.get("device") or "sim").type == "cpu"


def _comes(x: Any, kwargs: Any) -> bool:
    return x.device.type == "cpu" and torch.device(kwargs.get("device") or "cpu").type == "sim"


def _until(out: Any, size: int) -> Any:
    if out.is_contiguous():
        out.view(-1)[size // out.element_size() :] = 0
    return out


def _register(name: str, check: str, operations: str, way: Way) -> None:
    part = "operators" if check.startswith(OP) else "device"

    @mutant(name, part=part, check=check, base="sim")
    def _(on: Wrong) -> None:
        on.operation(*operations.split())(way)


for _line in TABLE:
    _register(*_line)


# -- seeds and states of random numbers -----------------------------------------------------------

SEEDS = "seeds_of_ranks_differ"


@mutant("two neighbouring seeds are one", part="device", check=SEEDS, base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.seed")
    def seed(self: Any, usual: Any, seed: int) -> None:
        usual(seed // 2)


ANOTHER, REFUSED = "state_serves_another", "wrong_states_are_refused"


@mutant("the host's generator is not saved", part="device", check=SAVED, base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.rng_state")
    def rng_state(self: Any, usual: Any) -> Any:
        return {"device": usual()["device"]}

    @on.method("placement.set_rng_state")
    def set_rng_state(self: Any, usual: Any, state: Any) -> None:
        usual({"host": torch.get_rng_state(), **state})


@mutant("states live in the object that gave them", part="device", check=ANOTHER, base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.rng_state")
    def rng_state(self: Any, usual: Any) -> Any:
        self.states = [*getattr(self, "states", []), usual()]
        return {"number": torch.tensor([len(self.states) - 1], dtype=torch.uint8)}

    @on.method("placement.set_rng_state")
    def set_rng_state(self: Any, usual: Any, state: Any) -> None:
        states = getattr(self, "states", None)
        if states is not None:
            usual(states[int(state["number"])])


@mutant("a saved state changes with the next", part="device", check=ANOTHER, base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.rng_state")
    def rng_state(self: Any, usual: Any) -> Any:
        found = usual()
        self.kept = getattr(self, "kept", found)
        for name, value in found.items():
            self.kept[name].copy_(value)
        return self.kept


@mutant("a state of the wrong size is filled up", part="device", check=REFUSED, base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.set_rng_state")
    def set_rng_state(self: Any, usual: Any, state: Any) -> None:
        now = self.rng_state()
        for name, value in state.items():
            count = min(value.numel(), now[name].numel())
            now[name][:count] = value[:count]
        usual(now)


@mutant("a missing state is passed over", part="device", check=REFUSED, base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.set_rng_state")
    def set_rng_state(self: Any, usual: Any, state: Any) -> None:
        usual({**self.rng_state(), **state})


# -- copies and memory ----------------------------------------------------------------------------


@mutant(
    "four staging buffers are used again too early",
    part="device",
    check="queued_copies_stay_apart",
    base="sim",
)
def _(on: Wrong) -> None:
    queued: list[Any] = []

    @on.operation("_to_copy")
    def to_copy(usual: Any, x: Any, **kwargs: Any) -> Any:
        out = usual(x, **kwargs)
        if _comes(x, kwargs) and kwargs.get("non_blocking"):
            queued.append(out)
            if len(queued) > 4 and queued[-5].dtype == out.dtype:
                early = queued[-5].view(-1)
                count = min(early.numel(), out.numel())
                early[:count] = out.reshape(-1)[:count]
        return out


@mutant(
    "queued copies to the host are made at the end",
    part="device",
    check="copies_are_ordered",
    base="sim",
)
def _(on: Wrong) -> None:
    queued: list[Any] = []

    @on.operation("_to_copy")
    def to_copy(usual: Any, x: Any, **kwargs: Any) -> Any:
        out = usual(x, **kwargs)
        if _leaves(x, kwargs) and kwargs.get("non_blocking"):
            queued.append((out, x))
        return out

    @on.method("placement.synchronize")
    def synchronize(self: Any, usual: Any) -> None:
        for out, x in queued:
            out.copy_(x)
        queued.clear()
        usual()


@mutant(
    "memory is given out in steps that are too small",
    part="device",
    check="memory_is_not_given_twice",
    base="sim",
)
def _(on: Wrong) -> None:
    arenas: dict[Any, list[Any]] = {}

    @on.operation("full")
    def full(usual: Any, sizes: Any, value: Any, **kwargs: Any) -> Any:
        count = torch.Size(sizes).numel()
        arena = arenas.setdefault(kwargs.get("dtype"), [usual([2**23], 0, **kwargs), 0])
        start, arena[1] = arena[1], arena[1] + count // 16 * 16
        return arena[0][start : start + count].view(sizes).fill_(value)


@mutant("exhaustion frees what is held", part="device", check="out_of_memory", base="sim")
def _(on: Wrong) -> None:
    os.environ["ANYGAUGE_SIM_CAPACITY"] = str(2**28)
    made: list[Any] = []

    @on.operation("empty")
    def empty(usual: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            made.append(usual(*args, **kwargs))
        except RuntimeError:
            for each in made:
                each.fill_(255)
            raise
        return made[-1]


@mutant("memory is the first device's", part="ranks", check="memory_of_each_rank", base="sim")
def _(on: Wrong) -> None:
    @on.method("placement.memory")
    def memory(self: Any, usual: Any) -> Any:
        found = usual()
        return found if self.device.index == 0 else replace(found, in_use=2**20, peak=2**20)


@mutant("the last tensor of a fused update is left out", part="device", check=UPDATES)
def _(on: Wrong) -> None:
    @on.operation("_fused_adamw_")
    def adamw(usual: Any, *lists: Any, **numbers: Any) -> Any:
        short = len(lists[0]) > 110
        return usual(*(each[:-1] if short and each else each for each in lists), **numbers)
