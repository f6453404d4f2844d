"""Errors of softmax in bfloat16 against float64, by length of the rows and scale of the logits.

    python benchmarks/softmax_accuracy.py

Inputs are normal, rounded to bfloat16 first, so that what is measured is the softmax alone. An
error is the largest difference of a row's weights, as a multiple of its largest; the table
has its median over rows. Results that are rounded to bfloat16 cannot be better than 2^-9, 0.2 %.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
import typer
from torch import Tensor

from benchmarks.kernel_timing import chosen_device, chosen_kernel

LENGTHS = (128, 1024, 8192, 65536, 262144)
SCALES = (1.0, 4.0, 16.0)
LANES = 128
"""Running sums side by side of the accumulation in bfloat16."""


def accumulated_in_bfloat16(x: Tensor) -> Tensor:
    """What it costs to keep exponentials and their sum in bfloat16, as some kernels do."""
    weights = torch.exp(x - x.amax(-1, keepdim=True))
    lanes = torch.zeros(x.shape[0], LANES, dtype=x.dtype, device=x.device)
    for part in weights.split(LANES, dim=-1):
        lanes[:, : part.shape[1]] += part
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return weights / lanes


def error(found: Tensor, exact: Tensor) -> float:
    """Median over rows of the largest error, relative to the row's largest weight."""
    apart = (found.double().cpu() - exact).abs().amax(-1) / exact.amax(-1)
    return float(apart.median())


def figures(device: torch.device, rows: int) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table."""
    _, kernel = chosen_kernel("softmax", device)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "anygauge": kernel,
        "torch": lambda x: torch.softmax(x, -1),
        "in float32, rounded": lambda x: torch.softmax(x.float(), -1).to(x.dtype),
        "accumulated in bfloat16": accumulated_in_bfloat16,
    }
    table = []
    for scale in SCALES:
        for length in LENGTHS:
            generator = torch.Generator().manual_seed(length)
            x = (torch.randn(rows, length, generator=generator) * scale).bfloat16()
            exact = torch.softmax(x.double(), -1)
            errors = [error(way(x.to(device)), exact) for way in ways.values()]
            table.append([f"{scale:g}", f"{length:,}", *(f"{each:.2%}" for each in errors)])
    return ["standard deviation of logits", "columns", *ways], table


def main(
    device: Annotated[str, typer.Option(help="A torch device, or auto.")] = "auto",
    rows: Annotated[int, typer.Option(min=1, help="Of every size.")] = 16,
) -> None:
    """Print the table in Markdown."""
    header, table = figures(chosen_device(device), rows)
    for line in (header, ["---:"] * len(header), *table):
        print("| " + " | ".join(line) + " |")


if __name__ == "__main__":
    typer.run(main)
