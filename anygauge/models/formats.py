"""Formats of few bits in which publishers store weights, and how they become plain numbers."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from packaging.version import Version

from anygauge.interface import UnsupportedError


def stored_format(config: Any) -> dict[str, Any] | None:
    """What a configuration says of the format of its weights; None for plain ones."""
    fields = getattr(config, "quantization_config", None)
    if fields is None:
        return None
    return dict(fields if isinstance(fields, dict) else fields.to_dict())


READABLE = ("mxfp4", "fp8", "mxfp8")
"""Formats that transformers' operations turn into plain numbers on any host."""


def refuse_format(config: Any, *, quantise: bool = False) -> None:
    """Refuse weights in a format that is not read here. Imports no torch.

    Args:
        quantise: they are to be quantised while they are read.

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
    if method in READABLE and quantise:
        raise UnsupportedError(
            f"model.quantise: {stored}; anygauge converts them to plain numbers while it reads "
            "them, and does not quantise them again. Leave model.quantise out, or give the model "
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
        "card names. To hold that model's weights in few bits, also set model.quantise: nf4 or int8"
    )


def plain_weights(config: Any, *, quantise: bool = False) -> dict[str, Any]:
    """Arguments of transformers' ``from_pretrained``, so that weights become plain; see
    `refuse_format`."""
    format_ = stored_format(config)
    if format_ is None:
        return {}
    refuse_format(config, quantise=quantise)
    from transformers.quantizers.auto import AutoQuantizationConfig

    chosen = AutoQuantizationConfig.from_dict(format_)
    chosen.dequantize = True
    return {"quantization_config": chosen}


def dequantiser(config: Any, *, quantise: bool = False) -> Any:
    """transformers' own reader of a format, set to give plain numbers; None for plain weights.

    Takes the format out of the configuration: what is trained and saved is plain. See
    `refuse_format`.
    """
    given = plain_weights(config, quantise=quantise)
    if not given:
        return None
    from transformers.quantizers.auto import AutoHfQuantizer

    del config.quantization_config
    return AutoHfQuantizer.from_config(given["quantization_config"], pre_quantized=True)
