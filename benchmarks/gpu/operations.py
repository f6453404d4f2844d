"""Parts that time or check single operations: kernels beside torch, Liger, peft and float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks import kernels
from benchmarks.gpu.context import Clock, Context
from benchmarks.gpu.result import Report
from benchmarks.kernel_timing import (
    KernelCase,
    chosen_kernel,
    copy_bandwidth,
    kernel_names,
    table_rows,
)
from benchmarks.table import TableRow

EPSILON: Mapping[str, float] = {"float32": 1e-5, "bfloat16": 2e-2}
"""Error beside float64, relative to the largest value, that the kernels' tests allow."""


def _device(context: Context) -> torch.device:
    return torch.device(context.device)


def _rounds(context: Context) -> int:
    return 2 if context.tiny else 7


def _types(context: Context) -> tuple[str, ...]:
    return tuple(EPSILON) if _has_bfloat16(context) else ("float32",)


def _has_bfloat16(context: Context) -> bool:
    if context.device == "cpu":
        return True
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _half(context: Context) -> torch.dtype:
    """The type that runs compute in on this device."""
    return torch.bfloat16 if _has_bfloat16(context) else torch.float16


def _add_all(
    report: Report, clock: Clock, cases: Iterator[KernelCase], copy: float = 0.0, prefix: str = ""
) -> bool:
    """Add what is measured case by case; whether all was, before the time was over."""
    for case in cases:
        for each in table_rows(replace(case, name=prefix + case.name), copy):
            report.add(each)
        if not clock.left:
            report.note(f"No case after `{prefix}{case.name}` was timed: the time was over.")
            return False
    return True


def _say_liger(report: Report) -> None:
    if find_spec("liger_kernel") is None:
        report.note("Liger is not installed (liger-kernel): it is not compared.")


def softmax(context: Context, report: Report) -> None:
    """The Triton kernel where it can run, else the one that a run has."""
    device, clock = _device(context), Clock(context.seconds)
    elements = 6000 if context.tiny else 2**28 if context.full else 2**26
    columns = (64,) if context.tiny else kernels.COLUMNS if context.full else (4096, 131072)
    name = "triton" if "triton" in kernel_names("softmax", device) else None
    name, kernel = chosen_kernel("softmax", device, name)
    copy = copy_bandwidth(device, elements, _half(context), _rounds(context))
    report.note(f"anygauge's kernel is `{name}`. A copy of {elements:,} numbers: {copy / 1e9:,.0f} "
                "GB/s; `of copy` is a kernel's share of that.")  # fmt: skip
    _say_liger(report)
    cases = kernels.softmax(device, _half(context), kernel, columns=columns, elements=elements,
                            rounds=_rounds(context))  # fmt: skip
    _add_all(report, clock, cases, copy)


def loss(context: Context, report: Report) -> None:
    """Each kernel of ours that can run here beside all logits in memory, and Liger."""
    device, clock = _device(context), Clock(context.seconds)
    tokens, width = (32, 16) if context.tiny else (8192, 4096)
    _say_liger(report)
    for classes in (90,) if context.tiny else (32_000, 131_072):
        for name in kernel_names("linear_cross_entropy", device):
            _, kernel = chosen_kernel("linear_cross_entropy", device, name)
            cases = kernels.loss(
                device, _half(context), kernel, classes=[classes], tokens=tokens, width=width,
                cases=((False, 0.0), (True, 0.0))[: 2 if context.full else 1],
                rounds=_rounds(context),
            )  # fmt: skip
            if not _add_all(report, clock, cases, prefix=f"{name}: {tokens:,} x {width:,}, "):
                return


def attention(context: Context, report: Report) -> None:
    """16 heads of 64, 4 of them for keys and values; ratios are to torch's own operation."""
    lengths = (64,) if context.tiny else (512, 2048, 8192)
    cases = kernels.attention(_device(context), _half(context), lengths=lengths,
                              rounds=_rounds(context))  # fmt: skip
    _add_all(report, Clock(context.seconds), cases)


def lora(context: Context, report: Report) -> None:
    """Layers of one input, rank 16."""
    _, kernel = chosen_kernel("lora_linear", _device(context), "addmm")
    cases = kernels.lora(
        _device(context), _half(context), kernel, tokens=32 if context.tiny else 8192,
        sizes=kernels.LORA_SIZES[: 1 if context.tiny else None], rounds=_rounds(context),
    )  # fmt: skip
    _add_all(report, Clock(context.seconds), cases)


def accuracy(context: Context, report: Report) -> None:
    """Results and gradients of softmax and loss against float64 on the host.

    Raises:
        RuntimeError: a kernel failed, or an error is larger than the kernels' tests allow.
    """
    device, worst = _device(context), []
    lengths = (33, 300) if context.tiny else (1024, 4096, 65_536)
    for dtype in _types(context):
        for operation, sizes, exact in (
            ("softmax", lengths, _softmax_errors),
            ("linear_cross_entropy", (90,) if context.tiny else (32_000,), _loss_errors),
        ):
            for name in kernel_names(operation, device):
                _, kernel = chosen_kernel(operation, device, name)
                for size in sizes:
                    case = f"{operation}, {dtype}, {size:,}"
                    try:
                        errors = exact(kernel, size, getattr(torch, dtype), device)
                    except Exception as error:  # one that cannot be compiled leaves the others
                        said = (str(error).splitlines() or [type(error).__name__])[0]
                        report.add(TableRow(case=case, name=name, note=said))
                        worst.append(f"{name}, {case}: {said}")
                        continue
                    figures = {
                        "error of the result": errors[0],
                        "error of the gradient": errors[1],
                        "largest error": max(errors),
                        "allowed": EPSILON[dtype],
                    }
                    report.add(TableRow(case=case, name=name, figures=figures))
                    if not max(errors) <= EPSILON[dtype]:
                        worst.append(f"{name}, {case}: {max(errors):.1e}")
    report.note("Errors are relative to the largest value of float64's result.")
    if worst:
        raise RuntimeError(f"failed, or less exact than allowed: {'; '.join(worst)}")


def _error(found: Tensor, exact: Tensor) -> float:
    apart = (found.detach().double().cpu() - exact).abs().max()
    return float(apart / exact.abs().max())


def _softmax_errors(
    kernel: Callable[..., Tensor], columns: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(columns)
    x, upstream = ((torch.randn(8, columns, generator=generator) * 4).to(dtype) for _ in range(2))
    there = x.to(device).requires_grad_()
    found = kernel(there)
    (gradient,) = torch.autograd.grad(found, there, upstream.to(device))
    here = x.double().requires_grad_()
    exact = torch.softmax(here, -1)
    (wanted,) = torch.autograd.grad(exact, here, upstream.double())
    return _error(found, exact.detach()), _error(gradient, wanted)


def _loss_errors(
    kernel: Callable[..., Tensor], classes: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(classes)
    hidden, weight = (
        torch.randn(rows, 64, generator=generator).to(dtype) for rows in (64, classes)
    )
    targets = torch.randint(0, classes, (64,), generator=generator)
    there = hidden.to(device).requires_grad_()
    found = kernel(there, weight.to(device), targets.to(device))
    (gradient,) = torch.autograd.grad(found, there)
    here = hidden.double().requires_grad_()
    logits = here @ weight.double().t()
    exact = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    (wanted,) = torch.autograd.grad(exact, here)
    return _error(found, exact.detach()), _error(gradient, wanted)
