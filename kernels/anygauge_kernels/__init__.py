"""Kernels that no vendor's library has to bring: softmax, attention around it, the loss."""

from __future__ import annotations

from collections.abc import Iterable

from anygauge.interface import KernelSpec, hookimpl

# Written out, not taken from the interface: it must not move along when the contract does.
WRITTEN_FOR = 0


@hookimpl
def anygauge_provide_kernels() -> Iterable[KernelSpec]:
    """Announce the kernels."""
    return [
        KernelSpec(
            operation="softmax",
            name="reference",
            factory="anygauge_kernels.softmax:reference",
            api_version=WRITTEN_FOR,
        ),
        KernelSpec(
            operation="attention",
            name="softmax",
            factory="anygauge_kernels.attention:with_softmax",
            api_version=WRITTEN_FOR,
            uses=("softmax",),
        ),
        KernelSpec(
            operation="attention",
            name="blocks",
            factory="anygauge_kernels.blocks:compiled",
            api_version=WRITTEN_FOR,
            device_types=frozenset({"cuda"}),
        ),
        KernelSpec(
            operation="linear_cross_entropy",
            name="chunked",
            factory="anygauge_kernels.linear_cross_entropy:chunked",
            api_version=WRITTEN_FOR,
            default=True,
        ),
    ]
