"""The parts of ``make gpu`` and ``make gpu-full``, in order, with their shares of the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """One part.

    Attributes:
        share: of the time, beside the other parts' shares; what a part leaves, later ones get.
        run: ``module:function``, called with a `Context` and a `Report`.
        quick: whether `make gpu` has it; `make gpu-full` has all.
    """

    name: str
    title: str
    share: float
    run: str
    quick: bool = True


_HERE = "benchmarks.gpu."
_OPERATIONS, _PYTESTS, _TRAINING = _HERE + "operations:", _HERE + "pytests:", _HERE + "training:"
_LLAMA = "A random Llama of {} parameters"

PARTS: Mapping[str, Part] = {
    part.name: part
    for part in (
        Part(
            "parity", "A run on the device beside the same run on the host", 6, _HERE + "parity:run"
        ),
        Part("accuracy", "Kernels against float64", 3, _OPERATIONS + "accuracy"),
        Part("kernels", "The kernels' tests, with compiled kernels", 8, _PYTESTS + "kernels"),
        Part("softmax", "Softmax beside torch and Liger", 4, _OPERATIONS + "softmax"),
        Part("loss", "The loss beside torch and Liger", 4, _OPERATIONS + "loss"),
        Part("training", _LLAMA.format("0.5B") + " on one device", 20, _TRAINING + "one_device"),
        Part("attention", "Attention, padded and packed", 4, _OPERATIONS + "attention", False),
        Part("lora", "LoRA layers beside peft's", 3, _OPERATIONS + "lora", False),
        Part("compiled", "Beside a trainer with torch.compile", 8, _TRAINING + "compiled", False),
        Part("trl", "Rows of different length, beside TRL", 12, _TRAINING + "trl", False),
        Part(
            "sharded",
            "Several devices: ddp, fsdp and zero beside loops by hand",
            16,
            _TRAINING + "sharded",
            False,
        ),
        Part("3b", _LLAMA.format("3B"), 10, _TRAINING + "llama_3b", False),
        Part("8b", _LLAMA.format("8B"), 16, _TRAINING + "llama_8b", False),
        Part("kit", "The conformance kit", 8, _PYTESTS + "kit"),
    )
}


def names(full: bool) -> list[str]:
    """Those of one of the two commands."""
    return [name for name, part in PARTS.items() if full or part.quick]
