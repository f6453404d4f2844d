"""A model for answering: from a folder or hub name, with or without an adapter, on one device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from anygauge.config.schema import ModelSection
from anygauge.config.sections import QuantizeSection
from anygauge.interface import HOST_DEVICE, ModelError
from anygauge.models.adapter import load_adapter
from anygauge.models.factory import dtype_name
from anygauge.models.model_files import NOT_PLAIN, is_pickle_refused
from anygauge.models.quantization import plain_weights, quantization, read_record
from anygauge.models.quantized import dequantize, keep_scales, transformers_config
from anygauge.models.result_files import GENERATION_CONFIG, fields_in
from anygauge.models.source import load_config, local_folder
from anygauge.models.vocabulary import fit_adapter
from anygauge.models.warm_start import refuse_no_adapter
from anygauge.util.text import first_line


def load_for_inference(
    section: ModelSection,
    *,
    adapter: Path | None,
    device: torch.device,
    dtype: torch.dtype,
    attention: str | None,
    dequantized: bool = False,
) -> Any:
    """The whole model on one device, in evaluation mode.

    A base that the section, or what lies beside the adapter, says was quantized is quantized again.

    Args:
        attention: the model library's name of a kernel; None: its own choice.
        dequantized: such a base has plain linear layers in `dtype`, with the values of its codes.

    Raises:
        ModelError: weights or adapter cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    if section.name is None:
        raise ModelError(
            "a model made from model.config has random weights, which are not kept; give the "
            "folder of a trained model"
        )
    quantized, quantized_from = quantization_of(section, adapter, dtype)
    config = load_config(section)
    # Put where it belongs at once: a model of codes is not moved.
    where = torch.device(HOST_DEVICE) if dequantized else device
    options = plain_weights(config, quantize=quantized is not None)
    if quantized is not None:
        options = {
            "quantization_config": transformers_config(quantized, quantized_from),
            "device_map": {"": where},
        }
    folder = local_folder(section)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            **{dtype_name(): quantized_from},
            attn_implementation=attention,
            trust_remote_code=section.trust_remote_code,
            **options,
        )
    except Exception as error:
        if is_pickle_refused(error):
            raise ModelError(f"{section.name!r}: its file of weights {NOT_PLAIN}") from None
        raise ModelError(
            f"no model could be loaded from {section.name!r}: {first_line(error)}"
        ) from error
    if quantized is not None:
        keep_scales(model)
        if dequantized:
            model = dequantize(model).to(dtype)
    if adapter is not None:
        refuse_no_adapter(adapter)
        fit_adapter(model, adapter)
        if ends := fields_in(adapter / GENERATION_CONFIG).get("eos_token_id"):
            model.generation_config.eos_token_id = ends
        model = load_adapter(model, adapter)
    if quantized is None or dequantized:
        return model.to(device).eval()
    # peft reads an adapter onto the host.
    for parameter in model.parameters():
        if parameter.device != device:
            parameter.data = parameter.data.to(device)
    return model.eval()


def quantization_of(
    section: ModelSection, adapter: Path | None, dtype: torch.dtype
) -> tuple[QuantizeSection | None, torch.dtype]:
    """Return how to quantize the base, and from which type: by the adapter's record, if any.

    Raises:
        ModelError: the record cannot be read.
    """
    record = read_record(adapter)
    if record is None:
        return quantization(section), dtype
    named = getattr(torch, record[1], None)
    if not isinstance(named, torch.dtype):
        raise ModelError(
            f"the adapter's record names the type {record[1]!r}, which torch does not have"
        )
    return record[0], named


def generate(
    model: Any,
    tokenizer: Any,
    prompt: list[int],
    *,
    max_new_tokens: int,
    temperature: float,
    stop_ids: Sequence[int] = (),
    stream: bool = True,
) -> str:
    """The model's continuation of a prompt.

    Args:
        prompt: token numbers, as training saw them before an answer.
        temperature: 0 always takes the likeliest token.
        stop_ids: tokens that end an answer, in addition to those that the model or tokenizer names.
        stream: print the answer while it is made.
    """
    from transformers import TextStreamer

    # A model may name several tokens that end an answer, the tokenizer knows one.
    ends = model.generation_config.eos_token_id or tokenizer.eos_token_id
    ends = {ends} if isinstance(ends, int) else {*ends}
    sampling = {"temperature": temperature} if temperature else {}
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    ids = torch.tensor([prompt], device=model.device)
    with torch.no_grad():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=sorted({*ends, *stop_ids}),
            streamer=streamer if stream else None,
            do_sample=temperature > 0,
            **sampling,
        )
    return str(tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True))
