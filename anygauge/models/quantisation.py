"""How a base is quantised, as a run file asks for it, and what is refused. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

from anygauge.config.schema import ModelSection
from anygauge.config.sections import QuantiseSection
from anygauge.interface import ModelError
from anygauge.models.files import read_fields
from anygauge.util.files import write_text

RECORD_FILE = "quantised_base.json"
"""In an adapter's folder: how the base was quantised that it was trained on."""


def quantisation(section: ModelSection) -> QuantiseSection | None:
    """The section `model.quantise`, written out; None where the base is not quantised."""
    chosen = section.quantise
    return QuantiseSection(type=chosen) if isinstance(chosen, str) else chosen


def in_words(section: QuantiseSection) -> str:
    """For records and cards."""
    double = ", double quantisation" if section.double_quantisation else ""
    return f"{section.type}{double}, by bitsandbytes"


def write_record(folder: Path, section: QuantiseSection, dtype: str) -> None:
    """Tell beside an adapter how its base was quantised, and from numbers of which type."""
    fields = {**section.model_dump(), "provider": "bitsandbytes", "quantised_from": dtype}
    write_text(folder / RECORD_FILE, json.dumps(fields, indent=2, sort_keys=True) + "\n")


def read_record(adapter: Path | None) -> tuple[QuantiseSection, str] | None:
    """What `write_record` wrote; None where the adapter's base was not quantised.

    Raises:
        ModelError: the file is not one of these.
    """
    path = None if adapter is None else adapter / RECORD_FILE
    if path is None or not path.is_file():
        return None
    try:
        fields = read_fields(path)
        dtype = str(fields.pop("quantised_from"))
        fields.pop("provider")
        return QuantiseSection(**fields), dtype
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path} does not say how the base was quantised ({str(error).splitlines()[0]}); "
            "restore it from the run's adapter folder"
        ) from None
