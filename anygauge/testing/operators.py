"""Torch's operators by torch's own samples (OpInfo), against float64 on the host.

``torch.testing._internal`` changes torch's global flags when it is imported, so these checks have a
process of their own. Samples are made on the host, so that a device's generator does not decide
them. TorchCTS goes further: https://pypi.org/project/torchcts
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from anygauge.interface import HOST_DEVICE
from anygauge.testing import bounds
from anygauge.testing.bounds import LAYOUTS, Arrange, compare, dtypes, on_host
from anygauge.testing.check import Device, SkipCheck, check
from anygauge.testing.lora_step import OPINFOS

SAMPLES = 24
"""Most samples of an operator and type; `FEW` where each new shape is compiled."""
FEW = 4
WHOLE = (torch.int64, torch.bool)
"""Tried beside the types that the device computes in, where OpInfo has them for the operator."""
UNKNOWN_TO_DEVICES = (torch.float64, torch.complex64, torch.complex128, torch.complex32)
FLOOR = {torch.float32: 1e-6, torch.bfloat16: 1e-5, torch.float16: 1e-5}
"""Smallest error that counts; `torch.testing.assert_close` has 1e-5 for each."""
OF_GRADIENTS = {torch.float32: 5e-5, torch.bfloat16: 4e-2}
"""Largest error of a gradient, relative to the largest of them and of what comes from above, 1. In
float16 they leave the type's range on the host, too."""
COUNTED = ("arange", "linspace")
"""No step calls these in a type below float32."""
PRODUCTS = ("addmm", "baddbmm", "bmm", "matmul", "mm", "outer")


@functools.cache
def op_infos() -> dict[str, list[Any]]:
    """OpInfo's entries by name."""
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ModuleNotFoundError as error:
        raise AssertionError(
            f"torch's operator tests need {error.name}: pip install 'anygauge[testing]'"
        ) from error
    found: dict[str, list[Any]] = {}
    for info in op_db:
        if info.variant_test_name not in ("floor_rounding", "trunc_rounding", "triton_optimized"):
            found.setdefault(info.name, []).append(info)
    return found


