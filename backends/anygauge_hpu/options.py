"""The run file's ``backend_options`` for Gaudi: names, types, and what does not go together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from anygauge.interface import RunFileError
from anygauge_hpu.mode import Mode


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option.

    Attributes:
        valid: what it may be, in words.
        accepts: whether a value is valid.
        lazy_only: it means nothing where no graph is accumulated.
    """

    meaning: str
    valid: str
    accepts: Callable[[Any], bool]
    lazy_only: bool = False


def _one_of(*values: str) -> dict[str, Any]:
    return {"valid": ", ".join(values), "accepts": lambda value: value in values}


_SWITCH: dict[str, Any] = {
    "valid": "true, false",
    "accepts": lambda value: isinstance(value, bool),
}
_COUNT: dict[str, Any] = {
    "valid": "a whole number of at least 1",
    "accepts": lambda value: isinstance(value, int) and not isinstance(value, bool) and value > 0,
}

OPTIONS: Mapping[str, Option] = {
    "mode": Option(
        meaning="how operations are executed; by default, as the installed release does",
        **_one_of(*(mode.value for mode in Mode)),
    ),
    "graph_limit": Option(
        meaning="the most operations in one graph; limits the memory of lazy mode",
        lazy_only=True,
        **_COUNT,
    ),
    "graph_limit_sync": Option(
        meaning="wait for a graph that the limit has cut", lazy_only=True, **_SWITCH
    ),
    "split_forward_backward": Option(
        meaning="also cut the graph between forward and backward, so that the host traces one "
        "while the device runs the other; sync_on_release leaves nothing of that",
        lazy_only=True,
        **_SWITCH,
    ),
    "sync_on_release": Option(
        meaning="the host waits for the device before ZeRO-3 releases a gathered weight, as "
        "Intel's DeepSpeed did before release 1.16 (default false)",
        **_SWITCH,
    ),
    "recipe_cache": Option(
        meaning="folder in which compiled graphs are kept between runs",
        valid="an absolute path without commas",
        accepts=lambda value: isinstance(value, str) and value[:1] == "/" and "," not in value,
    ),
    "recipe_cache_mb": Option(meaning="the most megabytes of that folder (default 1024)", **_COUNT),
    "buckets": Option(
        meaning="number of distinct lengths that batches are padded to (default 8)", **_COUNT
    ),
    "warm_up": Option(
        meaning="compute each distinct length of the run in the first two steps of a process, so "
        "that no later step waits for graphs to be compiled (default true)",
        **_SWITCH,
    ),
    "attention": Option(
        meaning="fused: one kernel with a softmax of its own; softmax: products and a softmax "
        "(default fused)",
        **_one_of("fused", "softmax"),
    ),
    "softmax": Option(
        meaning="type in which attention's softmax is computed, with attention: softmax (default "
        "bfloat16)",
        **_one_of("bfloat16", "float32"),
    ),
    "fast_softmax": Option(
        meaning="the optimised softmax of fused attention, as optimum-habana's "
        "flash_attention_fast_softmax (default false)",
        **_SWITCH,
    ),
    "attention_recompute": Option(
        meaning="fused attention keeps no scores for backward and computes them again there, as "
        "optimum-habana's flash_attention_recompute (default false)",
        **_SWITCH,
    ),
    "rms_norm": Option(
        meaning="fused: one kernel; reference: the model's own (default fused)",
        **_one_of("fused", "reference"),
    ),
    "rope": Option(
        meaning="rotary position embeddings; fused: one kernel, as optimum-habana has it; "
        "reference: the model's own (default fused)",
        **_one_of("fused", "reference"),
    ),
    "optimum_habana": Option(
        meaning="let optimum-habana adapt transformers' models before one is built (default false)",
        **_SWITCH,
    ),
}


def check_options(options: Mapping[str, Any], mode: Mode) -> None:
    """Check every value.

    Raises:
        RunFileError: a value is not valid, or means nothing with another one.
    """
    for name, value in options.items():
        option = OPTIONS[name]
        if not option.accepts(value):
            raise RunFileError(
                f"backend_options.{name}: {value!r} is not valid; valid: {option.valid}"
            )
        if option.lazy_only and mode is not Mode.LAZY and value is not False:
            raise RunFileError(
                f"backend_options.{name}: it acts on accumulated graphs, and {mode} mode "
                "accumulates none. Remove it, or set backend_options.mode: lazy"
            )
    if options.get("graph_limit_sync") and "graph_limit" not in options:
        raise RunFileError(
            "backend_options.graph_limit_sync: there is no limit to act on; set "
            "backend_options.graph_limit, too"
        )
    if "recipe_cache_mb" in options and "recipe_cache" not in options:
        raise RunFileError(
            "backend_options.recipe_cache_mb: there is no cache; set backend_options.recipe_cache"
        )
    if "softmax" in options and options.get("attention", "fused") == "fused":
        raise RunFileError(
            "backend_options.softmax: fused attention has a softmax of its own, which this does "
            "not reach; set backend_options.attention: softmax, or remove it"
        )
    for name in ("fast_softmax", "attention_recompute"):
        if options.get(name) and (
            options.get("attention", "fused") != "fused" or options.get("optimum_habana")
        ):
            raise RunFileError(
                f"backend_options.{name}: it is a property of fused attention, which this run does "
                f"not use; set backend_options.attention: fused, or remove {name}"
            )
    if options.get("optimum_habana") and ({"attention", "rms_norm", "rope"} & set(options)):
        raise RunFileError(
            "backend_options.optimum_habana: its models bring their own attention, norms and "
            "rotary embeddings; remove attention, rms_norm and rope, or optimum_habana"
        )
