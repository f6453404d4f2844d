"""Whole models on disk, in the layout of transformers: a folder that is complete or absent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anygauge.interface import ModelError


def save_model(
    state: Mapping[str, Tensor],
    config: Any,
    tokenizer: Any,
    folder: Path,
    *,
    dtype: torch.dtype,
    generation: Any = None,
) -> None:
    """Write weights in `dtype`, the configuration and the tokenizer to `folder`.

    Everything is written beside it and renamed at the end; an existing `folder` is replaced.

    Args:
        state: parameter name -> tensor, as the model's own ``named_parameters`` has them.
        generation: the model's generation configuration, if it has one of its own.

    Raises:
        ModelError: there is nothing to write.
    """
    from huggingface_hub import save_torch_state_dict

    if not state or any(tensor.numel() == 0 for tensor in state.values()):
        raise ModelError(f"{folder}: the model to save is empty; nothing was written")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        save_torch_state_dict(
            {name: tensor.to(dtype).contiguous() for name, tensor in state.items()},
            temporary,
            metadata={"format": "pt"},
        )
        config.dtype = dtype
        config.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        if generation is not None:
            generation.save_pretrained(temporary)
        for file in temporary.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
