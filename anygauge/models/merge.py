"""Folding an adapter into its base, and proving that the result is what the two were together."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.config.schema import ModelSection
from anygauge.interface import HOST_DEVICE, ModelError, ResultError
from anygauge.models import card
from anygauge.models.conversion import in_published_form
from anygauge.models.export import atomic_folder, save_model
from anygauge.models.generate import load_for_inference, quantization_of
from anygauge.models.model_files import WeightFiles, not_finite
from anygauge.models.quantization import in_words
from anygauge.models.result_files import ResultFiles
from anygauge.models.source import local_folder
from anygauge.models.verify import TOLERANCE as VERIFIED
from anygauge.models.verify import probe_tokens, relative_difference
from anygauge.util.files import write_text

TOLERANCE = 1e-3
"""Largest relative difference of float32 logits between base with adapter and merged model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeReport:
    """How far logits are from another's on a probe: see `relative_difference`.

    Attributes:
        from_adapter: the merged model in float32 from base with adapter.
        rounding: the merged model as it is stored from base with adapter.
        from_base: the merged model as it is stored from the base.
        untied: whether input and output embedding, one tensor before, are now two.
        trained_on: the base that the adapter names, where that is another than the one given.
        quantized: how the base was, whose dequantized weights the adapter was merged into; empty:
            it was not.
        from_codes: the merged model in float32 from the adapter on the quantized base, as it was
            trained; None where the base was not quantized.
    """

    from_adapter: float
    rounding: float
    from_base: float
    untied: bool
    trained_on: str | None
    quantized: str = ""
    from_codes: float | None = None


def merge(section: ModelSection, adapter: Path, output: Path, files: ResultFiles) -> MergeReport:
    """Write the merged model to `output`, in the base's own type, with a model card.

    The sum is made in float32, so that an adapter's small update is not rounded away twice.

    Raises:
        ResultError: the merged model differs from base with adapter, or equals the base, in
            float32 or once rounded to the base's type; nothing is written then.
    """
    stored = stored_dtype(section)
    asked, quantized_from = quantization_of(section, adapter, stored)
    as_trained = None if asked is None else _on_codes(section, adapter, quantized_from)
    model = load_for_inference(
        section,
        adapter=adapter,
        device=torch.device(HOST_DEVICE),
        dtype=torch.float32,
        attention="eager",
        dequantized=True,
    )
    if (bad := not_finite(model.get_base_model().named_parameters())) is not None:
        raise ModelError(
            f"{section.name}: tensor {bad.replace('.base_layer', '')!r} of the base holds values "
            "that are not numbers, so nothing was merged; fetch the base again"
        )
    named = model.active_peft_config.base_model_name_or_path
    probe = probe_tokens(model.config.get_text_config().vocab_size)
    with torch.no_grad():
        together = model(input_ids=probe, use_cache=False).logits
        with model.disable_adapter():
            base = model(input_ids=probe, use_cache=False).logits
        untied = untie(model)
        with warnings.catch_warnings():
            # peft warns of tied embeddings and of their untying, which happened just now.
            warnings.filterwarnings("ignore", message="(Model with `tie_word|Input and output emb)")
            merged_model = model.merge_and_unload(safe_merge=True)
        merged = merged_model(input_ids=probe, use_cache=False).logits
        for parameter in merged_model.parameters():
            parameter.data = parameter.data.to(stored).float()
        rounded = merged_model(input_ids=probe, use_cache=False).logits
    report = MergeReport(
        from_adapter=relative_difference(merged, together),
        rounding=relative_difference(rounded, together),
        from_base=relative_difference(rounded, base),
        untied=untied,
        trained_on=named if named not in (None, section.name) else None,
        quantized="" if asked is None else in_words(asked),
        from_codes=None if as_trained is None else relative_difference(merged, as_trained),
    )
    _check_codes(report, adapter, quantized_from)
    _check_merge(report, relative_difference(merged, base), adapter, stored)
    with atomic_folder(output) as part:
        save_model(
            in_published_form(
                merged_model,
                dict(merged_model.named_parameters()),
                WeightFiles(local_folder(section)),
                stored,
            ),
            merged_model.config,
            part,
            dtype=stored,
            files=files,
        )
        checks = {
            "merged, in float32, from base with adapter": f"{report.from_adapter:.1e}",
            f"merged, in {_type_name(stored)}, from base with adapter": f"{report.rounding:.1e}",
            f"merged, in {_type_name(stored)}, from the base": f"{report.from_base:.1e}",
        }
        if report.from_codes is not None:
            checks[f"merged, from the adapter on codes ({report.quantized})"] = (
                f"{report.from_codes:.1e}"
            )
        write_text(part / card.FILE, card.merged_card(output.name, section, adapter, checks))
    return report


