"""Softmax side by side: time and share of the copy bandwidth, forward and backward.

    python benchmarks/softmax.py --rounds 7

Each round runs every contender once, beginning one further on than the round before. Bytes are
those that must be read and written: input and output forward, output, gradient and result backward,
and a mask. See --help for the settings.
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

from benchmarks.kernel_timing import (
    Device,
    Dtype,
    Output,
    Rounds,
    Threads,
    chosen_device,
    chosen_kernel,
    compare,
    copy_bandwidth,
    show,
)

COLUMNS = (128, 1024, 4096, 16384, 65536, 131072, 262144)
SCALE = 0.3


def contenders(
    kernel: Callable[..., Tensor], device: torch.device, *, masked: bool
) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Ours first; each takes scores and an additive mask."""
    if not masked:
        found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "anygauge": lambda x, _: kernel(x),
            "torch": lambda x, _: torch.softmax(x, -1),
            "torch, to float32": lambda x, _: torch.softmax(x, -1, dtype=torch.float32).to(x.dtype),
        }
    else:
        found = {
            "anygauge": lambda x, mask: kernel(x, mask=mask, scale=SCALE),
            "torch": _masked,
            "torch, in float32": lambda x, mask: torch.softmax(x.float() * SCALE + mask, -1).to(
                x.dtype
            ),
        }
    compiled = torch.compile(found["torch"], dynamic=False)
    found["torch.compile"] = compiled
    if device.type == "cuda" and not masked and find_spec("liger_kernel") is not None:
        from liger_kernel.ops.softmax import LigerSoftmaxFunction

        found["liger"] = lambda x, _: LigerSoftmaxFunction.apply(x)
    return found


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    """As a model library's plain attention has it: scale and mask in the scores' type."""
    return torch.softmax(x * SCALE + mask, -1, dtype=torch.float32).to(x.dtype)


def measure(
    columns: int, elements: int, dtype: torch.dtype, device: torch.device, *, masked: bool,
    rounds: int, kernel: Callable[..., Tensor],
) -> dict[str, Any]:  # fmt: skip
    """One size: figures of all contenders."""
    rows = max(1, elements // columns)
    drawn: Any = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    x = torch.randn(rows, columns, **drawn).to(dtype).requires_grad_()
    upstream = torch.randn(rows, columns, **drawn).to(dtype)
    hidden = torch.rand(rows, columns, **drawn) < 0.3
    mask = torch.zeros_like(upstream).masked_fill_(hidden, torch.finfo(dtype).min)
    torch.compiler.reset()  # sizes are compiled for one by one
    found = compare(
        {
            name: functools.partial(operation, x, mask)
            for name, operation in contenders(kernel, device, masked=masked).items()
        },
        lambda _: upstream,
        [x],
        rounds=rounds,
        device=device,
    )
    return {
        "columns": columns,
        "rows": rows,
        "masked": masked,
        "forward_bytes": x.nbytes * (3 if masked else 2),
        "backward_bytes": x.nbytes * 3,
        "timed": found,
    }


def case(row: Mapping[str, Any]) -> str:
    """One size, in words."""
    return f"{row['columns']:,} columns" + (", scaled and masked" if row["masked"] else "")


def main(
    device: Device = "auto",
    dtype: Dtype = "bfloat16",
    columns: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(map(str, COLUMNS)),
    elements: Annotated[
        int, typer.Option(min=0, help="Of every size; 0: 16 Mi, 256 Mi on an accelerator.")
    ] = 0,
    rounds: Rounds = 7,
    threads: Threads = 2,
    output: Output = Path("runs/softmax.json"),
) -> None:
    """Measure the softmax of this device."""
    torch.set_num_threads(threads)
    where = chosen_device(device)
    count = elements or (2**24 if where.type == "cpu" else 2**28)
    kind = getattr(torch, dtype)
    name, kernel = chosen_kernel("softmax", where)
    copy = copy_bandwidth(where, count, kind, rounds)
    found = []
    for masked in (False, True):
        for each in columns.split(","):
            row = measure(
                int(each), count, kind, where, masked=masked, rounds=rounds, kernel=kernel
            )
            found.append((case(row), row))
    title = (
        f"{where}: kernel {name}; copy of {count:,} {dtype}: {copy / 1e9:,.1f} GB/s; "
        f"{rounds} rounds"
    )
    show(
        output, title, {"device": str(where), "dtype": dtype, "copy_bytes_per_s": copy}, found, copy
    )


if __name__ == "__main__":
    typer.run(main)
