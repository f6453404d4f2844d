"""A model for answering: from a folder or hub name, with or without an adapter, on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from anygauge.config.schema import ModelSection
from anygauge.interface import ModelError
from anygauge.models.adapter import load_adapter
from anygauge.models.factory import dtype_name
from anygauge.models.files import NOT_PLAIN, is_pickle_refused
from anygauge.models.formats import plain_weights
from anygauge.models.source import load_config, local_folder
from anygauge.models.start import refuse_no_adapter
from anygauge.models.vocabulary import fit_adapter


def load_for_inference(
    section: ModelSection,
    *,
    adapter: Path | None,
    device: torch.device,
    dtype: torch.dtype,
    attention: str,
) -> Any:
    """The whole model on one device, in evaluation mode.

    Raises:
        ModelError: weights or adapter cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    if section.name is None:
        raise ModelError(
            "a model made from model.config has random weights, which are not kept; give the "
            "folder of a trained model"
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            local_folder(section),
            **{dtype_name(): dtype},
            attn_implementation=attention,
            trust_remote_code=section.trust_remote_code,
            **plain_weights(load_config(section)),
        )
    except Exception as error:
        if is_pickle_refused(error):
            raise ModelError(f"{section.name!r}: its file of weights {NOT_PLAIN}") from None
        raise ModelError(
            f"no model could be loaded from {section.name!r}: {str(error).splitlines()[0]}"
        ) from error
    if adapter is not None:
        refuse_no_adapter(adapter)
        fit_adapter(model, adapter)
        model = load_adapter(model, adapter)
    return model.to(device).eval()


def generate(
    model: Any,
    tokenizer: Any,
    prompt: list[int],
    *,
    max_new_tokens: int,
    temperature: float,
    stop_ids: Sequence[int] = (),
    show: Callable[[str], None] | None = None,
) -> str:
    """The model's continuation of a prompt.

    Args:
        prompt: token numbers, as training saw them before an answer.
        temperature: 0 always takes the likeliest token.
        stop_ids: tokens that end an answer, besides those that the model or tokenizer names.
        show: receives the text piece by piece while it is made.
    """
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            assert show is not None
            show(text)

    ids = torch.tensor([prompt], device=model.device)
    sampling = (
        {"do_sample": False}
        if temperature == 0
        else {
            "do_sample": True,
            "temperature": temperature,
        }
    )
    with torch.no_grad():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=sorted({*_named(model, tokenizer), *stop_ids}),
            streamer=Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
            if show
            else None,
            **sampling,
        )
    return str(tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True))


def _named(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end an answer: a model may have several, the tokenizer knows one."""
    named = model.generation_config.eos_token_id or tokenizer.eos_token_id
    return [named] if isinstance(named, int) else list(named)
