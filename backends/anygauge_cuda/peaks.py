"""Published peak rates of NVIDIA GPUs, by the name that the driver gives them.

Dense tensor-core rates: where a datasheet prints rates with sparsity only, half of that. A card
that is not listed has no known peak: a guess would make a wrong utilisation look measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from anygauge.interface import PeakFlops

_T = 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class _Card:
    """Operations per second; `float32` without tensor cores (no TF32). None: none, or unsure."""

    names: tuple[str, ...]
    datasheet: str
    float32: float | None
    float16: float | None
    bfloat16: float | None


# Whole names only: "NVIDIA A100-SXM4-40GB MIG 1g.5gb" is a slice of a card and has a slice of its
# peak; "NVIDIA A10G", "NVIDIA H20" and "NVIDIA A100-SXM-64GB" are other cards.
_CARDS = (
    _Card(
        names=("NVIDIA B200",),
        datasheet="NVIDIA Blackwell datasheet (HGX B200)",
        float32=None,
        float16=2250 * _T,
        bfloat16=2250 * _T,
    ),
    _Card(
        names=("NVIDIA H200",),
        datasheet="NVIDIA H200 datasheet (SXM)",
        float32=67 * _T,
        float16=989.4 * _T,
        bfloat16=989.4 * _T,
    ),
    _Card(
        names=("NVIDIA H200 NVL",),
        datasheet="NVIDIA H200 datasheet (NVL)",
        float32=60 * _T,
        float16=835.5 * _T,
        bfloat16=835.5 * _T,
    ),
    _Card(
        names=("NVIDIA H100 80GB HBM3",),
        datasheet="NVIDIA H100 datasheet (SXM)",
        float32=67 * _T,
        float16=989.4 * _T,
        bfloat16=989.4 * _T,
    ),
    _Card(
        names=("NVIDIA H100 NVL",),
        datasheet="NVIDIA H100 datasheet (NVL)",
        float32=60 * _T,
        float16=835.5 * _T,
        bfloat16=835.5 * _T,
    ),
    _Card(
        names=("NVIDIA H100 PCIe",),
        datasheet="NVIDIA H100 datasheet (PCIe)",
        float32=51 * _T,
        float16=756 * _T,
        bfloat16=756 * _T,
    ),
    _Card(
        names=(
            "NVIDIA A100-SXM4-40GB",
            "NVIDIA A100-SXM4-80GB",
            "NVIDIA A100-PCIE-40GB",
            "NVIDIA A100 80GB PCIe",
        ),
        datasheet="NVIDIA A100 datasheet",
        float32=19.5 * _T,
        float16=312 * _T,
        bfloat16=312 * _T,
    ),
    _Card(
        names=("NVIDIA A10",),
        datasheet="NVIDIA A10 datasheet",
        float32=31.2 * _T,
        float16=125 * _T,
        bfloat16=125 * _T,
    ),
    _Card(
        names=("NVIDIA L4",),
        datasheet="NVIDIA L4 datasheet",
        float32=30.3 * _T,
        float16=121 * _T,
        bfloat16=121 * _T,
    ),
    _Card(
        names=("NVIDIA L40S",),
        datasheet="NVIDIA L40S datasheet",
        float32=91.6 * _T,
        float16=362.05 * _T,
        bfloat16=362.05 * _T,
    ),
    _Card(
        names=("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"),
        datasheet="NVIDIA V100 datasheet (SXM2)",
        float32=15.7 * _T,
        float16=125 * _T,
        bfloat16=None,
    ),
    _Card(
        names=("Tesla V100-PCIE-16GB", "Tesla V100-PCIE-32GB"),
        datasheet="NVIDIA V100 datasheet (PCIe)",
        float32=14 * _T,
        float16=112 * _T,
        bfloat16=None,
    ),
    _Card(
        names=("Tesla T4",),
        datasheet="NVIDIA T4 datasheet",
        float32=8.1 * _T,
        float16=65 * _T,
        bfloat16=None,
    ),
)


def published_peak(device_name: str, dtype: str) -> PeakFlops | None:
    """The dense peak of a card for ``float32``, ``float16`` or ``bfloat16``, or None."""
    for card in _CARDS:
        if device_name in card.names:
            rates = {"float32": card.float32, "float16": card.float16, "bfloat16": card.bfloat16}
            value = rates.get(dtype)
            return None if value is None else PeakFlops(value=value, source=card.datasheet)
    return None
