"""Proof of a saved result: loaded onto a fresh base on the host, it gives the trained logits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from anygauge.interface import ModelError
from anygauge.util.text import first_line

PROBE_TOKENS = 16

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""By compute type: `relative_difference` that needs no explanation. Device and host add up in other
orders, and every sum is rounded to the type's digits."""

ROUNDINGS = 4
"""A larger difference is rounding up to so many times what `_rounding_effect` finds. There products
are rounded alike and attention is not; between a device and the host all are rounded independently,
which gave twice as much (32 layers of Llama, 0.1B parameters)."""

HEADROOM = 1.25
"""Host memory needed, as a multiple of the parameters' bytes: activations, and loading a shard."""


UNVERIFIED = "-unverified"
"""What is added to the name of a folder that failed."""


class VerificationError(ModelError):
    """The saved result does not give what the trained model gives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What the check of a saved result found.

    Attributes:
        reloaded: whether it was loaded from its files.
        logits: `relative_difference` from the trained model's logits on the probe; None where
            they were not compared.
        effect: the same between reloaded adapter and its base: what the adapter does; None for
            whole models.
        why: what the figures mean, or why there are none.
    """

    reloaded: bool
    logits: float | None = None
    effect: float | None = None
    why: str

    def record(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return asdict(self)


def probe_tokens(vocabulary: int) -> Tensor:
    """The fixed probe: (1, 16) int64, on the host."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (1, PROBE_TOKENS), generator=generator)


def relative_difference(one: Tensor, other: Tensor) -> float:
    """Norm of the difference of all logits, divided by the norm of `other`.

    The norm, and not the largest difference: of millions of rounded logits, some one is far off.
    """
    one, other = one.float(), other.float()
    return ((one - other).norm() / other.norm().clamp_min(1e-30)).item()


def no_room(elements: int, dtype: torch.dtype) -> str:
    """Why a second copy of a model in `dtype` does not fit in host memory; "" if it does.

    Args:
        elements: of all its parameters, unsharded.
    """
    needed, available = int(elements * dtype.itemsize * HEADROOM), available_memory()
    if needed <= available:
        return ""
    return (
        f"not compared: a second copy of the model needs {needed / 2**30:.1f} GiB of host "
        f"memory, and {available / 2**30:.1f} GiB are available"
    )


def available_memory() -> int:
    """Bytes of host memory that this process may still take: the least of what the kernel says is
    available and what the control group leaves."""
    available = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # "max" is not a number: there is no limit
        limit = int((group / "memory.max").read_text())
        available = min(available, limit - int((group / "memory.current").read_text()))
    return available


def verify(
    trained: Tensor,
    reload: Callable[[], Any],
    *,
    dtype: torch.dtype,
    name: str,
    vocabulary: int | None = None,
) -> Verification:
    """Compare logits of the trained model with those of what was saved.

    Args:
        trained: (1, 16, V), on the host: the trained model's logits of `probe_tokens`.
        reload: loads what was saved, on the host, in evaluation mode; a peft model where it is an
            adapter.
        dtype: the compute type.
        name: of the result, for messages.
        vocabulary: what the probe was drawn from; None for as many tokens as there are logits.

    Raises:
        VerificationError: they differ by more than the type's rounding, or the adapter's effect
            is lost.
    """
    model = reload()
    probe = probe_tokens(vocabulary or trained.shape[-1])
    # Some architectures are causal only where they are given a mask.
    inputs = {"input_ids": probe, "attention_mask": torch.ones_like(probe), "use_cache": False}
    effect = None
    with torch.no_grad():
        logits = model(**inputs).logits
        if hasattr(model, "disable_adapter"):
            with model.disable_adapter():
                effect = relative_difference(model(**inputs).logits, trained)
    difference = relative_difference(logits, trained)
    # Deep and wide models round more than any constant says.
    rounding = _rounding_effect(model, inputs, logits) if difference > TOLERANCE[dtype] else 0.0
    return judge(difference, effect, dtype=dtype, name=name, rounding=rounding)


def _rounding_effect(model: Any, inputs: dict[str, Any], logits: Tensor) -> float:
    """How far the same weights' logits move if attention adds up in another order.

    0 where a model's attention has one form only.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(base, "set_attn_implementation"):
        return 0.0
    with torch.no_grad(), contextlib.suppress(ValueError, ImportError):
        base.set_attn_implementation("sdpa")
        return relative_difference(model(**inputs).logits, logits)
    return 0.0


@contextlib.contextmanager
def failing_safely(name: str) -> Iterator[None]:
    """Turn whatever goes wrong into a failed verification: files that were written are not lost.

    Raises:
        VerificationError: instead of any other error.
    """
    try:
        yield
    except VerificationError:
        raise
    except BaseException as error:
        raise VerificationError(
            f"{name} could not be loaded again from its files: {first_line(error)}. {_advice(name)}"
        ) from error


def _advice(name: str) -> str:
    return (
        f"It was kept as {name}{UNVERIFIED}, not as {name}: do not use it before you know why. "
        "adapter.verify: false saves an adapter without this check"
    )


def judge(
    difference: float,
    effect: float | None,
    *,
    dtype: torch.dtype,
    name: str,
    rounding: float = 0.0,
) -> Verification:
    """What a difference means, given the type's rounding and the adapter's effect.

    Args:
        rounding: of this model on this probe, as the host measured it; 0 where it did not.

    Raises:
        VerificationError: see `verify`.
    """
    # Beyond the type's own limit it is no rounding: attention's two forms compute other things.
    tolerance = max(TOLERANCE[dtype], ROUNDINGS * min(rounding, TOLERANCE[dtype]))
    said = str(dtype).removeprefix("torch.")
    advice = _advice(name)
    if not difference <= tolerance:
        raise VerificationError(
            f"{name}, loaded again from its files, gives logits that differ from the trained "
            f"model's by {difference:.1e} of their norm; {said} allows {tolerance:.0e}"
            f"{f', and rounding alone moves them by {rounding:.1e}' if rounding else ''}. {advice}"
        )
    if effect is None:
        return Verification(reloaded=True, logits=difference, why="equal within rounding")
    # Below it rounding alone may be as large as the whole effect of training.
    tells = effect > tolerance / 4
    if tells and difference > effect / 2:
        raise VerificationError(
            f"{name}, loaded again from its files, gives logits that differ from the trained "
            f"model's by {difference:.1e} of their norm, and the base alone by {effect:.1e}: the "
            f"adapter is not what was trained. {advice}"
        )
    return Verification(
        reloaded=True,
        logits=difference,
        effect=effect,
        why="equal within rounding"
        if tells
        else f"equal within rounding, which in {said} is as large as what training changed so far",
    )