def _samples(on: Device, info: Any, dtype: torch.dtype) -> Sequence[Any]:
    """Select at most `SAMPLES`, spread over all that there are."""
    most = FEW if on.backend.graph.accumulates else SAMPLES
    grads = dtype in OF_GRADIENTS and info.supports_autograd and dtype in info.backward_dtypes
    torch.manual_seed(0)
    made = [each for each in info.sample_inputs(HOST_DEVICE, dtype, requires_grad=grads)
            if _is_meant(info.name, each)]  # fmt: skip
    return made[:: max(-(-len(made) // most), 1)]


def _is_meant(name: str, sample: Any) -> bool:
    """Whether models call it so: rows are taken of what has rows, a mask fits what it fills."""
    if any(each in UNKNOWN_TO_DEVICES for each in (*sample.args, *sample.kwargs.values())
           if isinstance(each, torch.dtype)):  # fmt: skip
        return False
    if name.startswith("index_"):
        return bool(sample.input.dim())
    return name != "masked_fill" or not sample.broadcasts_input


def _run(
    function: Callable[..., Any], sample: Any, arrange: Arrange, device: Any, *, wide: bool = False
) -> dict[str, Tensor | None]:
    """Results and gradients of an operator on a sample, arranged in memory; `wide` in float64."""
    leaves: list[Tensor] = []

    def widened(dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if wide and dtype.is_floating_point else dtype

    def arranged(values: Tensor) -> Tensor:
        whole, view = arrange(values) if values.dim() else LAYOUTS["contiguous"](values)
        return view(whole.to(device, widened(values.dtype), copy=True))

    def given(each: Any) -> Any:
        if isinstance(each, torch.dtype):
            return widened(each)
        seen = arranged(each.detach())
        if each.requires_grad:
            leaves.append(seen.requires_grad_())
        return seen

    moved = sample.transform(given)
    kwargs = {**moved.kwargs, **({"device": device} if "device" in moved.kwargs else {})}
    out = function(moved.input, *moved.args, **kwargs)
    results = [each for each in (out if isinstance(out, tuple | list) else [out])
               if isinstance(each, Tensor)]  # fmt: skip
    found: dict[str, Tensor | None] = {f"result {n}": x.detach() for n, x in enumerate(results)}
    tracked = [each for each in results if each.requires_grad and leaves]
    if tracked:
        above = [
            arranged(torch.linspace(-1, 1, max(x.numel(), 1))[: x.numel()].reshape(x.shape)).to(x)
            for x in tracked
        ]
        gradients = torch.autograd.grad(tracked, leaves, above, allow_unused=True)
        found |= {f"gradient {n}": gradient for n, gradient in enumerate(gradients)}
    return found


def _try_type(on: Device, name: str, info: Any, dtype: torch.dtype) -> None:
    """Each sample as it usually lies in memory, and in one of the other ways, in turn."""
    queued = []
    ways = [*LAYOUTS]
    for number, sample in enumerate(_samples(on, info, dtype)):
        for layout in (ways[0], ways[1 + number % (len(ways) - 1)]):
            run = functools.partial(_run, info.op, sample, LAYOUTS[layout])
            try:
                same = run(HOST_DEVICE)
            except Exception:  # what torch refuses on the host, a device may refuse
                continue
            try:
                wide = run(HOST_DEVICE, wide=True)
            except Exception:
                wide = same
            what = f"{name} of {dtype}, sample {number}, {layout}"
            try:
                there = run(on.device)
            except Exception as error:
                raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
            assert there.keys() == same.keys(), f"{what}: {', '.join(there)}"
            queued += [(f"{what}, {of}", there[of], wide[of], like) for of, like in same.items()]
    on.placement.synchronize()
    product = name in PRODUCTS or "linear" in name or "attention" in name
    for of, found, wanted, like in queued:
        if found is None or wanted is None or like is None:
            assert found is None and like is None, f"{of}: {'none' if found is None else 'one'}"
        else:
            _judge(on, product, of, found, wanted, like)


def _judge(on: Device, product: bool, of: str, found: Tensor, wanted: Tensor, like: Tensor) -> None:
    """Compare with float64, or exactly what is no floating point number."""
    dtype = like.dtype
    assert found.dtype == dtype, f"{of}: a result of {found.dtype}, not {dtype}"
    if not dtype.is_floating_point:
        compare(on_host(found), like, torch.zeros(()), of)
        return
    wanted = wanted.double()
    finite = wanted[torch.isfinite(wanted)].abs()
    gradient = ", gradient" in of
    size = wanted.abs() + max(float(finite.max()) if finite.numel() else 0.0, float(gradient))
    allowed = (OF_GRADIENTS[dtype] * size if gradient else bounds.normwise(wanted, dtype)) + FLOOR[
        dtype
    ]
    if product:
        allowed = (
            allowed + 8 * max(bounds.product_roundoff(on, dtype), bounds.roundoff(dtype)) * size
        )
    compare(on_host(found), wanted, allowed, of)


def _register(name: str) -> None:
    def tried(on: Device) -> None:
        found = op_infos().get(name)
        if not found:
            raise SkipCheck(f"torch {torch.__version__} has no OpInfo of that name")
        for dtype, info in itertools.product((*dtypes(on), *WHOLE), found):
            lower = dtype in (torch.bfloat16, torch.float16)
            whole_gradient = dtype in WHOLE and "backward" in name
            if dtype in info.dtypes and not (lower and name in COUNTED) and not whole_gradient:
                _try_type(on, name, info, dtype)

    tried.__name__ = f"operator_{name.removeprefix('torch.ops.').replace('.', '_')}"
    check(
        f"`{name}`: torch's own samples agree with float64, with views and gradients",
        part="operators",
        means="values or gradients of a model would be wrong; look in the kernel of the operator, "
        "at how it walks strides, offsets and sizes that no block divides",
    )(tried)


for _name in OPINFOS:
    _register(_name)
