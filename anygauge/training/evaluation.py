"""Evaluations: the sources of their rows, the end of a run that they decide, a result's logits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import chain, count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from torch import Tensor

from anygauge.config.paths import names_address
from anygauge.config.schema import DataSection
from anygauge.config.sections import EarlyStoppingSection
from anygauge.data import EvaluationBatches, Layout, MicroBatch, TokenizedRows, Tokens
from anygauge.interface import Engine
from anygauge.models.verify import probe_tokens
from anygauge.training.to_device import ToDevice

EVAL = "eval"
"""The name of an evaluation of all rows; that of one source is ``eval/NAME``."""

EvaluationSources = Mapping[str, tuple[Iterable[MicroBatch], int]]
"""Name of a source -> this rank's batches, and what the loss over all ranks is divided by."""


def evaluation_sources(rows: TokenizedRows, data: DataSection, layout: Layout) -> EvaluationSources:
    """The rows to evaluate on, by source; one of which no row is held out is left out."""
    names: list[str] = []
    for source in data.eval_sources or data.train_sources:
        path = urlsplit(source.path).path if names_address(source.path) else source.path
        stem = Path(path).stem
        numbered = chain([stem], (f"{stem}-{number}" for number in count(2)))
        names.append(next(name for name in numbered if name not in names))
    found = {
        name: EvaluationBatches(each, layout)
        for name, each in zip(names, rows.by_source(), strict=True)
        if len(each)
    }
    return {name: (batches, batches.normalizer) for name, batches in found.items()}


def early_stop(
    evaluations: Iterable[Mapping[str, Any]], rule: EarlyStoppingSection | None
) -> str | None:
    """Why a run is to end after its evaluations so far, the same on every rank; None: it is not.

    The one before the first step, of the base, does not count; those before a resume do.
    """
    lowest, at, waited = math.inf, 0, 0
    for record in evaluations:
        if rule is None or record["name"] != EVAL or not record["step"]:
            continue
        if record["eval_loss"] < lowest - rule.min_delta:
            lowest, at, waited = record["eval_loss"], record["step"], 0
        else:
            waited += 1
    if rule is None or waited < rule.patience:
        return None
    many = f"{waited} evaluations" if waited > 1 else "the evaluation"
    return f"early stopping: in {many} after step {at} the loss was not lower than {lowest:.4f}" + (
        f" by more than {rule.min_delta:g}" if rule.min_delta else ""
    )


def probe_logits(
    engine: Engine, vocabulary: int | None, layout: Layout, to_device: ToDevice
) -> Tensor | None:
    """The model's logits of the probe, float32 on the host; every rank calls it.

    None without a vocabulary, and on ranks other than 0 where the engine says so.
    """
    if vocabulary is None:
        return None
    ids = probe_tokens(vocabulary)
    document = Tokens(ids[0].numpy(), np.zeros(ids.shape[1], dtype=np.bool_))
    logits = engine.logits(to_device(layout.batch([[document]], ids.shape[1])))
    # A rank may have been given sequences that are a little longer.
    return None if logits is None else logits[:, : ids.shape[1]]
