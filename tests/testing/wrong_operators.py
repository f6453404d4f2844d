"""Wrong devices in operators, copies, memory and random numbers: one table.

A line names what is wrong, the check that finds it, the operations of torch that are wrong and how:
a function that gets the usual operation and its arguments (see `tests.testing.wrong`). Each is a
simulated card, whose tensors can be told from the host's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tests.testing.wrong import lines, mutant, tensors_of, torch

Case = Callable[[Sequence[Any]], bool]
Way = Callable[..., Any]


# -- how an operation is wrong --------------------------------------------------------------------


def always(tensors: Sequence[Any]) -> bool:
    return True


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


def given(change: Callable[[Any], Any]) -> Way:
    """It reads something else than its first input."""

    def way(usual: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return usual(change(x) if x.numel() else x, *args, **kwargs)

    return way


def scaled(by: float) -> Callable[[Any], Any]:
    return lambda x: (x * by).to(x.dtype)


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


def summed_in_bfloat16(usual: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A sum that is kept in its type."""
    if x.dtype is not torch.bfloat16:
        return usual(x, *args, **kwargs)
    dim = args[0][0] if args else 0
    x = x if args else x.reshape(-1)
    total = torch.zeros_like(x.select(dim, 0))
    for part in x.split(256, dim):
        total = total + part.sum(dim)
    return total.to(kwargs.get("dtype") or x.dtype)


def listed(change: Callable[[list[Any]], list[Any]]) -> Way:
    """Lists of tensors are others."""

    def way(usual: Any, *args: Any, **kwargs: Any) -> Any:
        changed = (change(list(a)) if isinstance(a, list | tuple) else a for a in args)
        return usual(*changed, **kwargs)

    return way


def filled_one_further(usual: Any, *args: Any, **kwargs: Any) -> Any:
    """A given tensor with gaps is filled one place further."""
    out, target = usual(*args, **kwargs), kwargs.get("out")
    if target is not None and not target.is_contiguous():
        target.copy_(target.reshape(-1).roll(1).reshape(target.shape))
    return out


# -- the table ------------------------------------------------------------------------------------

DIGITS, LIST = "products_keep_their_digits", "lists_of_tensors"
SUMS, LEAN, ROWS = "long_sums", "rounding_leans_to_no_side", "wide_rows"
LENGTHS, WRITES = "odd_lengths", "forms_that_write"
SAVED = "every_generator_is_saved"
COPIES, ORDER, OP = "copies_keep_values", "copies_are_ordered", "operator_"

