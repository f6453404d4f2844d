"""Announces the optimizers that come with anygauge, as any plugin announces its own. No torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from anygauge.interface import (
    API_VERSION,
    OptimizerSpec,
    Options,
    hookimpl,
    installed_version,
    major_minor,
)
from anygauge.util.section import Fraction, PositiveNumber

EIGHT_BIT = "adamw_8bit"
"""An optimizer, and the capability that it needs."""
PAGED_MEMORY = "paged_memory"
"""The capability that ``paged`` needs."""

Betas = Annotated[tuple[Fraction, Fraction], Strict(False)]  # JSON has lists
Momentum = Annotated[float, Field(ge=0, lt=1)]
_BETAS = "Decay of the moments."

_NOT_HIDDEN = re.compile(r"embed|(^|\.)(wte|wpe|lm_head)(\.|$)")
"""Names of embeddings and output layers in transformers' causal models, and factors on them."""


class AdamOptions(Options):
    """Of all that keep Adam's moments."""

    betas: Betas = Field((0.9, 0.999), description=_BETAS)
    eps: PositiveNumber = Field(1e-8, description="Added to the denominator.")


class AdamWOptions(AdamOptions):
    """Of AdamW, in both precisions."""

    paged: bool = Field(
        False,
        description="Keep the moments in memory that the driver moves to the host while the device "
        "has no room.",
    )


class LionOptions(Options):
    """Of Lion."""

    betas: Betas = Field((0.9, 0.99), description=_BETAS)


class SGDOptions(Options):
    """Of SGD."""

    momentum: Momentum = Field(0.9, description="Decay of the sum of gradients; 0: none is kept.")


class MuonOptions(AdamOptions):
    """Of Muon, and of AdamW for what is not a hidden layer's matrix."""

    momentum: Momentum = Field(0.95, description="Decay of a matrix's mean gradient.")
    nesterov: bool = Field(True, description="Nesterov's form of the momentum.")
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = Field(
        5, description="Newton-Schulz iterations that make an update orthogonal."
    )
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw",
        description="match_rms_adamw: updates as large as AdamW's, so lr is as for adamw "
        "(Moonshot); original: Keller Jordan's scale.",
    )


def takes_muon(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon updates a parameter: a matrix that is not an embedding or an output layer."""
    return len(shape) == 2 and not _NOT_HIDDEN.search(name)


def _needs(options: Any) -> Mapping[str, tuple[str, str]]:
    found = {PAGED_MEMORY: ("train.optimizer.paged", "Leave it out")} if options.paged else {}
    if options.name == EIGHT_BIT:
        instead = "Use adamw, which keeps four times as many bytes, or lion"
        found[EIGHT_BIT] = (f"train.optimizer.name: {EIGHT_BIT}", instead)
    return found


def _without_bitsandbytes(options: Any) -> str | None:
    few_bits = options.name == EIGHT_BIT
    if not (few_bits or options.paged) or importlib.util.find_spec("bitsandbytes") is not None:
        return None
    install = "the package bitsandbytes is not installed; pip install 'anygauge[8bit]'"
    return f"{install}, or {'use adamw' if few_bits else 'leave paged out'}"


def _without_muon(options: Any) -> str | None:
    installed = installed_version("torch")
    if installed is None or (major_minor(installed) or (0, 0)) >= (2, 9):
        return None
    return f"torch {installed} has no torch.optim.Muon; install torch 2.9 or later, or use adamw"


def _optimizer(name: str, summary: str, options: str = "", **more: Any) -> OptimizerSpec:
    return OptimizerSpec(
        name=name,
        factory=f"{__name__}.algorithms:{name}",
        api_version=API_VERSION,
        summary=summary,
        options=options and f"{__name__}:{options}Options",
        **more,
    )


@hookimpl
def anygauge_provide_optimizers() -> Iterable[OptimizerSpec]:
    """Announce the optimizers of this package."""
    bnb: dict[str, Any] = {"needs": _needs, "missing": _without_bitsandbytes}
    codes = {**bnb, "state_bytes": 2 + 2 * 4 / 256}  # two, and a scale for each block of 256
    muon: dict[str, Any] = {"sees_full_parameters": True, "missing": _without_muon}
    muon["state_bytes"] = lambda options, name, shape: 4.0 if takes_muon(name, shape) else 8.0
    hidden = "Muon for the matrices of hidden layers, AdamW for all else."
    rows = "Adafactor, which keeps a number for each row and column."
    return [
        _optimizer("adamw", "AdamW.", "AdamW", **bnb),
        _optimizer(EIGHT_BIT, "AdamW with 8-bit moments.", "AdamW", **codes),
        _optimizer("adafactor", rows, state_bytes=0.0, sees_full_parameters=True),
        _optimizer("lion", "Lion.", "Lion", state_bytes=4.0),
        _optimizer("muon", hidden, "Muon", **muon),
        _optimizer("sgd", "SGD with momentum.", "SGD", state_bytes=4.0),
    ]
