"""Weights of few bits: how a run file has a base quantized, and the formats that publishers use.

Imports no torch but for what reads a publisher's format.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from anygauge.config.schema import ModelSection
from anygauge.config.sections import QuantizeSection
from anygauge.interface import ModelError, UnsupportedError
from anygauge.models.model_files import read_fields
from anygauge.util.files import write_text
from anygauge.util.text import first_line

RECORD_FILE = "quantized_base.json"
"""In an adapter's folder: how the base was quantized that it was trained on."""


def quantization(section: ModelSection) -> QuantizeSection | None:
    """The section `model.quantize`, written out; None where the base is not quantized."""
    chosen = section.quantize
    return QuantizeSection(type=chosen) if isinstance(chosen, str) else chosen


def in_words(section: QuantizeSection) -> str:
    """Describe a quantization for records and cards."""
    double = ", double quantization" if section.double_quantization else ""
    return f"{section.type}{double}, by bitsandbytes"


def write_record(folder: Path, section: QuantizeSection, dtype: str) -> None:
    """Tell beside an adapter how its base was quantized, and from numbers of which type."""
    fields = {**section.model_dump(), "provider": "bitsandbytes", "quantized_from": dtype}
    write_text(folder / RECORD_FILE, json.dumps(fields, indent=2, sort_keys=True) + "\n")


def read_record(adapter: Path | None) -> tuple[QuantizeSection, str] | None:
    """What `write_record` wrote; None where the adapter's base was not quantized.

    Raises:
        ModelError: the file is not one of these.
    """
    path = None if adapter is None else adapter / RECORD_FILE
    if path is None or not path.is_file():
        return None
    try:
        fields = read_fields(path)
        dtype = str(fields.pop("quantized_from"))
        fields.pop("provider")
        return QuantizeSection(**fields), dtype
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path} does not say how the base was quantized ({first_line(error)}); "
            "restore it from the run's adapter folder"
        ) from None


def stored_format(config: Any) -> dict[str, Any] | None:
    """Read the format of the weights from a configuration; None for plain ones."""
    fields = getattr(config, "quantization_config", None)
    if fields is None:
        return None
    return dict(fields if isinstance(fields, dict) else fields.to_dict())


READABLE = ("mxfp4", "fp8", "mxfp8")
"""Formats that transformers' operations turn into plain numbers on any host."""


def refuse_format(config: Any, *, quantize: bool = False) -> None:
    """Refuse weights in a format that is not read here. Imports no torch.

    Args:
        quantize: they are to be quantized while they are read.

    Raises:
        UnsupportedError: names the format, and what to do.
    """
    format_ = stored_format(config)
    if format_ is None:
        return
    marks = ("load_in_4bit", "load_in_8bit")
    method = str(format_.get("quant_method") or next(filter(format_.get, marks), "unknown"))
    stored = (
        f"model.name: its weights are stored in the format {method!r} (quantization_config in its "
        "config.json)"
    )
    if method in READABLE and quantize:
        raise UnsupportedError(
            f"model.quantize: {stored}; anygauge converts them to plain numbers while it reads "
            "them, and does not quantize them again. Leave model.quantize out, or give the model "
            "in 16 bits"
        )
    installed = metadata.version("transformers")
    old = Version(installed) < Version("5")
    if method in READABLE and not old:
        return
    readable = f"of such formats, anygauge reads only {', '.join(READABLE)}"
    if old:
        readable += f", and these with transformers 5 or newer; {installed} is installed"
    raise UnsupportedError(
        f"{stored}; {readable}. Use the model that these weights were made from, which the model "
        "card names. To hold that model's weights in few bits, also set model.quantize: nf4 or int8"
    )


def plain_weights(config: Any, *, quantize: bool = False) -> dict[str, Any]:
    """Arguments of transformers' ``from_pretrained``, so that weights become plain; see
    `refuse_format`."""
    format_ = stored_format(config)
    if format_ is None:
        return {}
    refuse_format(config, quantize=quantize)
    from transformers.quantizers.auto import AutoQuantizationConfig

    chosen = AutoQuantizationConfig.from_dict(format_)
    chosen.dequantize = True
    return {"quantization_config": chosen}


def dequantizer(config: Any, *, quantize: bool = False) -> Any:
    """transformers' own reader of a format, set to give plain numbers; None for plain weights.

    Takes the format out of the configuration: what is trained and saved is plain. See
    `refuse_format`.
    """
    given = plain_weights(config, quantize=quantize)
    if not given:
        return None
    from transformers.quantizers.auto import AutoHfQuantizer

    del config.quantization_config
    return AutoHfQuantizer.from_config(given["quantization_config"], pre_quantized=True)
