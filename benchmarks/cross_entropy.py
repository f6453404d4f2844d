"""The loss of an output layer side by side: time and memory, forward and backward.

    python benchmarks/cross_entropy.py --rounds 5

Each round runs every contender once, beginning one further on than the round before. Memory is
the most that tensors held at once beyond hidden states, weight and targets. See --help for the
settings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from benchmarks.kernel_timing import (
    Device,
    Dtype,
    Output,
    Rounds,
    Threads,
    chosen_device,
    chosen_kernel,
    compare,
    show,
)

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits, and the loss from them in float32, as model libraries have it."""
    return cross_entropy(linear(hidden, weight).float(), targets, reduction="sum")


def contenders(kernel: Loss, device: torch.device) -> dict[str, Loss]:
    """Ours first, as a run has it where shapes may change."""
    found: dict[str, Loss] = {
        "anygauge": functools.partial(kernel, skip_ignored=True),
        "torch": plain,
        "torch.compile": torch.compile(plain, dynamic=False),
    }
    if device.type == "cuda" and find_spec("liger_kernel") is not None:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        def liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
            loss: Tensor = liger_fused_linear_cross_entropy(
                hidden, weight, targets, reduction="sum"
            )
            return loss

        found["liger"] = liger
    return found


def measure(
    kernel: Loss, *, classes: int, width: int, tokens: int, ignored: float, trained: bool,
    dtype: torch.dtype, device: torch.device, rounds: int,
) -> dict[str, Any]:  # fmt: skip
    """One case: figures of all contenders."""
    # On the device: one thread of a host takes seconds for half a billion numbers.
    drawn: Any = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    hidden = torch.randn(tokens, width, **drawn).to(dtype).requires_grad_()
    weight = torch.randn(classes, width, **drawn).mul_(0.02).to(dtype)
    weight.requires_grad_(trained)
    targets = torch.randint(0, classes, (tokens,), **drawn)
    targets[torch.rand(tokens, **drawn) < ignored] = -100
    torch.compiler.reset()
    found = compare(
        {
            name: functools.partial(loss, hidden, weight, targets)
            for name, loss in contenders(kernel, device).items()
        },
        torch.ones_like,
        [hidden, weight],
        rounds=rounds,
        device=device,
    )
    return {
        "classes": classes,
        "tokens": tokens,
        "width": width,
        "ignored": ignored,
        "trained": trained,
        "timed": found,
    }


def case(row: Mapping[str, Any]) -> str:
    """One case, in words."""
    kind = "trained" if row["trained"] else "frozen"
    return f"{row['classes']:,} classes, {kind}, {row['ignored']:.0%} ignored"


def main(
    device: Device = "auto",
    dtype: Dtype = "bfloat16",
    classes: Annotated[str, typer.Option(help="Comma-separated.")] = "32000,131072",
    tokens: Annotated[int, typer.Option(min=0, help="0: 1024, 16384 on an accelerator.")] = 0,
    width: Annotated[int, typer.Option(min=0, help="0: 512, 4096 on an accelerator.")] = 0,
    rounds: Rounds = 5,
    threads: Threads = 2,
    output: Output = Path("runs/cross_entropy.json"),
) -> None:
    """Measure the loss of this device."""
    torch.set_num_threads(threads)
    where = chosen_device(device)
    host = where.type == "cpu"
    tokens, width = tokens or (1024 if host else 16384), width or (512 if host else 4096)
    name, kernel = chosen_kernel("linear_cross_entropy", where)
    rows = [
        measure(
            kernel, classes=int(c), width=width, tokens=tokens, ignored=ignored, trained=trained,
            dtype=getattr(torch, dtype), device=where, rounds=rounds,
        )
        for c in classes.split(",")
        for trained, ignored in ((False, 0.0), (False, 0.5), (True, 0.0))
    ]  # fmt: skip
    title = f"{where}: kernel {name}; {tokens:,} tokens x {width:,}, {dtype}; {rounds} rounds"
    settings = {"device": str(where), "dtype": dtype, "kernel": name}
    show(output, title, settings, [(case(row), row) for row in rows])


if __name__ == "__main__":
    typer.run(main)
