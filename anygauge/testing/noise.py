"""How far rounding alone may take a run's losses from the host's, derived from the arithmetic.

With the unit roundoff u of the compute type (2^-24 in float32, 2^-8 in bfloat16) and n operations
in series whose results are rounded, by 0.4 u each (root of the mean square), a value in the forward
is off by ``0.4 sqrt(n) u`` relative to its size. The host's is off by as much, in another way: both
differ by about ``e = 0.4 sqrt(2 n) u``. Sums of K terms that are kept in float32 add ``sqrt(K)
2^-24``.

- The loss of a step is a mean over M tokens, whose errors are mostly independent: ``e / sqrt(M)``.
  It is itself kept in float32, so a rounding of that is added.
- Weights differ after an update. The error of a gradient is about ``g = 0.4 sqrt(4 n) u``, plus
  that of sums, relative to its size. Adam moves each element by about ``lr``, and by as much more
  or less, relatively, as its gradient is off: independent errors of all elements change later
  losses by ``g lr |gradient|``, with the norm that the host's run recorded. Elements whose gradient
  is smaller than its error go the other way: of N elements so many, and by so little each, that it
  costs ``g^2 lr sqrt(N) |gradient|``.
- The norm of a gradient averages over tokens, too: ``g / sqrt(M)``. Each update before it adds as
  much, for weights that differ by a part g of what they moved.

The bound of a loss is `MARGIN` times the sum of the first two, relative to the loss; that of a norm
`MARGIN` times the third.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LOSS, NORM, EVALUATION = "loss", "gradient's norm", "evaluation"
Key = tuple[str, int]
"""One of these, and its step of training from 1; of an evaluation, the steps done before it."""
LAYERS = 2
IN_A_LAYER = 24
"""Operations in series of a decoder layer whose results are rounded: two norms of three, three
products of attention and its softmax, positions, two products of the feed-forward and its gate,
the adapter beside each product, and two sums with what came in."""
AROUND = 6
"""Embedding, last norm, output layer and the loss."""
ROUNDINGS = LAYERS * IN_A_LAYER + AROUND
"""Operations in series of one forward."""
TERMS = 384
"""Of the longest sum: the softmax over the vocabulary."""
TYPICAL = 0.4
"""Root of the mean square of a rounding's error, in unit roundoffs."""
RUNS = 2
"""Whose roundings are independent: the device's and the host's."""
MARGIN = 6.0
"""For the tail of what is typical, and for functions such as exp that are off by some roundings."""

UNIT_ROUNDOFF: Mapping[str, float] = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def error_of_values(dtype: str, *, passes: int = 1) -> float:
    """Typical relative difference of values in the forward, or of gradients with two passes."""
    rounded = TYPICAL * (RUNS * passes * ROUNDINGS) ** 0.5 * UNIT_ROUNDOFF[dtype]
    return float(rounded + TERMS**0.5 * UNIT_ROUNDOFF["float32"])


def loss_bound(dtype: str, loss: float, tokens: int, moved: float) -> float:
    """Largest relative difference of a loss that rounding explains.

    Args:
        loss: nats per loss token.
        tokens: loss tokens that it is the mean of.
        moved: `drift` of the updates before it, summed.
    """
    forward = error_of_values(dtype) / max(1, tokens) ** 0.5 + UNIT_ROUNDOFF["float32"]
    return float(MARGIN * (forward + moved / abs(loss)))


def drift(dtype: str, lr: float, norm: float, trained: int) -> float:
    """What rounding in one update may change later losses by, in nats.

    Args:
        norm: of the gradient.
        trained: elements that are updated.
    """
    off = error_of_values(dtype, passes=2)
    return float(lr * norm * (off + off**2 * trained**0.5))


def bounds(dtype: str, records: Sequence[Mapping[str, Any]], trained: int) -> dict[Key, float]:
    """Largest relative differences from the host's run that rounding explains.

    Args:
        records: of the host's ``metrics.jsonl``.
        trained: elements that the run trains.
    """
    found: dict[Key, float] = {}
    moved, updates = 0.0, 0
    for each in records:
        if "loss" in each:
            step, tokens, updates = each["step"], each["num_loss_tokens"], updates + 1
            found[LOSS, step] = loss_bound(dtype, each["loss"], tokens, moved)
            off = error_of_values(dtype, passes=2) / max(1, tokens) ** 0.5
            found[NORM, step] = MARGIN * off * updates
            moved += drift(dtype, each["lr"], each["grad_norm"], trained)
        elif "eval_loss" in each:
            loss, tokens = each["eval_loss"], each["eval_tokens"]
            found[EVALUATION, each["step"]] = loss_bound(dtype, loss, tokens, moved)
    return found
