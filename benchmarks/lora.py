"""LoRA layers of one input side by side: peft's forward and backward, and with fused products.

python benchmarks/lora.py --rounds 9
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor, nn

from anygauge.interface import LoraKernel
from anygauge.kernels.choose import choose_kernels, load_kernel
from anygauge.kernels.install import fuse_lora, plain_lora
from anygauge.registry import Registry
from benchmarks.kernel_timing import chosen_device, compare, figures, record

SIZES = ((512, (512,)), (512, (1376,)), (2048, (2048,)), (2048, (2048, 512, 512)))
"""(in, out of each layer of this input)."""

NAMES = [str(index) for index in range(max(len(outs) for _, outs in SIZES))]


class Side(nn.ModuleList):
    """Layers side by side, as those of queries, keys and values."""

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, in) -> (tokens, all outs)."""
        return torch.cat([each(x) for each in self], dim=-1)


def layers(
    width: int, outs: Sequence[int], dropout: float, dtype: torch.dtype, device: torch.device
) -> Any:
    """Frozen linear layers with factors of rank 16, as peft makes them."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    made: Any = get_peft_model(
        Side([nn.Linear(width, out, bias=False) for out in outs]),  # type: ignore[arg-type]
        LoraConfig(r=16, lora_dropout=dropout, target_modules=NAMES, init_lora_weights=False),
        autocast_adapter_dtype=False,
    )
    return made.to(device, dtype).train()


def measure(
    width: int, outs: Sequence[int], *, dropout: float, tokens: int, dtype: torch.dtype,
    device: torch.device, rounds: int, kernel: LoraKernel,
) -> dict[str, Any]:  # fmt: skip
    """One size: figures of both, and of the frozen layer alone."""
    fused, plain = (layers(width, outs, dropout, dtype, device) for _ in range(2))
    assert len(plain_lora(fused)[0]) == len(outs)
    fuse_lora(fused, kernel)
    base = Side([each.base_layer for each in plain.base_model.model])
    x = torch.randn(tokens, width).to(device, dtype).requires_grad_()
    upstream = torch.randn(tokens, sum(outs)).to(device, dtype)
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
    return {"width": width, "out": outs, "dropout": dropout, "timed": found}


def case(row: Mapping[str, Any]) -> str:
    """One size, in words."""
    outs = ", ".join(f"{out:,}" for out in row["out"])
    return f"{row['dtype']}, {row['width']:,} to {outs}, dropout {row['dropout']:g}"


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
    choices = choose_kernels(registry, registry.create_backend("cpu"), {"lora_linear": "addmm"})
    kernel: LoraKernel = load_kernel(choices, "lora_linear")
    rows = []
    for name in dtype.split(","):
        for width, outs in SIZES:
            for dropout in (0.0, 0.1):
                row = measure(
                    width,
                    outs,
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
