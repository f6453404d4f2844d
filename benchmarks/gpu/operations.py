"""Parts that time or check single operations: kernels beside torch, Liger, peft and float64."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks import kernels
from benchmarks.gpu.part import FAILED, LATE, Clock, Context, PartError, Report
from benchmarks.kernel_timing import chosen_kernel, copy_bandwidth, kernel_names
from benchmarks.kernels import plain_loss
from benchmarks.table import Figure, TableRow

MARGIN = 2.0
"""A kernel may be off by this multiple of what torch's own operation is off in the same type on the
same device (another order of sums), and by as many units of rounding. With 32,000 classes and
bfloat16, logits near 32 are rounded to 1/8: any gradient from them is off by a few per cent."""


def _device(context: Context) -> torch.device:
    return torch.device(context.device)


def _rounds(context: Context) -> int:
    return 2 if context.tiny else 7


def _types(context: Context) -> list[torch.dtype]:
    return [torch.float32, torch.bfloat16] if _has_bfloat16(context) else [torch.float32]


def _has_bfloat16(context: Context) -> bool:
    if context.device == "cpu":
        return True
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _half(context: Context) -> torch.dtype:
    """The type that runs compute in on this device."""
    return torch.bfloat16 if _has_bfloat16(context) else torch.float16


def _add_all(
    context: Context,
    report: Report,
    cases: Iterator[list[TableRow]],
    count: int,
    prefix: str = "",
) -> None:
    """Add what is measured case by case.

    Raises:
        PartError: the time was over before all `count` cases were timed.
    """
    clock = Clock(context.seconds)
    for done, case in enumerate(cases, 1):
        for row in case:
            report.add(replace(row, case=prefix + row.case))
        if not clock.left and done < count:
            raise PartError(LATE, f"{done} of {count} cases were timed")


def _say_liger(report: Report) -> None:
    if find_spec("liger_kernel") is None:
        report.note("Liger is not installed (liger-kernel): it is not compared.")


def softmax(context: Context, report: Report) -> None:
    """The Triton kernel where it can run, else the one that a run has."""
    device = _device(context)
    elements = 6000 if context.tiny else 2**28 if context.full else 2**26
    columns = (64,) if context.tiny else kernels.COLUMNS if context.full else (4096,)
    name = "triton" if "triton" in kernel_names("softmax", device) else None
    name, kernel = chosen_kernel("softmax", device, name)
    copy = copy_bandwidth(device, elements, _half(context), _rounds(context))
    report.note(f"anygauge's kernel is `{name}`. A copy of {elements:,} numbers: {copy / 1e9:,.0f} "
                "GB/s; `of copy` is a kernel's share of that.")  # fmt: skip
    _say_liger(report)
    cases = kernels.softmax(device, _half(context), kernel, columns=columns, elements=elements,
                            rounds=_rounds(context), copy=copy)  # fmt: skip
    _add_all(context, report, cases, 2 * len(columns))


def loss(context: Context, report: Report) -> None:
    """Each kernel of ours that can run here beside all logits in memory, and Liger."""
    device = _device(context)
    tokens, width = (32, 16) if context.tiny else (8192, 4096)
    _say_liger(report)
    ours = {
        name: chosen_kernel("linear_cross_entropy", device, name)[1]
        for name in kernel_names("linear_cross_entropy", device)
    }
    classes = (90,) if context.tiny else (32_000, 131_072)
    kinds = ((False, 0.0), (True, 0.0))[: 2 if context.full else 1]
    cases = kernels.loss(device, _half(context), ours, classes=classes, tokens=tokens, width=width,
                         rounds=_rounds(context), cases=kinds)  # fmt: skip
    count = len(classes) * len(kinds)
    _add_all(context, report, cases, count, prefix=f"{tokens:,} x {width:,}, ")


def attention(context: Context, report: Report) -> None:
    """16 heads of 64, 4 of them for keys and values; ratios are to torch's own operation."""
    lengths = (64,) if context.tiny else (512, 2048, 8192)
    cases = kernels.attention(_device(context), _half(context), lengths=lengths,
                              rounds=_rounds(context))  # fmt: skip
    _add_all(context, report, cases, 2 * len(lengths))


