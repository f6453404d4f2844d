"""Whether a run is too small to be worth a rehearsal: more than it can take, by arithmetic alone.

Imports no torch, and reads a file of configuration at most.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anygauge.config.schema import RunFile
from anygauge.models.hub import CONFIG, copy_of

_NUMBER = 4
"""Bytes of a number in the longest type."""
_TRAINED = 24
"""Bytes for each trained number: weight, gradient, its sum, master and two moments, all float32."""
_KEPT_OF_HIDDEN, _KEPT_OF_INNER, _KEPT_OF_SCORES, _KEPT_OF_LOGITS = 24, 6, 4, 4
"""Tensors of these widths that a layer, or the loss, keeps for a token; recomputing keeps less."""
_MORE_IS_TRAINED = frozenset({"groups", "target_parameters", "modules_to_save", "dora"})
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")


def most_bytes(run: RunFile, parts: int) -> int | None:
    """More than a rank of this run can take of its device; None: arithmetic does not tell.

    It does for decoders that state all of their sizes, held whole on each rank.

    Args:
        parts: of the global batch, as `Share.count`.
    """
    fields, model, adapter = _configuration(run), run.model, run.adapter
    if fields is None or model.new_tokens or model.new_special_tokens:
        return None
    if any(name.endswith("_config") for name in fields):
        return None  # a model of several, such as one that sees
    if any(not _largest(fields.get(name)) for name in _SIZES):
        return None
    hidden, inner, layers, words = (_largest(fields[name]) for name in _SIZES)
    inner = max(inner, *(_largest(v) for k, v in fields.items() if "intermediate" in k))
    heads = max(1, _largest(fields.get("num_attention_heads")))
    wide = max(hidden, heads * _largest(fields.get("head_dim")))
    experts = max([1, *(_largest(v) for k, v in fields.items() if "expert" in k)])
    layer = 4 * hidden * wide + 4 * hidden * inner * (experts + 1)
    whole = layers * layer + 2 * words * hidden
    trained = whole
    if adapter is not None and not (adapter.given & _MORE_IS_TRAINED or adapter.start_from):
        ends = 4 * (hidden + wide) + 4 * (hidden + inner) * (experts + 1)
        trained = min(whole, adapter.r * (layers * ends + 2 * (hidden + words)))
    length = run.data.max_length
    rows = run.train.sequences_at_once(parts)
    kept = _KEPT_OF_HIDDEN * wide + _KEPT_OF_INNER * inner * (experts + 1)
    kept += _KEPT_OF_SCORES * heads * length
    tokens = rows * length * (layers * kept + _KEPT_OF_LOGITS * words)
    return _NUMBER * (whole + tokens) + _TRAINED * trained


def _configuration(run: RunFile) -> Mapping[str, Any] | None:
    """The model's; None where it is not on this machine, or cannot be read."""
    if run.model.config is not None:
        return run.model.config
    assert run.model.name is not None
    folder = Path(run.model.name)
    found = folder if folder.is_dir() else copy_of(run.model.name, run.model.revision)
    if found is None:
        return None
    try:
        fields = json.loads((found / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # the checks say what is wrong
    return fields if isinstance(fields, dict) else None


def _largest(value: Any) -> int:
    """A size, or the largest of a list of them; 0 for what is none."""
    if isinstance(value, list | tuple):
        return max(map(_largest, value), default=0)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
