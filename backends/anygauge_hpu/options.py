"""The run file's ``backend_options`` for Gaudi: names, types, and what does not go together."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from anygauge.interface import Options, RunFileError
from anygauge_hpu.mode import Mode

LAZY_ONLY = ("graph_limit", "graph_limit_sync", "split_forward_backward")
"""Options that mean nothing where no graph is accumulated."""


def _folder(path: str) -> str:
    if path[:1] != "/" or "," in path:
        raise ValueError("an absolute path without commas is needed")
    return path


Count = Annotated[int, Field(ge=1)]


class HpuOptions(Options):
    """Options of the hpu backend."""

    mode: Literal["lazy", "compile", "eager"] | None = Field(
        None, description="how operations are executed; by default, as the installed release does"
    )
    graph_limit: Count | None = Field(
        None, description="the most operations in one graph; limits the memory of lazy mode"
    )
    graph_limit_sync: bool = Field(False, description="wait for a graph that the limit has cut")
    split_forward_backward: bool = Field(
        False,
        description="also cut the graph between forward and backward, so that the host traces one "
        "while the device runs the other; sync_on_release leaves nothing of that",
    )
    sync_on_release: bool = Field(
        False,
        description="the host waits for the device before ZeRO-3 releases a gathered weight, as "
        "Intel's DeepSpeed did before release 1.16",
    )
    recipe_cache: Annotated[str, AfterValidator(_folder)] | None = Field(
        None,
        description="folder in which compiled graphs are kept between runs: an absolute path "
        "without commas",
    )
    recipe_cache_mb: Count = Field(1024, description="the most megabytes of that folder")
    buckets: Count = Field(8, description="number of distinct lengths that batches are padded to")
    warm_up: bool = Field(
        True,
        description="compute each distinct length of the run in the first two steps of a process, "
        "so that no later step waits for graphs to be compiled",
    )
    attention: Literal["fused", "softmax"] = Field(
        "fused",
        description="fused: one kernel with a softmax of its own; softmax: products and a softmax",
    )
    softmax: Literal["bfloat16", "float32"] | None = Field(
        None,
        description="type in which attention's softmax is computed, with attention: softmax "
        "(left out: bfloat16)",
    )
    fast_softmax: bool = Field(
        False,
        description="the optimised softmax of fused attention, as optimum-habana's "
        "flash_attention_fast_softmax",
    )
    attention_recompute: bool = Field(
        False,
        description="fused attention keeps no scores for backward and computes them again there, "
        "as optimum-habana's flash_attention_recompute",
    )
    rms_norm: Literal["fused", "reference"] = Field(
        "fused", description="fused: one kernel; reference: the model's own"
    )
    rope: Literal["fused", "reference"] = Field(
        "fused",
        description="rotary position embeddings; fused: one kernel, as optimum-habana has it; "
        "reference: the model's own",
    )
    optimum_habana: bool = Field(
        False,
        description="let optimum-habana adapt transformers' models before one is built",
    )


def check_options(options: HpuOptions, mode: Mode) -> None:
    """Check what goes together.

    Raises:
        RunFileError: an option means nothing with another one.
    """
    given = options.model_fields_set
    for name in LAZY_ONLY:
        if mode is not Mode.LAZY and getattr(options, name):
            raise RunFileError(
                f"backend_options.{name}: it acts on accumulated graphs, and {mode} mode "
                "accumulates none. Remove it, or set backend_options.mode: lazy"
            )
    if options.graph_limit_sync and options.graph_limit is None:
        raise RunFileError(
            "backend_options.graph_limit_sync: there is no limit to act on; set "
            "backend_options.graph_limit, too"
        )
    if "recipe_cache_mb" in given and options.recipe_cache is None:
        raise RunFileError(
            "backend_options.recipe_cache_mb: there is no cache; set backend_options.recipe_cache"
        )
    if options.softmax is not None and options.attention == "fused":
        raise RunFileError(
            "backend_options.softmax: fused attention has a softmax of its own, which this does "
            "not reach; set backend_options.attention: softmax, or remove it"
        )
    for name in ("fast_softmax", "attention_recompute"):
        if getattr(options, name) and (options.attention != "fused" or options.optimum_habana):
            raise RunFileError(
                f"backend_options.{name}: it is a property of fused attention, which this run does "
                f"not use; set backend_options.attention: fused, or remove {name}"
            )
    if options.optimum_habana and {"attention", "rms_norm", "rope"} & given:
        raise RunFileError(
            "backend_options.optimum_habana: its models bring their own attention, norms and "
            "rotary embeddings; remove attention, rms_norm and rope, or optimum_habana"
        )