def _on_codes(section: ModelSection, adapter: Path, dtype: torch.dtype) -> Tensor:
    """Logits of the probe as the adapter was trained: (1, 16, V), on the base of codes."""
    host = torch.device(HOST_DEVICE)
    model = load_for_inference(
        section, adapter=adapter, device=host, dtype=dtype, attention="eager"
    )
    with torch.no_grad():
        logits: Tensor = model(input_ids=probe_tokens(model.config.vocab_size)).logits
    return logits


CODES_TOLERANCE = 5e-2
"""bitsandbytes' int8 rounds inputs to 8 bits as well, where the merged model has them whole."""


def _check_codes(report: MergeReport, adapter: Path, dtype: torch.dtype) -> None:
    if report.from_codes is None:
        return
    allowed = VERIFIED[dtype] if report.quantized.startswith("nf4") else CODES_TOLERANCE
    if not report.from_codes <= allowed:
        raise ResultError(
            f"merging {adapter} into the dequantized base ({report.quantized}) went wrong: logits "
            f"differ by {report.from_codes:.1e} of their norm from the adapter on the quantized "
            f"base, more than {allowed:.0e}; nothing was written"
        )


def _check_merge(report: MergeReport, effect: float, adapter: Path, stored: torch.dtype) -> None:
    if not report.from_adapter <= TOLERANCE:
        raise ResultError(
            f"merging {adapter} went wrong: logits differ by {report.from_adapter:.2e} of their "
            f"norm from base with adapter, more than {TOLERANCE:.0e}; nothing was written"
        )
    if effect == 0.0:
        raise ResultError(
            f"the adapter in {adapter} changes nothing: merged and base give equal logits; "
            "nothing was written. Was it trained?"
        )
    if report.rounding > effect / 2:
        raise ResultError(
            f"the adapter in {adapter} would be lost when the merged weights are rounded to the "
            f"base's {_type_name(stored)}: it changes the logits by {effect:.1e} of their norm, "
            f"and the rounding by {report.rounding:.1e}; nothing was written. Use it without "
            "merging, or train it for longer"
        )


def untie(model: Any) -> bool:
    """Give the output layer a weight of its own if it shares one that the adapter changes.

    Merged into a shared tensor, an update of the embedding would change the output layer too.

    Returns:
        Whether it did.
    """
    whole = model.get_base_model()
    embedding, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    if head is None or not (hasattr(embedding, "base_layer") or hasattr(head, "base_layer")):
        return False
    source = getattr(embedding, "base_layer", embedding)
    target = getattr(head, "base_layer", head)
    if target.weight is not source.weight:
        return False
    target.weight = nn.Parameter(source.weight.detach().clone(), requires_grad=False)
    whole.config.tie_word_embeddings = False
    whole.config.get_text_config().tie_word_embeddings = False
    return True


def stored_dtype(section: ModelSection) -> torch.dtype:
    """Return the type that the base's weights have on disk, by its configuration."""
    from anygauge.models.factory import dtype_name
    from anygauge.models.source import load_config

    dtype = getattr(load_config(section), dtype_name(), None) or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
