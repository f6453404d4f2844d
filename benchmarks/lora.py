"""LoRA layers of one input side by side: peft's forward and backward, and with fused products.

python benchmarks/lora.py --rounds 9
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from anygauge.interface import LoraKernel
from anygauge.kernels.install import fuse_lora, plain_lora
from benchmarks.kernel_timing import (
    Device,
    Output,
    Rounds,
    Threads,
    chosen_device,
    chosen_kernel,
    compare,
    show,
)

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
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="Comma-separated.")] = "float32,bfloat16",
    tokens: Annotated[int, typer.Option(min=1)] = 2048,
    rounds: Rounds = 9,
    threads: Threads = 2,
    output: Output = Path("runs/lora.json"),
) -> None:
    """Measure LoRA layers on this device."""
    torch.set_num_threads(threads)
    where = chosen_device(device)
    _, kernel = chosen_kernel("lora_linear", where, "addmm")
    rows = []
    for name in dtype.split(","):
        for width, outs in SIZES:
            for dropout in (0.0, 0.1):
                row = measure(
                    width, outs, dropout=dropout, tokens=tokens, dtype=getattr(torch, name),
                    device=where, rounds=rounds, kernel=kernel,
                )  # fmt: skip
                rows.append({**row, "dtype": name})
    title = f"{where}: {tokens:,} tokens, rank 16; {rounds} rounds"
    settings = {"device": str(where), "tokens": tokens}
    show(output, title, settings, [(case(row), row) for row in rows])


if __name__ == "__main__":
    typer.run(main)