def lora(context: Context, report: Report) -> None:
    """Layers of one input, rank 16."""
    _, kernel = chosen_kernel("lora_linear", _device(context), "addmm")
    sizes = kernels.LORA_SIZES[: 1 if context.tiny else None]
    tokens = 32 if context.tiny else 8192
    cases = kernels.lora(_device(context), _half(context), kernel, tokens=tokens, sizes=sizes,
                         rounds=_rounds(context))  # fmt: skip
    _add_all(context, report, cases, 2 * len(sizes))


def accuracy(context: Context, report: Report) -> None:
    """Results and gradients of softmax and loss against float64 on the host, beside torch's own.

    Raises:
        PartError: a kernel failed, or is less exact than `MARGIN` allows.
    """
    device, worst = _device(context), []
    lengths = (33, 300) if context.tiny else (1024, 4096, 65_536)
    for dtype in _types(context):
        unit = torch.finfo(dtype).eps
        for operation, sizes, errors_of, own in (
            ("softmax", lengths, softmax_errors, lambda x: torch.softmax(x, -1)),
            ("linear_cross_entropy", (90,) if context.tiny else (32_000,), loss_errors, plain_loss),
        ):
            ours = {
                name: chosen_kernel(operation, device, name)[1]
                for name in kernel_names(operation, device)
            }
            for size in sizes:
                case = f"{operation}, {str(dtype)[6:]}, {size:,}"
                exact = errors_of(own, size, dtype, device)
                allowed = [MARGIN * (error + unit) for error in exact]
                report.add(_accuracy(case, "torch", exact, allowed))
                for name, kernel in ours.items():
                    try:
                        errors = errors_of(kernel, size, dtype, device)
                    except Exception as raised:  # one that cannot be compiled leaves the others
                        said = (str(raised).splitlines() or [type(raised).__name__])[0]
                        report.add(TableRow(case=case, name=name, note=said))
                        worst.append(f"{name}, {case}: {said}")
                        continue
                    report.add(_accuracy(case, name, errors, allowed))
                    if not all(map(operator.le, errors, allowed)):
                        worst.append(f"{name}, {case}: {errors} of {allowed}")
    report.note(
        "Errors are relative to the largest value of float64's result; "
        f"{MARGIN:g} times torch's own error and unit of rounding are allowed."
    )
    if worst:
        raise PartError(FAILED, f"failed, or less exact than allowed: {'; '.join(worst)}")


def _accuracy(case: str, name: str, errors: Sequence[float], allowed: Sequence[float]) -> TableRow:
    figures: dict[str, Figure] = {}
    for of, error, most in zip(("result", "gradient"), errors, allowed, strict=True):
        figures |= {f"error of the {of}": error, f"{of}, allowed": most}
    return TableRow(case=case, name=name, figures=figures)


def softmax_errors(
    kernel: Callable[..., Tensor], columns: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """Of the result and the gradient."""
    generator = torch.Generator().manual_seed(columns)
    x, upstream = ((torch.randn(8, columns, generator=generator) * 4).to(dtype) for _ in range(2))
    return _errors(kernel, lambda x: torch.softmax(x, -1), [x], upstream, device)


def loss_errors(
    kernel: Callable[..., Tensor], classes: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """Of the result and the gradient of hidden states."""
    generator = torch.Generator().manual_seed(classes)
    hidden, weight = (
        torch.randn(rows, 64, generator=generator).to(dtype) for rows in (64, classes)
    )
    targets = torch.randint(0, classes, (64,), generator=generator)
    return _errors(kernel, plain_loss, [hidden, weight, targets], torch.ones(()), device)


def _errors(
    kernel: Callable[..., Tensor],
    exact: Callable[..., Tensor],
    given: Sequence[Tensor],
    upstream: Tensor,
    device: torch.device,
) -> tuple[float, float]:
    def both(function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        first = tensors[0].detach().requires_grad_()
        result = function(first, *tensors[1:])
        (gradient,) = torch.autograd.grad(result, first, upstream.to(result))
        return [each.detach().double().cpu() for each in (result, gradient)]

    found = both(kernel, [each.to(device) for each in given])
    wide = both(exact, [each.double() if each.is_floating_point() else each for each in given])
    result, gradient = (
        float((one - other).abs().max() / other.abs().max())
        for one, other in zip(found, wide, strict=True)
    )
    return result, gradient
