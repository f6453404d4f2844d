"""Parts that time or check single operations: kernels beside torch, Liger, peft and float64."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks import kernel_timings
from benchmarks.gpu.part import FAILED, LATE, Clock, Context, PartError, Report
from benchmarks.kernel_timings import Kernel, Timing, chosen_kernel, plain_loss
from benchmarks.measure import Figure, TableRow

MARGIN = 2.0
"""A kernel may be off by this multiple of what torch's own operation is off in the same type on the
same device (another order of sums), and by as many units of rounding. With 32,000 classes and
bfloat16, logits near 32 are rounded to 1/8: any gradient from them is off by a few per cent."""


def _timing(context: Context) -> Timing:
    """Of operations in the type that runs compute in on this device."""
    dtype = torch.bfloat16 if _has_bfloat16(context) else torch.float16
    return Timing(torch.device(context.device), dtype, 2 if context.tiny else 7)


def _has_bfloat16(context: Context) -> bool:
    return context.device == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)


def _add_all(
    context: Context, report: Report, cases: kernel_timings.Cases, count: int, prefix: str = ""
) -> None:
    """Add what is measured case by case."""
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
    timing = _timing(context)
    elements = 6000 if context.tiny else 2**28 if context.full else 2**26
    columns = (64,) if context.tiny else kernel_timings.COLUMNS if context.full else (4096,)
    name = "triton" if "triton" in kernel_timings.fitting_kernels("softmax", timing.device) else ""
    name, kernel = chosen_kernel("softmax", timing.device, name)
    copy = timing.copy_bandwidth(elements)
    report.note(f"anygauge's kernel is `{name}`. A copy of {elements:,} numbers: {copy / 1e9:,.0f} "
                "GB/s; `of copy` is a kernel's share of that.")  # fmt: skip
    _say_liger(report)
    cases = kernel_timings.softmax(timing, kernel, columns=columns, elements=elements, copy=copy)
    _add_all(context, report, cases, 2 * len(columns))


def loss(context: Context, report: Report) -> None:
    """Each kernel of ours that can run here beside all logits in memory, and Liger."""
    timing = _timing(context)
    tokens, width = (32, 16) if context.tiny else (8192, 4096)
    _say_liger(report)
    ours = kernel_timings.fitting_kernels("linear_cross_entropy", timing.device)
    classes = (90,) if context.tiny else (32_000, 131_072)
    kinds = ((False, 0.0), (True, 0.0))[: 2 if context.full else 1]
    cases = kernel_timings.loss(
        timing, ours, classes=classes, tokens=tokens, width=width, cases=kinds
    )
    count = len(classes) * len(kinds)
    _add_all(context, report, cases, count, prefix=f"{tokens:,} x {width:,}, ")


def attention(context: Context, report: Report) -> None:
    """16 heads of 64, 4 of them for keys and values; ratios are to torch's own operation."""
    lengths = (64,) if context.tiny else (512, 2048, 8192)
    cases = kernel_timings.attention(_timing(context), lengths=lengths)
    _add_all(context, report, cases, 2 * len(lengths))


def lora(context: Context, report: Report) -> None:
    """Layers of one input, rank 16."""
    timing = _timing(context)
    _, kernel = chosen_kernel("lora_linear", timing.device, "addmm")
    sizes = kernel_timings.LORA_SIZES[: 1 if context.tiny else None]
    cases = kernel_timings.lora(timing, kernel, tokens=32 if context.tiny else 8192, sizes=sizes)
    _add_all(context, report, cases, 2 * len(sizes))


plain_softmax = functools.partial(torch.softmax, dim=-1)


def accuracy(context: Context, report: Report) -> None:
    """Results and gradients of softmax and loss against float64 on the host, beside torch's own."""
    device, worst = torch.device(context.device), []
    lengths = (33, 300) if context.tiny else (1024, 4096, 65_536)
    classes = (90,) if context.tiny else (32_000,)
    cases = [("softmax", plain_softmax, size) for size in lengths]
    cases += [("linear_cross_entropy", plain_loss, size) for size in classes]
    for dtype in (torch.float32, torch.bfloat16)[: 2 if _has_bfloat16(context) else 1]:
        unit = torch.finfo(dtype).eps
        for operation, own, size in cases:
            case = f"{operation}, {str(dtype)[6:]}, {size:,}"
            exact = errors_of(own, own, size, dtype, device)
            allowed = [MARGIN * (error + unit) for error in exact]
            report.add(_accuracy(case, "torch", exact, allowed))
            for name, kernel in kernel_timings.fitting_kernels(operation, device).items():
                try:
                    errors = errors_of(kernel, own, size, dtype, device)
                except Exception as raised:  # one that cannot be compiled leaves the others
                    report.add(
                        TableRow(case=case, name=name, note=kernel_timings.first_line(raised))
                    )
                    worst.append(f"{name}, {case}: {kernel_timings.first_line(raised)}")
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


def errors_of(
    kernel: Kernel, own: Kernel, size: int, dtype: torch.dtype, device: torch.device
) -> list[float]:
    """Of the result and the gradient of the first tensor that is given.

    Args:
        own: `plain_softmax` of rows of `size` columns, or `plain_loss` of `size` classes.
    """
    generator = torch.Generator().manual_seed(size)
    if own is plain_softmax:
        x, upstream = ((torch.randn(8, size, generator=generator) * 4).to(dtype) for _ in range(2))
        given = [x]
    else:
        given = [torch.randn(rows, 64, generator=generator).to(dtype) for rows in (64, size)]
        given.append(torch.randint(0, size, (64,), generator=generator))
        upstream = torch.ones(())

    def both(function: Kernel, tensors: Sequence[Tensor]) -> list[Tensor]:
        first = tensors[0].detach().requires_grad_()
        result = function(first, *tensors[1:])
        (gradient,) = torch.autograd.grad(result, first, upstream.to(result))
        return [each.detach().double().cpu() for each in (result, gradient)]

    found = both(kernel, [each.to(device) for each in given])
    wide = both(own, [each.double() if each.is_floating_point() else each for each in given])
    return [
        float((one - other).abs().max() / other.abs().max())
        for one, other in zip(found, wide, strict=True)
    ]
