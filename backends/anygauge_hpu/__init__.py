"""The backend of Intel Gaudi cards."""

from __future__ import annotations

from collections.abc import Iterable

from anygauge.interface import BackendSpec, KernelSpec, hookimpl
from anygauge_hpu.probe import probe, why_missing

# Written out, not taken from the interface: it must not move along when the contract does.
WRITTEN_FOR = 1


@hookimpl
def anygauge_provide_backends() -> Iterable[BackendSpec]:
    """Announce the backend."""
    return [
        BackendSpec(
            name="hpu",
            factory="anygauge_hpu.backend:HpuBackend",
            options="anygauge_hpu.backend:HpuOptions",
            probe=probe,
            api_version=WRITTEN_FOR,
            priority=100,
            drives="Intel Gaudi cards",
            hardware="anygauge_hpu:device.toml",
        )
    ]


@hookimpl
def anygauge_provide_kernels() -> Iterable[KernelSpec]:
    """Announce the kernels; the backend prefers among them by its options."""
    return [
        KernelSpec(
            operation=operation,
            name=name,
            factory=f"anygauge_hpu.gaudi_kernels:{function}",
            api_version=WRITTEN_FOR,
            device_types=frozenset({"hpu"}),
            missing=why_missing,
            plain="softmax" if name.startswith("gaudi_softmax") else "",
            # Source: gaudi-pytorch-bridge 1.19, hpu_ops/backend/optimizer_adamw_gen.cpp.
            counterpart="early_epsilon" if operation == "adamw" else "",
        )
        for operation, name, function in (
            ("attention", "gaudi_fused", "fused_attention"),
            ("attention", "gaudi_fused_fast", "fused_attention_fast"),
            ("attention", "gaudi_fused_recompute", "fused_attention_recompute"),
            ("attention", "gaudi_fused_fast_recompute", "fused_attention_fast_recompute"),
            ("attention", "gaudi_softmax_bf16", "attention_with_softmax_in_bfloat16"),
            ("attention", "gaudi_softmax_fp32", "attention_with_softmax_in_float32"),
            ("softmax", "gaudi_bf16", "softmax_in_bfloat16"),
            ("softmax", "gaudi_fp32", "softmax_in_float32"),
            ("rms_norm", "gaudi_fused", "fused_rms_norm"),
            ("rope", "gaudi_fused", "fused_rope"),
            ("adamw", "gaudi_fused", "fused_adamw"),
            ("clip_grad_norm", "gaudi_fused", "fused_clip_grad_norm"),
        )
    ]
