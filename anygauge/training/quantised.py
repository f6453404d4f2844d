"""What a quantised base needs of a run and of a device, checked before ranks start; no torch."""

from __future__ import annotations

import importlib.util

from anygauge.config.schema import RunFile
from anygauge.interface import Backend, RunFileError, UnsupportedError
from anygauge.models.quantisation import quantisation

CAPABILITY = {"nf4": "quantised_base", "int8": "quantised_base_int8"}

MISSING = (
    "model.quantise needs the package bitsandbytes, which is not installed; "
    "pip install 'anygauge[8bit]', or leave it out"
)


def check_quantised(run: RunFile, backend: Backend, *, ranks_run_here: bool) -> None:
    """Refuse what is known to fail.

    Args:
        ranks_run_here: packages of this machine are those of the ranks.

    Raises:
        RunFileError: a section does not go with it, or the package is missing.
        UnsupportedError: quotes the backend's reason, or peft's limit.
    """
    asked = quantisation(run.model)
    if asked is None:
        return
    if run.adapter is None:
        raise RunFileError(
            f"model.quantise: {asked.type}: quantised weights cannot be trained, and the run has "
            "no adapter. Add an adapter section, or leave model.quantise out to train all weights"
        )
    if run.adapter.dora and asked.type == "int8":
        raise UnsupportedError(
            "adapter.dora: peft cannot load a DoRA adapter onto bitsandbytes' 8-bit layers, so you "
            "could not use the result. Use model.quantise: nf4, or leave dora out"
        )
    support = backend.support(CAPABILITY[asked.type])
    if not support:
        raise UnsupportedError(
            f"model.quantise: {asked.type}: backend {backend.name!r} lacks "
            f"{CAPABILITY[asked.type]!r}: {support}. Leave it out"
        )
    if backend.graph.compiler is not None:
        raise UnsupportedError(
            f"model.quantise: backend {backend.name!r} compiles layers, which was not tested with "
            "bitsandbytes' layers. Leave it out"
        )
    if ranks_run_here and importlib.util.find_spec("bitsandbytes") is None:
        raise RunFileError(MISSING)
