"""Formats of few bits in which publishers store weights, and how they become plain numbers."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from packaging.version import Version

from anygauge.interface import UnsupportedError


def described(config: Any) -> dict[str, Any] | None:
    """What a configuration says of the format of its weights; None for plain ones."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    return dict(found if isinstance(found, dict) else found.to_dict())


SERVED = ("mxfp4", "fp8", "mxfp8")
"""Formats that transformers' operations turn into plain numbers on any host."""


def refuse_format(config: Any, *, quantise: bool = False) -> None:
    """Refuse weights in a format that is not read here. Imports no torch.

    Args:
        quantise: they are to be quantised while they are read.

    Raises:
        UnsupportedError: names the format, and what to do.
    """
    format_ = described(config)
    if format_ is None:
        return
    marks = ("load_in_4bit", "load_in_8bit")
    method = str(format_.get("quant_method") or next(filter(format_.get, marks), "unknown"))
    stored = (
        f"model.name: its weights are stored in the format {method!r} (quantization_config in its "
        "config.json)"
    )
    if method in SERVED and quantise:
        raise UnsupportedError(
            f"model.quantise: {stored}; anygauge converts them to plain numbers while it reads "
            "them, and does not quantise them again. Leave model.quantise out, or give the model "
            "in 16 bits"
        )
    old = Version(metadata.version("transformers")) < Version("5")
    if method in SERVED and not old:
        return
    served = f"of such formats, anygauge reads only {', '.join(SERVED)}"
    if old:
        served += (
            f", and these with transformers 5 or newer; {metadata.version('transformers')} is "
            "installed"
        )
    raise UnsupportedError(
        f"{stored}; {served}. Use the model that these weights were made from, which the model "
        "card names. To hold that model's weights in few bits, also set model.quantise: nf4 or int8"
    )


def plain_weights(config: Any, *, quantise: bool = False) -> dict[str, Any]:
    """The arguments of transformers' ``from_pretrained``, so that the weights become plain.

    Args:
        quantise: see `refuse_format`.

    Raises:
        UnsupportedError: the format is not read here.
    """
    format_ = described(config)
    if format_ is None:
        return {}
    refuse_format(config, quantise=quantise)
    from transformers.quantizers.auto import AutoQuantizationConfig

    chosen = AutoQuantizationConfig.from_dict(format_)
    chosen.dequantize = True
    return {"quantization_config": chosen}


def dequantiser(config: Any, *, quantise: bool = False) -> Any:
    """transformers' own reader of a format, set to give plain numbers; None for plain weights.

    Takes the format out of the configuration: what is trained and saved is plain.

    Args:
        quantise: see `refuse_format`.

    Raises:
        UnsupportedError: the format is not read here.
    """
    given = plain_weights(config, quantise=quantise)
    if not given:
        return None
    from transformers.quantizers.auto import AutoHfQuantizer

    del config.quantization_config
    return AutoHfQuantizer.from_config(given["quantization_config"], pre_quantized=True)
