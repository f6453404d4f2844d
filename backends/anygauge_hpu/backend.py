"""The backend object: what the core may ask about Gaudi cards."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field

from anygauge.interface import (
    FULL,
    Backend,
    Collectives,
    Compiler,
    Graph,
    HeldAtOnce,
    LaunchProfile,
    Level,
    Options,
    Phase,
    RunFileError,
    Setting,
    ShapeKind,
    ShapePolicy,
    Support,
    UnsupportedError,
    installed_version,
    own_image,
)
from anygauge_hpu.diagnostics import RELEASES, checks
from anygauge_hpu.environment import (
    FABRICS,
    MODULES_VARIABLE,
    RULES,
    Mode,
    choose_mode,
    refuse_contradictions,
)
from anygauge_hpu.gaudi_fp8 import fp8_support, train_in_fp8
from anygauge_hpu.gaudi_kernels import fused_name
from anygauge_hpu.placement import HpuPlacement
from anygauge_hpu.probe import PATTERNS, PLUGIN

if TYPE_CHECKING:
    from torch import nn

# Source: Intel's instructions for several nodes, as optimum-habana's README has them.
_CONTAINER = (
    "-e=HABANA_VISIBLE_DEVICES=all",
    "-e=OMPI_MCA_btl_vader_single_copy_mechanism=none",
    "--cap-add=sys_nice",
    "--net=host",
    "--ipc=host",
)
# Sources: gaudi-pytorch-bridge 1.19, habana_frameworks/torch/core/weight_sharing.py
# (DevicePlacementChanger), torch/distributed/fsdp/_fully_shard (_move_states_to_device); the
# README of optimum-habana's examples/language-modeling, multi-card fine-tuning with FSDP.
NO_FSDP_IN_LAZY_MODE = (
    "in lazy mode Gaudi's software puts another object in a parameter's place when it moves to the "
    "card, which FSDP2 then does not find in its module; optimum-habana runs FSDP outside of lazy "
    "mode alone. Set backend_options.mode: compile, or another strategy"
)


# -- options -----------------------------------------------------------------------------------

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
        "while the device runs the other; no use with sync_on_release",
    )
    sync_on_release: bool = Field(
        False,
        description="the host waits for the device before ZeRO-3 releases a gathered weight, as "
        "Intel's DeepSpeed before 1.16",
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
        description="compute each length of the run in the first two steps of a process, so that "
        "no later step compiles graphs",
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
        description="the optimized softmax of fused attention, as optimum-habana's "
        "flash_attention_fast_softmax",
    )
    attention_recompute: bool = Field(
        False,
        description="fused attention computes its scores again in backward, as optimum-habana's "
        "flash_attention_recompute",
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
        False, description="let optimum-habana adapt transformers' models before one is built"
    )


def check_options(options: HpuOptions, mode: Mode) -> None:
    """Refuse an option that means nothing with another one (`RunFileError`)."""
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


# -- graphs ------------------------------------------------------------------------------------

COMPILER = "hpu_backend"
"""torch.compile's backend (gaudi-pytorch-bridge, dynamo/compile_backend/backends.py)."""

COUNTERS = (
    ("compiled", "graph_compilation", "TotalNumber", 1),
    ("compile_s", "graph_compilation", "TotalTime", 1e-6),  # given in microseconds
    ("fallbacks", "cpu_fallback", "TotalNumber", 1),
    ("reused", "recipe_cache", "TotalHit", 1),
)
"""Name of a counter -> the library's metric, its statistic, and what that is multiplied with."""


WARM_UP = 2
"""After one alone, a width that only the first step had is compiled once more: from the second on,
DeepSpeed fetches weights ahead, in other pieces (counted: docs/gaudi.md, the census)."""

_REENTRANT = (
    "lazy mode has been run with the reentrant form alone: Intel's DeepSpeed and optimum-habana "
    "recompute by a function of that form, which ends the graph before each layer"
)
"""Source: HabanaAI/DeepSpeed 1.21.0, activation_checkpointing/checkpointing.py; optimum-habana,
trainer.py."""


_HELD = HeldAtOnce(
    share=0.474,
    source="fitted to one run, LoRA of Llama-2-70B on 8 cards, whose peak was published as 73.9 GB",
)
"""Nothing else is published of the memory of Gaudi's graphs."""


