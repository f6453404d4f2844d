"""The backend object: what the core may ask about Gaudi cards."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from anygauge.interface import (
    FULL,
    Backend,
    Check,
    Collectives,
    LaunchProfile,
    Level,
    Setting,
    Support,
    UnsupportedError,
    own_image,
)
from anygauge_hpu.diagnostics import checks
from anygauge_hpu.environment import FABRICS, MODULES_VARIABLE, RULES, refuse_contradictions
from anygauge_hpu.fp8 import (
    convert,
    fp8_support,
    load_engine,
    signal_recomputation,
    training_context,
)
from anygauge_hpu.graph import HpuGraph
from anygauge_hpu.kernels import fused_name
from anygauge_hpu.mode import Mode, choose_mode
from anygauge_hpu.modules import PATTERNS
from anygauge_hpu.options import HpuOptions, check_options
from anygauge_hpu.placement import HpuPlacement
from anygauge_hpu.software import PLUGIN, RELEASES, installed_version

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


class HpuCollectives(Collectives):
    """HCCL. It has no mean: the sum is divided, as everywhere. Gaudi's software replaces torch's
    calls that make groups by ones without ``device_id``, so that it must not be passed."""

    process_group_backend = "hccl"


class HpuBackend(Backend):
    """Gaudi cards. Options: see `anygauge_hpu.options`."""

    name = "hpu"
    device_type = "hpu"
    placement_class = HpuPlacement
    placement: HpuPlacement
    collectives_class = HpuCollectives
    attention = "eager"
    options: HpuOptions
    fabrics = FABRICS
    environment_rules = RULES
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
        "quantised_base": Support(
            Level.PARTIAL,
            "bitsandbytes 0.50 decodes nf4 there, and multiplies in the compute type; not tried on "
            "a card",
        ),
        "quantised_base_int8": Support(
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
            Level.UNSUPPORTED_BY_VERSION,
            "bitsandbytes 0.50 has no optimizer for these cards",
        ),
    }

    def __init__(self, options: HpuOptions | None = None) -> None:
        """Raises: RunFileError: an option means nothing with another one."""
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
            Setting(
                name="accelerator",
                value="hpu",
                reason="the run asked for Gaudi cards, whatever else is installed",
                source="deepspeed/accelerator/real_accelerator.py",
            ),
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
        """Let optimum-habana replace transformers' models, where the run file asks for it.

        Raises:
            UnsupportedError: it is not installed whole, or rows are packed, which it or the form of
                fused attention does not serve.
        """
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
        """Intel's layers in place of torch's, as optimum-habana: see `anygauge_hpu.fp8`.

        Raises:
            UnsupportedError: layers recompute by torch's newer form, the card or its software has
                no FP8, or the model no layer for it.
        """
        if reentrant is False:
            raise UnsupportedError(
                "precision.fp8: Intel tests it with torch's reentrant form of recomputation alone. "
                "Use strategy: {name: zero, reentrant: true}, or set train.gradient_checkpointing: "
                "false"
            )
        engine = load_engine()
        # In optimum-habana's order (trainer.py): first recomputation, then accelerate converts.
        if reentrant:
            signal_recomputation(model, engine)
        # Kept from forward to backward, all layers in FP8 would be a whole model on each card.
        convert(model, kept, engine, minimize_memory=reentrant is None)
        return training_context(engine)

    def diagnostics(self) -> Sequence[Check]:
        """See `anygauge_hpu.diagnostics`."""
        return checks()


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
