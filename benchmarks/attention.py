"""Attention side by side on padded and packed rows: time and memory, forward and backward.

    make gpu-full PARTS=attention

The contenders are the model library's, each with masks of the form that it takes, and the kernels
that run on the device. Ratios are to the first, which the backends of CPU and CUDA name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.models.masks import MaskPlan
from anygauge_kernels.attention import with_softmax
from anygauge_kernels.blocks import compiled
from benchmarks.kernel_timing import chosen_kernel, compare

Forward = Callable[..., tuple[Tensor, Any]]


def contenders(device: torch.device) -> dict[str, tuple[Forward, str]]:
    """Name -> attention and the form of its masks."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.llama.modeling_llama import eager_attention_forward

    _, softmax = chosen_kernel("softmax", device)
    found: dict[str, tuple[Forward, str]] = {
        "sdpa": (sdpa_attention_forward, "boolean"),
        "eager": (eager_attention_forward, "additive"),
        "softmax": (with_softmax(softmax).forward, "boolean"),
    }
    if device.type == "cuda":
        found["blocks"] = (compiled().forward, "blocks")
    return found


def measure(
    length: int, *, documents: int, rows: int, heads: int, groups: int, width: int,
    dtype: torch.dtype, device: torch.device, rounds: int,
) -> dict[str, Any]:  # fmt: skip
    """One size: rows of `documents` documents of one length each, the last padding if one."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, upstream = (
        torch.randn(rows, h, length, width, generator=generator).to(device, dtype)
        for h in (heads, groups, groups, heads)
    )
    q, k, v = (each.requires_grad_() for each in (q, k, v))
    segments = (torch.arange(length) * documents // length + 1).expand(rows, -1).clone()
    if documents == 1:
        segments[1::2, -length // 4 :] = 0  # every second row is padded
    segments = segments.to(device)
    module = nn.Module().train()
    module.num_key_value_groups = heads // groups  # type: ignore[assignment]

    def run(forward: Forward, mask: Any) -> Tensor:
        output = forward(module, q, k, v, mask, scaling=width**-0.5, dropout=0.0)[0]
        return output.transpose(1, 2)

    found = compare(
        {
            name: functools.partial(run, forward, MaskPlan(form).masks(segments, dtype))
            for name, (forward, form) in contenders(device).items()
        },
        lambda _: upstream,
        [q, k, v],
        rounds=rounds,
        device=device,
    )
    return {"length": length, "documents": documents, "timed": found}


def case(row: Mapping[str, Any]) -> str:
    """One size, in words."""
    kind = "padded" if row["documents"] == 1 else f"{row['documents']} documents"
    return f"{row['length']:,} tokens, {kind}"