class HpuGraph(Graph):
    """Graphs of a mode. In lazy mode the limit itself is kept by Gaudi's library, which reads it
    from the environment."""

    def __init__(self, mode: Mode, options: HpuOptions) -> None:
        self._mode = mode
        self._between = options.split_forward_backward
        self.accumulates = mode is Mode.LAZY
        self.limit = options.graph_limit if mode is Mode.LAZY else None
        # Intel's DeepSpeed did this up to 1.15.1, as a workaround, and not since 1.16.0
        # (runtime/zero/partition_parameters.py, free_param): no release that runs here needs it.
        self.sync_on_release = options.sync_on_release
        self.reentrant_only = _REENTRANT if mode is Mode.LAZY else ""
        # Every new shape is compiled anew, in each mode.
        self.shapes = ShapePolicy(
            kind=ShapeKind.BUCKETED,
            multiple=32,
            buckets=options.buckets,
            warm_up=WARM_UP if options.warm_up else 0,
        )
        self.held = None if mode is Mode.EAGER else _HELD
        self.compiler = (
            Compiler(backend=COMPILER, regions="layer") if mode is Mode.COMPILE else None
        )

    def mark_step(self, phase: Phase) -> None:
        """Cut the graph at each place that a phase names, after forward only if that was asked for.

        Engines call it after forward, backward and update (also forward in an evaluation),
        recomputation before a layer computes its activations again, and the loss before and after
        each of its chunks. Cuts in lazy mode alone: in the others, the library's function does
        nothing but warn.
        """
        if self._mode is not Mode.LAZY or (phase is Phase.FORWARD and not self._between):
            return
        from habana_frameworks.torch.core import mark_step

        mark_step()

    def counters(self) -> Mapping[str, float]:
        """By Gaudi's own metrics: graphs compiled so far and the seconds that took, operators that
        the host ran in the device's place, and graphs that a recipe was there for.

        The last is counted only where ``PT_HPU_ENABLE_CACHE_METRICS=1`` is exported: the library
        calls Python for every graph then (gaudi-pytorch-bridge, hpu/metrics/metrics.py).
        """
        from habana_frameworks.torch.hpu.metrics import metric_global

        found = {}
        for key, metric_name, tag, unit in COUNTERS:
            metric = metric_global(metric_name)
            stats = {} if metric is None else dict(metric.stats())
            if tag in stats:
                found[key] = float(stats[tag]) * unit
        return found


# -- the backend -------------------------------------------------------------------------------


class HpuCollectives(Collectives):
    """HCCL. It has no mean: the sum is divided, as everywhere. Gaudi's software replaces torch's
    calls that make groups by ones without ``device_id``, so that it must not be passed."""

    process_group_backend = "hccl"


class HpuBackend(Backend):
    """Gaudi cards. Options: see `HpuOptions`."""

    name = "hpu"
    device_type = "hpu"
    placement_class = HpuPlacement
    placement: HpuPlacement
    collectives_class = HpuCollectives
    attention = "eager"
    options: HpuOptions
    engine_names: Mapping[str, str] = {"deepspeed": "hpu"}
    fabrics = FABRICS
    environment_rules = RULES
    diagnostics = staticmethod(checks)
    libraries = (PLUGIN,)
    variables = (MODULES_VARIABLE,)
    readings = PATTERNS
    launch = LaunchProfile(
        visibility_variable=MODULES_VARIABLE,
        image=own_image("hpu", RELEASES),
        releases=RELEASES,
        container_flags=("--runtime=habana", *_CONTAINER),
        # Where Intel's package habanalabs-container-runtime has it; Docker knows it by name.
        podman_flags=("--runtime=/usr/bin/habana-container-runtime", *_CONTAINER),
        cluster_resource="habana.ai/gaudi",
        # Source: docs.habana.ai, Kubernetes quick start.
        node_resources={"hugepages-2Mi": "95000Mi", "memory": "409Gi"},
        # Its runtime gives a pod the cards' uverbs devices; without them, opening a card ends with
        # synStatus=26. Source: docs.habana.ai, Base Operator DaemonSets: habana-container-runtime.
        runtime_class="habana",
        binding="cores",
    )

    capabilities: Mapping[str, Support] = {
        "bfloat16": FULL,
        "float16": Support(
            Level.PARTIAL,
            "not on cards of the first generation; optimum-habana trains in bfloat16 alone",
        ),
        "collectives": FULL,
        # Source: bitsandbytes 0.50, backends/hpu/ops.py: its one kernel there decodes nf4.
        "quantized_base": Support(
            Level.PARTIAL,
            "bitsandbytes 0.50 decodes nf4 there, and multiplies in the compute type; not tried on "
            "a card",
        ),
        "quantized_base_int8": Support(
            Level.UNSUPPORTED_BY_VERSION,
            "bitsandbytes 0.50 has kernels for nf4 alone on these cards; use nf4",
        ),
        "paged_memory": Support(
            Level.UNSUPPORTED_BY_VERSION,
            "bitsandbytes 0.50 has such memory for CUDA, ROCm and XPU alone",
        ),
        # Source: gaudi-pytorch-bridge 1.19, scripts/ops_list/ops_table.csv: _fused_adamw_ is not an
        # operation of the device; hpu_ops/cpu_fallback.cpp has the host compute those that are not.
        "fused_adamw": Support(
            Level.UNSUPPORTED_BY_VERSION,
            "the last release with public sources, 1.19, has no such kernel; a run uses the "
            "library's own fused AdamW",
        ),
        # Source: bitsandbytes 0.50, backends/hpu/ops.py.
        "adamw_8bit": Support(
            Level.UNSUPPORTED_BY_VERSION, "bitsandbytes 0.50 has no optimizer for these cards"
        ),
    }

    def __init__(self, options: HpuOptions | None = None) -> None:
        super().__init__(options or HpuOptions())
        version = installed_version(PLUGIN)
        self.mode, self.mode_reason = choose_mode(
            self.options.mode, {PLUGIN: version} if version else {}
        )
        check_options(self.options, self.mode)
        self.placement.mode = self.mode
        self.graph = HpuGraph(self.mode, self.options)
        if self.mode is Mode.LAZY:
            self.unsupported_engines = {"fsdp2": NO_FSDP_IN_LAZY_MODE}
        self.kernels = _preferred_kernels(self.options)
        self.capabilities = {
            **self.capabilities,
            "fp8_products": fp8_support(installed=version is not None),
        }

    def check_environment(self, environ: Mapping[str, str]) -> None:
        """Refuse what contradicts the mode, and what would end the process."""
        refuse_contradictions(environ, self.mode)

    def engine_settings(self, engine: str) -> Sequence[Setting]:
        """DeepSpeed on Gaudi: its own accelerator for the device, and no overlap."""
        if engine != "deepspeed":
            return ()
        source = "Intel's article on Llama 2 70B; optimum-habana's ZeRO-3 configuration"
        return (
            *super().engine_settings(engine),
            Setting(
                name="zero_optimization.overlap_comm",
                value=False,
                reason="the device resolves what depends on what by itself; a second stream costs "
                "memory",
                source=source,
            ),
            Setting(
                name="zero_optimization.contiguous_gradients",
                value=False,
                reason="no copy of the gradients into a buffer of their own",
                source=source,
            ),
        )

    def adapt_models(self, *, packing: bool) -> None:
        """Let optimum-habana replace transformers' models, where the run file asks for it."""
        if packing and self.options.fast_softmax and self.options.attention_recompute:
            raise UnsupportedError(
                "backend_options.fast_softmax and attention_recompute: Gaudi's fused attention "
                "trains with both only where each token sees all before it, and packed rows have a "
                "mask (FusedSDPA.py, sdpa_fwd_wrapper). Remove one of them, or set data.packing: "
                "false"
            )
        if not self.options.optimum_habana:
            return
        if packing:
            raise UnsupportedError(
                "backend_options.optimum_habana: its models bring their own attention, which was "
                "not tested to isolate packed rows. Set data.packing: false, or remove it"
            )
        if importlib.util.find_spec("optimum") is None or not installed_version("optimum-habana"):
            raise UnsupportedError(
                "backend_options.optimum_habana: it is not installed (pip install optimum-habana)"
            )
        try:
            from optimum.habana.transformers.modeling_utils import adapt_transformers_to_gaudi
        except ImportError as error:
            raise UnsupportedError(
                f"backend_options.optimum_habana: it cannot be imported: {error}. Install what it "
                "lacks (Intel's images have all of it), or remove the option"
            ) from error
        adapt_transformers_to_gaudi()

    def fp8_products(
        self, model: nn.Module, kept: Collection[nn.Module], *, reentrant: bool | None
    ) -> Callable[[], AbstractContextManager[Any]]:
        """See `anygauge_hpu.gaudi_fp8`."""
        return train_in_fp8(model, kept, reentrant)

    def make_deterministic(self) -> str:
        """See `Backend.make_deterministic`."""
        super().make_deterministic()
        return "Intel's documentation promises no equal bits for Gaudi; torch's switch is set"


def _preferred_kernels(options: HpuOptions) -> dict[str, str]:
    updates = {"adamw": "gaudi_fused", "clip_grad_norm": "gaudi_fused"}
    if options.optimum_habana:
        return updates
    fused = fused_name(fast=options.fast_softmax, recompute=options.attention_recompute)
    in_float32 = options.softmax == "float32"
    softmax = "gaudi_softmax_fp32" if in_float32 else "gaudi_softmax_bf16"
    return {
        "attention": fused if options.attention == "fused" else softmax,
        "softmax": "gaudi_bf16" if options.softmax == "bfloat16" else "gaudi_fp32",
        "rms_norm": "gaudi_fused" if options.rms_norm == "fused" else "reference",
        "rope": "gaudi_fused" if options.rope == "fused" else "reference",
        **updates,
    }
