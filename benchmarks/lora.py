"""A LoRA layer side by side: peft's own forward and backward, and with the product added at once.

python benchmarks/lora.py --rounds 9
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor, nn

from anygauge.models.fused_lora import fuse_lora
from anygauge.registry import Registry
from benchmarks.kernel_timing import chosen_device, compare, figures, record

SIZES = ((512, 512), (512, 1376), (2048, 2048))
"""(in, out) of the layer."""


def layer(width: int, out: int, dropout: float, dtype: torch.dtype, device: torch.device) -> Any:
    """A frozen linear layer with factors of rank 16, as peft makes it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    made: Any = get_peft_model(
        nn.Sequential(nn.Linear(width, out, bias=False)),  # type: ignore[arg-type]
        LoraConfig(r=16, lora_dropout=dropout, target_modules=["0"], init_lora_weights=False),
        autocast_adapter_dtype=False,
    )
    return made.to(device, dtype).train()


def measure(
    width: int, out: int, *, dropout: float, tokens: int, dtype: torch.dtype,
    device: torch.device, rounds: int, kernel: Callable[..., Tensor],
) -> dict[str, Any]:  # fmt: skip
    """One size: figures of both, and of the frozen layer alone."""
    fused, plain = (layer(width, out, dropout, dtype, device) for _ in range(2))
    assert fuse_lora(fused, kernel) == (1, 1)
    base = plain.base_model.model[0].base_layer
    x = torch.randn(tokens, width).to(device, dtype).requires_grad_()
    upstream = torch.randn(tokens, out).to(device, dtype)
    given = [x, *(p for m in (fused, plain) for p in m.parameters() if p.requires_grad)]
    found = compare(
        {
            "anygauge": lambda: fused(x),
            "peft": lambda: plain(x),
            "frozen layer alone": lambda: base(x),
        },
        lambda _: upstream,
        given,
        rounds=rounds,
        device=device,
    )
    return {"width": width, "out": out, "dropout": dropout, "timed": found}


def case(row: Mapping[str, Any]) -> str:
    """One size, in words."""
    return f"{row['dtype']}, {row['width']:,} to {row['out']:,}, dropout {row['dropout']:g}"


def main(
    device: Annotated[str, typer.Option(help="A torch device, or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Comma-separated.")] = "float32,bfloat16",
    tokens: Annotated[int, typer.Option(min=1)] = 2048,
    rounds: Annotated[int, typer.Option(min=1)] = 9,
    threads: Annotated[int, typer.Option(min=1, help="Of torch, on the host.")] = 2,
    output: Annotated[Path, typer.Option(help="A JSON file.")] = Path("runs/lora.json"),
) -> None:
    """Measure LoRA layers on this device."""
    torch.set_num_threads(threads)
    where = chosen_device(device)
    registry = Registry.load()
    choices = registry.resolve_kernels(registry.create_backend("cpu"), {"lora_linear": "addmm"})
    kernel = registry.load_kernel(choices, "lora_linear")
    rows = []
    for name in dtype.split(","):
        for width, out in SIZES:
            for dropout in (0.0, 0.1):
                row = measure(
                    width,
                    out,
                    dropout=dropout,
                    tokens=tokens,
                    dtype=getattr(torch, name),
                    device=where,
                    rounds=rounds,
                    kernel=kernel,
                )
                rows.append({**row, "dtype": name})
    console = Console(highlight=False, width=120)
    console.print(f"{where}: {tokens:,} tokens, rank 16; {rounds} rounds")
    console.print(figures([(case(row), row["timed"]) for row in rows]))
    record(output, {"device": str(where), "tokens": tokens}, rows)
    console.print(f"written: {output}")


if __name__ == "__main__":
    typer.run(main)
