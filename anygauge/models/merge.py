"""Folding an adapter into its base, and proving that the result is what the two were together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from anygauge.config.schema import ModelSection
from anygauge.interface import HOST_DEVICE, ModelError
from anygauge.models.export import save_model
from anygauge.models.generate import load_for_inference

PROBE_TOKENS = 32
TOLERANCE = 1e-3
"""Largest difference of float32 logits between base with adapter and merged model, relative to
the largest logit."""


@dataclass(frozen=True, slots=True)
class MergeReport:
    """How far the merged model's logits are from those of base with adapter, and from the base's.

    Both are the largest absolute difference over a fixed probe, divided by the largest logit.
    """

    from_adapter: float
    from_base: float


def merge(section: ModelSection, adapter: Path, output: Path, tokenizer: Any) -> MergeReport:
    """Write the merged model to `output`, in the base's own type.

    The sum is made in float32, so that an adapter's small update is not rounded away twice.

    Raises:
        ModelError: the merged model differs from base with adapter, or equals the base; nothing
            is written then.
    """
    model = load_for_inference(
        section,
        adapter=adapter,
        device=torch.device(HOST_DEVICE),
        dtype=torch.float32,
        attention="eager",
    )
    vocabulary = model.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    probe = torch.randint(0, vocabulary, (1, PROBE_TOKENS), generator=generator)
    with torch.no_grad():
        together = model(input_ids=probe).logits
        with model.disable_adapter():
            base = model(input_ids=probe).logits
        merged_model = model.merge_and_unload(safe_merge=True)
        merged = merged_model(input_ids=probe).logits
    largest = together.abs().max().item()
    report = MergeReport(
        from_adapter=(merged - together).abs().max().item() / largest,
        from_base=(merged - base).abs().max().item() / largest,
    )
    if not report.from_adapter <= TOLERANCE:
        raise ModelError(
            f"merging {adapter} went wrong: logits differ by {report.from_adapter:.2e} of the "
            f"largest from base with adapter, more than {TOLERANCE:.0e}; nothing was written"
        )
    if report.from_base == 0.0:
        raise ModelError(
            f"the adapter in {adapter} changes nothing: merged and base give equal logits; "
            "nothing was written. Was it trained?"
        )
    stored = stored_dtype(section)
    save_model(
        dict(merged_model.named_parameters()),
        merged_model.config,
        tokenizer,
        output,
        dtype=stored,
        generation=merged_model.generation_config,
    )
    return report


def stored_dtype(section: ModelSection) -> torch.dtype:
    """The type that the base's weights have on disk, as its configuration says."""
    from anygauge.models.factory import load_config

    dtype = getattr(load_config(section), "dtype", None) or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype
