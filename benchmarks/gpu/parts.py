"""The parts of ``make gpu`` and ``make gpu-full``, in order, with their shares of the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part.

    Attributes:
        share: of the time, beside the other parts' shares; what a part leaves, later ones get.
        run: ``module:function``, called with a `Context` and a `Report`.
        quick: whether `make gpu` has it; `make gpu-full` has all.
        chart: heading of the figure that its picture shows; empty for none.
    """

    name: str
    title: str
    share: float
    run: str
    quick: bool = True
    chart: str = ""


_HERE = "benchmarks.gpu."
SPEED = "tokens/s"

PARTS: Mapping[str, Part] = {
    part.name: part
    for part in (
        Part(
            name="parity",
            title="A run on the device beside the same run on the host",
            share=6,
            run=_HERE + "parity:run",
        ),
        Part(
            name="accuracy",
            title="Kernels against float64",
            share=3,
            run=_HERE + "operations:accuracy",
            chart="largest error",
        ),
        Part(
            name="kernels",
            title="The kernels' tests, with compiled kernels",
            share=8,
            run=_HERE + "pytests:kernels",
        ),
        Part(
            name="softmax",
            title="Softmax beside torch and Liger",
            share=4,
            run=_HERE + "operations:softmax",
            chart="forward + backward, ms",
        ),
        Part(
            name="loss",
            title="The loss beside torch and Liger",
            share=4,
            run=_HERE + "operations:loss",
            chart="forward + backward, ms",
        ),
        Part(
            name="training",
            title="A random Llama of 0.5B parameters on one device",
            share=20,
            run=_HERE + "training:one_device",
            chart=SPEED,
        ),
        Part(
            name="attention",
            title="Attention, padded and packed",
            share=4,
            run=_HERE + "operations:attention",
            quick=False,
            chart="forward + backward, ms",
        ),
        Part(
            name="lora",
            title="LoRA layers beside peft's",
            share=3,
            run=_HERE + "operations:lora",
            quick=False,
            chart="forward + backward, ms",
        ),
        Part(
            name="compiled",
            title="Beside a trainer with torch.compile",
            share=8,
            run=_HERE + "training:compiled",
            quick=False,
            chart=SPEED,
        ),
        Part(
            name="trl",
            title="Rows of different length, beside TRL",
            share=12,
            run=_HERE + "training:trl",
            quick=False,
            chart=SPEED,
        ),
        Part(
            name="sharded",
            title="Several devices: ddp, fsdp and zero beside loops by hand",
            share=16,
            run=_HERE + "training:sharded",
            quick=False,
            chart=SPEED,
        ),
        Part(
            name="3b",
            title="A random Llama of 3B parameters",
            share=10,
            run=_HERE + "training:llama_3b",
            quick=False,
            chart=SPEED,
        ),
        Part(
            name="8b",
            title="A random Llama of 8B parameters",
            share=16,
            run=_HERE + "training:llama_8b",
            quick=False,
            chart=SPEED,
        ),
        Part(
            name="kit",
            title="The conformance kit",
            share=8,
            run=_HERE + "pytests:kit",
        ),
    )
}


def names(full: bool) -> list[str]:
    """Those of one of the two commands."""
    return [name for name, part in PARTS.items() if full or part.quick]
