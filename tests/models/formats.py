"""Tiny models in the formats of few bits that publishers use, with their names of tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"


def as_mxfp4(folder: Path) -> None:
    """Make the experts of a saved gpt-oss codes of 4 bits, each 32 with an exponent."""
    state = load_file(folder / WEIGHTS)
    made: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in state.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            made[name] = tensor
            continue
        # In the files, what the model sums over comes last: 16 bytes hold 32 of it.
        experts, summed, out = tensor.shape
        shape = (experts, out, summed // 32)
        made[f"{name}_blocks"] = torch.randint(
            0, 256, (*shape, 16), dtype=torch.uint8, generator=generator
        )
        made[f"{name}_scales"] = torch.randint(
            120, 126, shape, dtype=torch.uint8, generator=generator
        )
    _write(folder, made, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def as_fp8_blocks(folder: Path, block: int = 16) -> None:
    """Make matrices of a saved model 8-bit numbers, each block of them with a scale."""
    state = load_file(folder / WEIGHTS)
    made: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not name.endswith("proj.weight"):
            made[name] = tensor
            continue
        rows, columns = tensor.shape
        blocks = tensor.reshape(rows // block, block, columns // block, block)
        scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        codes = blocks / scales[:, None, :, None]
        made[name] = codes.reshape(rows, columns).to(torch.float8_e4m3fn)
        made[f"{name}_scale_inv"] = scales
    described = {
        **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"},
        "weight_block_size": [block, block],
    }
    _write(folder, made, described)


def _write(folder: Path, state: dict[str, Tensor], described: dict[str, Any]) -> None:
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = described
    (folder / "config.json").write_text(json.dumps(config))