TABLE: Sequence[tuple[str, str, str, Way]] = (
    # Long sums and their rounding.
    ("sums of bfloat16 are kept in bfloat16", SUMS, "sum", summed_in_bfloat16),
    ("a mean divides by a count of 16 bits", SUMS, "mean",
     result(scaled(1.2), lambda t: t[0].numel() >= 2**16 and t[0].dim() == 2)),
    ("bfloat16 is multiplied with truncation", LEAN, "mul", lambda usual, x, y:
     cut(x.float() * y, 16).to(x.dtype) if x.dtype is torch.bfloat16 else usual(x, y)),
    # Products.
    ("bfloat16 products are truncated", DIGITS, "mm", lambda usual, a, b:
     cut(a.float() @ b.float(), 16).to(a.dtype) if a.dtype is torch.bfloat16 else usual(a, b)),
    ("float32 products have factors of 16 bits", DIGITS, "mm", lambda usual, a, b:
     usual(cut(a, 8), cut(b, 8)) if a.dtype is torch.float32 else usual(a, b)),
    ("the last term of a long product is left out", DIGITS, "mm", lambda usual, a, b:
     usual(a[:, :-1], b[:-1]) if a.shape[1] > 4096 else usual(a, b)),
    ("a product of one row ends at 16,384 terms", DIGITS, "mm", lambda usual, a, b:
     usual(a[:, : 2**14], b[: 2**14]) if a.shape[0] == 1 else usual(a, b)),
    ("a batch of products of one row is the first again", DIGITS, "bmm", lambda usual, a, b:
     usual(a[:1].expand(a.shape) if a.shape[1] == 1 else a, b)),
    # Rows above 4,096 columns.
    ("a wide log_softmax is of bfloat16", ROWS, "_log_softmax",
     result(lambda x: x.bfloat16().to(x.dtype), wide)),
    ("the loss has no gradient for classes beyond 4,096", ROWS, "nll_loss_backward",
     result(first_columns, wide)),
    # Lists of tensors.
    ("_foreach_add_ ends at tensor 110", LIST, "_foreach_add_", listed(lambda x: x[:110])),
    ("gradients of long lists are clipped in part", LIST, "_foreach_mul_",
     listed(lambda x: x[:192])),
    # Indices that come often, odd lengths.
    ("an index is added 65,536 times at most", SUMS, "index_add_",
     lambda usual, x, dim, at, y, **k:
     usual(x, dim, at[: 2**16], y[: 2**16], **k)),
    ("the last of 999 elements stays 0", LENGTHS, "mul",
     result(without_last, lambda t: t[0].numel() == 999)),
    ("a product leaves out terms that 16 does not divide", LENGTHS, "mm", lambda usual, a, b:
     usual(a[:, : a.shape[1] // 16 * 16], b[: a.shape[1] // 16 * 16]) if a.shape[1] > 16
     else usual(a, b)),
    # Forms that write.
    ("adding in place goes to the start of memory", WRITES, "add_", lambda usual, x, *a, **k:
     (usual(from_start(x), *a, **k), x)[1]),
    ("a given view with gaps is filled one place further", WRITES, "add", filled_one_further),
    ("bfloat16 is float32 cut off", LEAN, "_to_copy", lambda usual, x, **k:
     usual(cut(x, 16) if x.dtype is torch.float32 and k.get("dtype") is torch.bfloat16 else x,
     **k)),
    # What torch's own samples find: strides, offsets, formulas, dimensions, indices, gradients.
    ("strides are forgotten", OP + "nn_functional_silu", "silu", given(as_it_lies)),
    ("an offset in memory is forgotten", OP + "tanh", "tanh", given(from_start)),
    ("exp has three digits", OP + "exp", "exp", result(scaled(1.001))),
    ("the gradient of silu forgets a term", OP + "nn_functional_silu", "silu_backward",
     lambda usual, grad, x: grad * torch.sigmoid(x)),
    ("the gradient from above is read as it lies", OP + "tanh", "tanh_backward",
     given(as_it_lies)),
    ("multiplying a view in place is lost", WRITES, "mul_", lambda usual, x, y:
     usual(x, y) if x.is_contiguous() else x),
    # A block of a model.
    ("softmax over the wrong dimension", "float32_arithmetic", "_softmax",
     lambda usual, x, dim, to_float: usual(x, 0, to_float)),
    ("silu of bfloat16 is a ramp", "bfloat16_arithmetic", "silu", lambda usual, x:
     x.relu() if x.dtype is torch.bfloat16 else usual(x)),
    # Copies, and memory that tensors share.
    ("a slice is a copy", WRITES, "slice", lambda usual, x, *a: usual(x, *a).clone()),
    ("a clone is the tensor itself", ORDER, "clone", lambda usual, x, **k: x.as_strided(
     x.shape, x.stride(), x.storage_offset())),
    ("copies end at 4 MiB", COPIES, "_to_copy", lambda usual, x, **k:
     _until(usual(x, **k), 2**22) if _comes(x, k) else usual(x, **k)),
    ("copies to the host begin where memory does", COPIES, "_to_copy", lambda usual, x, **k:
     usual(from_start(x) if _leaves(x, k) and x.numel() else x, **k)),
    ("the last bytes of a queued copy are lost", COPIES, "_to_copy", lambda usual, x, **k:
     without_last(usual(x, **k)) if _comes(x, k) and k.get("non_blocking") and x.numel()
     else usual(x, **k)),
    # Random numbers.
    ("dropout does not scale", SAVED, "native_dropout", lambda usual, x, rate, train:
     (usual(x, rate, train)[0] * (1 - rate), usual(x, rate, train)[1])),
    ("the gradient of dropout has no mask", OP + "native_dropout_backward",
     "native_dropout_backward", lambda usual, grad, mask, scale: grad * scale),
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


@functools.cache
def _own() -> Any:
    return torch.Generator().manual_seed(5)


def _leaves(x: Any, kwargs: Any) -> bool:
    """Whether a conversion is a copy from the device to the host."""
    return x.device.type == "sim" and torch.device(kwargs.get("device") or "sim").type == "cpu"


def _comes(x: Any, kwargs: Any) -> bool:
    return x.device.type == "cpu" and torch.device(kwargs.get("device") or "cpu").type == "sim"


def _until(out: Any, size: int) -> Any:
    if out.is_contiguous():
        out.view(-1)[size // out.element_size() :] = 0
    return out


for _name, _check, _operation, _way in TABLE:
    _part = "operators" if _check.startswith(OP) else "device"
    lines(_part, [(_name, _check, f"op {_operation}", _way)], base="sim")


# -- states of random numbers, staging buffers ----------------------------------------------------


def _numbered(usual: Any) -> Any:
    it = usual.__self__
    it.states = [*getattr(it, "states", []), usual()]
    return {"number": torch.tensor([len(it.states) - 1], dtype=torch.uint8)}


def _by_number(usual: Any, state: Any) -> None:
    states = getattr(usual.__self__, "states", None)
    if states is not None:
        usual(states[int(state["number"])])


_queued: list[Any] = []


def _staged(usual: Any, x: Any, **kwargs: Any) -> Any:
    """Copies by way of four buffers."""
    out = usual(x, **kwargs)
    if _comes(x, kwargs) and kwargs.get("non_blocking"):
        _queued.append(out)
        if len(_queued) > 4 and _queued[-5].dtype == out.dtype:
            early = _queued[-5].view(-1)
            count = min(early.numel(), out.numel())
            early[:count] = out.reshape(-1)[:count]
    return out


mutant("states live in the object that gave them", "device", SAVED, {
    "placement.rng_state": _numbered, "placement.set_rng_state": _by_number,
}, base="sim")  # fmt: skip
lines("device", (  # which simulated cards have not got
    ("a fused update ends at tensor 110", LIST, "op _fused_adamw_", listed(lambda x: x[:110])),
))  # fmt: skip
lines("device", (
    ("four staging buffers are used again too early", ORDER, "op _to_copy", _staged),
), base="sim")  # fmt: skip
