"""Parts that time or check single operations: kernels beside torch, Liger, peft and float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks import attention as attention_timing
from benchmarks import cross_entropy, kernel_timing
from benchmarks import lora as lora_timing
from benchmarks import softmax as softmax_timing
from benchmarks.gpu.context import Clock, Context
from benchmarks.gpu.result import Report, TableRow
from benchmarks.kernel_timing import chosen_kernel, kernel_names

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


def _add(report: Report, case: str, row: Mapping[str, Any], copy: float = 0.0) -> None:
    for each in kernel_timing.table_rows(case, row, copy):
        report.add(each)


def _say_liger(report: Report) -> None:
    if find_spec("liger_kernel") is None:
        report.note("Liger is not installed (liger-kernel): it is not compared.")


def softmax(context: Context, report: Report) -> None:
    """The Triton kernel where it can run, else the one that a run has."""
    device, clock = _device(context), Clock(context.seconds)
    elements = 6000 if context.tiny else 2**28 if context.full else 2**26
    columns = (64,) if context.tiny else softmax_timing.COLUMNS if context.full else (4096, 131072)
    name = "triton" if "triton" in kernel_names("softmax", device) else None
    name, kernel = chosen_kernel("softmax", device, name)
    copy = kernel_timing.copy_bandwidth(device, elements, _half(context), _rounds(context))
    report.note(f"anygauge's kernel is `{name}`. A copy of {elements:,} numbers: {copy / 1e9:,.0f} "
                "GB/s; `of copy` is a kernel's share of that.")  # fmt: skip
    _say_liger(report)
    for count in columns:
        for masked in (False, True):
            if not clock.left:
                report.note(f"{count:,} columns and more were not timed: the time was over.")
                return
            row = softmax_timing.measure(
                count, elements, _half(context), device, masked=masked, rounds=_rounds(context),
                kernel=kernel,
            )  # fmt: skip
            _add(report, softmax_timing.case(row), row, copy)


def loss(context: Context, report: Report) -> None:
    """Each kernel of ours that can run here beside all logits in memory, and Liger."""
    device, clock = _device(context), Clock(context.seconds)
    tokens, width = (32, 16) if context.tiny else (8192, 4096)
    sizes = (90,) if context.tiny else (32_000, 131_072)
    _say_liger(report)
    for classes in sizes:
        for kernel_name in kernel_names("linear_cross_entropy", device):
            if not clock.left:
                report.note(f"{classes:,} classes were not timed in full: the time was over.")
                return
            _, kernel = chosen_kernel("linear_cross_entropy", device, kernel_name)
            for trained in (False, True) if context.full else (False,):
                row = cross_entropy.measure(
                    kernel, classes=classes, width=width, tokens=tokens, ignored=0.0,
                    trained=trained, dtype=_half(context), device=device, rounds=_rounds(context),
                )  # fmt: skip
                case = f"{kernel_name}: {cross_entropy.case(row)}, {tokens:,} tokens x {width:,}"
                _add(report, case, row)


def attention(context: Context, report: Report) -> None:
    """16 heads of 64, 4 of them for keys and values; ratios are to torch's own operation."""
    for length in (64,) if context.tiny else (512, 2048, 8192):
        for documents in (1, 8):
            row = attention_timing.measure(
                length, documents=documents, rows=2, heads=16, groups=4, width=64,
                dtype=_half(context), device=_device(context), rounds=_rounds(context),
            )  # fmt: skip
            _add(report, attention_timing.case(row), row)


def lora(context: Context, report: Report) -> None:
    """Layers of one input, rank 16."""
    _, kernel = chosen_kernel("lora_linear", _device(context), "addmm")
    tokens = 32 if context.tiny else 8192
    for width, outs in lora_timing.SIZES[:1] if context.tiny else lora_timing.SIZES:
        for dropout in (0.0, 0.1):
            row = lora_timing.measure(
                width, outs, dropout=dropout, tokens=tokens, dtype=_half(context),
                device=_device(context), rounds=_rounds(context), kernel=kernel,
            )  # fmt: skip
            _add(report, lora_timing.case({**row, "dtype": str(_half(context))[6:]}), row)


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
